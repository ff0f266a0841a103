"""Who may begin when blocks are short: nobody fails, waits longer or is thrown out for a wrong count."""

import asyncio
from pathlib import Path

import pytest
from tests.support.engines import sampled_answer
from tests.support.reference import Reference
from tests.support.workers import TOKENS, after_each_step, greedy, prompt, workers

from engine.layout import KVLayout
from engine.model_folder import ModelConfig
from policy.core import RequestId, Role, SamplingParams

pytestmark = pytest.mark.unit

COUPLED = {"w": (Role.PREFILL, Role.DECODE)}


def pool_bytes(tiny: Path, blocks: int) -> int:
    return blocks * KVLayout.of(ModelConfig.load(tiny)).block_bytes


async def test_who_waits_for_preempted_ones_begins_when_they_are_back(tiny: Path) -> None:
    """Not before them, and not only when another answer ends."""
    async with workers(tiny, COUPLED, pool_bytes=pool_bytes(tiny, 32)) as one:
        node = one.apps["w"]._node
        submitted: list[asyncio.Task[object]] = []

        def submit_while_one_is_preempted() -> None:
            if node.steps.preempted and not submitted:
                submit = one.submit("late", prompt(20, seed=3), 4, at=("w", "w"))
                submitted.append(asyncio.create_task(submit))

        after_each_step(one.apps["w"], submit_while_one_is_preempted)
        for seed, (name, tokens, output_tokens) in enumerate(
            [("oldest", 20, 400), ("old", 100, 150), ("young", 20, 280)]
        ):
            await one.submit(name, prompt(tokens, seed), output_tokens, at=("w", "w"))
        await one.ear.wait_finish("late")
        assert [request_id for request_id, _, _ in one.ear.finished] == ["old", "late"]


async def test_preempted_ones_come_back_before_a_new_request_begins(tiny: Path) -> None:
    """Also where every block is free: the new one could take them all."""
    async with workers(tiny, COUPLED, pool_bytes=pool_bytes(tiny, 20)) as one:
        node = one.apps["w"]._node
        submitted: list[asyncio.Task[object]] = []

        def submit_while_one_is_preempted() -> None:
            if node.steps.preempted and not submitted:
                submit = one.submit("late", prompt(290, seed=3), 4, at=("w", "w"))
                submitted.append(asyncio.create_task(submit))

        after_each_step(one.apps["w"], submit_while_one_is_preempted)
        await one.submit("old", prompt(100, seed=1), 200, at=("w", "w"))
        await one.submit("young", prompt(20, seed=2), 280, at=("w", "w"))
        await one.ear.wait_finish("late")
        assert [request_id for request_id, _, _ in one.ear.finished] == ["old", "young", "late"]


async def test_a_cached_prefix_is_not_counted_as_room_for_the_rest(tiny: Path, reference: Reference) -> None:
    """16 blocks: 6 cached, 9 in use, 1 free. Who needs the 6 and 2 more waits, and does not fail."""
    async with workers(tiny, COUPLED, pool_bytes=pool_bytes(tiny, 16)) as one:
        await one.submit("earlier", prompt(97), 1, at=("w", "w"))
        await one.ear.wait_finish("earlier")
        await one.submit("running", prompt(129, seed=1), 14, at=("w", "w"))
        await one.ear.wait(lambda: one.ear.answer("running"))
        assert one.apps["w"]._node.pool.stats().cached == 6
        await one.submit("next", prompt(113), 8, at=("w", "w"))
        await one.ear.wait(lambda: (RequestId("next"), 0, 0) in one.ear.finished or one.ear.failed)
        assert one.ear.failed == []
        assert one.ear.answer("next") == greedy(reference, prompt(113))[:8]


async def test_what_samples_will_need_is_promised_until_they_have_it(tiny: Path) -> None:
    """7 blocks and one for each of 8 samples leave no room for 7 more in 20."""
    async with workers(tiny, COUPLED, pool_bytes=pool_bytes(tiny, 20), step_tokens_max=16) as one:
        sampling = SamplingParams(4, samples=8, temperature=1.0, seed=7)
        await one.submit("many", prompt(100), 4, at=("w", "w"), sampling=sampling)
        await one.submit("next", prompt(97, seed=1), TOKENS, at=("w", "w"))
        answers = await one.ear.wait_answers("many", 8)
        assert answers == [sampled_answer(tiny, prompt(100), sampling, n) for n in range(8)]
        await one.ear.wait_finish("next")
        assert one.apps["w"]._node.metrics.preemptions.labels("recompute")._value.get() == 0
