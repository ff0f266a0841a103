"""Workers that compute beside the arena, as a GPU does: every block that others take from the arena is there,
every block that others wrote into it is computed on."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.support.engines import sampled_answer
from tests.support.reference import Reference
from tests.support.workers import PAIR, TOKENS, Workers, greedy, prompt, workers

from cluster.messages import Finish
from engine.layout import KVLayout
from engine.model_folder import ModelConfig
from policy.core import RequestId, Role, SamplingParams
from policy.preempt import Preemption

pytestmark = pytest.mark.unit

COUPLED_AND_DECODE = {"w": (Role.PREFILL, Role.DECODE), "d": (Role.DECODE,)}


@pytest.fixture
async def pair(tiny: Path) -> AsyncIterator[Workers]:
    async with workers(tiny, PAIR, step_tokens_max=32, own_cache=True) as both:
        assert not both.apps["d"]._node.engine._ready().computes_on_arena
        yield both


@pytest.mark.parametrize("length", [1, 15, 16, 17, 100])
async def test_a_handover_goes_through_both_arenas(pair: Workers, reference: Reference, length: int) -> None:
    await pair.submit("r", prompt(length), TOKENS)
    await pair.ear.wait_finish("r")
    assert pair.ear.answer("r") == greedy(reference, prompt(length))


async def test_what_was_computed_before_is_handed_over_from_the_arena(
    pair: Workers, reference: Reference
) -> None:
    """Prefill has the prompt's blocks by then, decode those of prompt and answer."""
    await pair.submit("first", prompt(50), TOKENS)
    await pair.ear.wait_finish("first")
    await pair.ear.ask("d", Finish(RequestId("first"), 0, TOKENS))
    longer = [*prompt(50), *greedy(reference, prompt(50)), *prompt(20, seed=1)]
    await pair.submit("second", longer, TOKENS)
    await pair.ear.wait_finish("second")
    assert pair.ear.answer("second") == greedy(reference, longer)
    assert pair.ear.cached_tokens[RequestId("second")] == 48


async def test_what_a_coupled_worker_computed_can_be_handed_over(tiny: Path, reference: Reference) -> None:
    """Nothing was streamed when these blocks were computed: prompt and answer of a request that stayed."""
    async with workers(tiny, COUPLED_AND_DECODE, own_cache=True) as cluster:
        await cluster.submit("first", prompt(50), TOKENS, at=("w", "w"))
        await cluster.ear.wait_finish("first")
        longer = [*prompt(50), *greedy(reference, prompt(50)), *prompt(20, seed=1)]
        await cluster.submit("second", longer, TOKENS, at=("w", "d"))
        await cluster.ear.wait_finish("second")
        assert cluster.ear.answer("second") == greedy(reference, longer)
        assert cluster.ear.cached_tokens[RequestId("second")] == 64


async def test_samples_fork_from_blocks_that_came_from_outside(pair: Workers, tiny: Path) -> None:
    sampling = SamplingParams(TOKENS, samples=3, temperature=1.0, seed=11)
    await pair.submit("r", prompt(40), TOKENS, sampling=sampling)
    answers = await pair.ear.wait_answers("r", 3)
    assert answers == [sampled_answer(tiny, prompt(40), sampling, sample) for sample in range(3)]


async def test_swapped_blocks_come_back_and_can_be_handed_over(tiny: Path, reference: Reference) -> None:
    block_bytes = KVLayout.of(ModelConfig.load(tiny)).block_bytes
    settings = {"pool_bytes": max(1 << 20, 9 * block_bytes), "swap_bytes": 64 * block_bytes}
    async with workers(tiny, COUPLED_AND_DECODE, own_cache=True, **settings) as cluster:
        blocks = cluster.apps["w"]._node.pool.stats().blocks
        requests = blocks // 4 + 2
        for number in range(requests):
            await cluster.submit(f"r{number}", prompt(40, seed=number), 60, at=("w", "w"))
        for number in range(requests):
            await cluster.ear.wait_finish(f"r{number}")
        metrics = cluster.apps["w"]._node.metrics
        assert metrics.preemptions.labels(Preemption.SWAP)._value.get() > 0
        for number in reversed(range(requests)):  # the latest were preempted, and are still cached
            longer = [*prompt(40, seed=number), *cluster.ear.answer(f"r{number}"), 7]
            await cluster.submit(f"again{number}", longer, 4, at=("w", "d"))
            await cluster.ear.wait_finish(f"again{number}")
            await cluster.ear.ask("d", Finish(RequestId(f"again{number}"), 0, 4))
            expected = reference.answers([longer], 4)[0].token_ids
            assert cluster.ear.answer(f"again{number}") == list(expected)
