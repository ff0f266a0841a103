"""What a load says of the work that is left: the step under way counts as far as it is thought to be."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from tests.support.workers import PAIR, TOKENS, Workers, prompt, workers

from engine.engine import SequenceStep, StepResult
from policy.core import QueuedRequest
from worker.app import WorkerApp

pytestmark = pytest.mark.unit

PROMPT = prompt(100)


class HeldSteps:
    """Every step of a worker waits in the engine until it may go on."""

    def __init__(self, app: WorkerApp) -> None:
        self.begun = asyncio.Event()
        self.may_end = asyncio.Event()
        self._engine = app._node.engine
        self._run = self._engine.run
        self._engine.run = self.run

    async def run(self, sequences: list[SequenceStep], on_layer: object) -> StepResult:
        self.begun.set()
        await self.may_end.wait()
        return await self._run(sequences, on_layer)


@pytest.fixture
async def pair(tiny: Path):
    async with workers(tiny, PAIR) as running:
        yield running


def queued(cluster: Workers) -> QueuedRequest:
    (only,) = cluster.apps["p"].load().queued
    assert only.new_tokens + only.prefix_tokens >= len(PROMPT)
    return only


def expect_step_s(app: WorkerApp, seconds: float) -> None:
    """Announce that a step with the whole prompt takes so long."""
    node = app._node
    assert node.cost is not None
    node.cost = replace(
        node.cost, prefill_fixed_s=seconds, prefill_per_token_s=0.0, prefill_per_token_pair_s=0.0
    )
    app.load()


async def test_before_anything_is_known_of_the_step_nothing_counts_as_done(pair: Workers) -> None:
    steps = HeldSteps(pair.apps["p"])
    expect_step_s(pair.apps["p"], 1e6)
    await pair.submit("r", PROMPT, TOKENS)
    await steps.begun.wait()
    assert queued(pair).new_tokens == len(PROMPT)
    steps.may_end.set()
    await pair.ear.wait_finish("r")


async def test_the_step_under_way_counts_by_its_time(pair: Workers) -> None:
    steps = HeldSteps(pair.apps["p"])
    expect_step_s(pair.apps["p"], 1.0)
    await pair.submit("r", PROMPT, TOKENS)
    await steps.begun.wait()
    loop = asyncio.get_running_loop()
    started_s = loop.time()
    await asyncio.sleep(0.3)
    told, elapsed_s = queued(pair), loop.time() - started_s
    assert told.prefix_tokens == pytest.approx(min(1.0, elapsed_s) * len(PROMPT), abs=10)
    assert told.new_tokens == len(PROMPT) - told.prefix_tokens
    steps.may_end.set()
    await pair.ear.wait_finish("r")


async def test_a_step_that_takes_longer_than_expected_counts_as_done(pair: Workers) -> None:
    steps = HeldSteps(pair.apps["p"])
    expect_step_s(pair.apps["p"], 1e-6)
    await pair.submit("r", PROMPT, TOKENS)
    await steps.begun.wait()
    await asyncio.sleep(0.01)
    told = queued(pair)
    assert (told.new_tokens, told.prefix_tokens) == (0, len(PROMPT))
    steps.may_end.set()
    await pair.ear.wait_finish("r")


async def test_what_is_only_being_handed_over_is_computed(pair: Workers) -> None:
    """Its first token is there: nobody behind it waits for it to be computed."""
    committing, may_commit = asyncio.Event(), asyncio.Event()
    prefill = pair.apps["p"]._prefill
    assert prefill is not None
    await pair.submit("r", PROMPT, TOKENS)
    (request,) = (*prefill._active, *prefill._queue)
    finish = request._finish_handover

    async def finish_later() -> None:
        committing.set()
        await may_commit.wait()
        await finish()

    request._finish_handover = finish_later
    await asyncio.wait_for(committing.wait(), 10.0)
    assert queued(pair).new_tokens == 0
    may_commit.set()
    await pair.ear.wait_finish("r")
