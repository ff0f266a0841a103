"""The step loop over an engine that computes nothing: no sequence is lost, mixed up or forgotten."""

import pytest
from tests.support.step_bench import running

from policy.plan_step import StepLimits

pytestmark = pytest.mark.unit


async def test_sequences_that_run_out_of_blocks_together_both_go_on() -> None:
    """All are preempted in one plan: nobody is left whose end could wake the loop."""
    async with running(blocks=8) as bench:
        both = [bench.add(f"r{n}", [n] * 60, 24) for n in range(2)]
        for listener in both:
            await listener.expect_answer()


async def test_a_preempted_sequence_as_large_as_the_pool_comes_back() -> None:
    async with running(blocks=6) as bench:
        small = bench.add("small", [1] * 3, 13)
        large = bench.add("large", [2] * 75, 9)
        await small.expect_answer()
        await large.expect_answer()


async def test_two_attempts_of_one_request_are_two_sequences() -> None:
    """A cancel of the first may come later than the second does."""
    async with running(blocks=32, limits=StepLimits(16, 64)) as bench:
        first = bench.add("r", [1] * 20, 12, attempt=0)
        await first.begun.wait()
        second = bench.add("r", [2] * 50, 12, attempt=1)
        await first.expect_answer()
        await second.expect_answer()


async def test_who_left_hears_nothing_of_the_step_under_way() -> None:
    async with running(blocks=8) as bench:
        listener = bench.add("r", [1] * 20, 100)
        await listener.begun.wait()
        bench.steps.leave(listener.sequence)
        heard = len(listener.token_ids)
        await listener.leave()
        other = bench.add("s", [2] * 20, 5)
        await other.expect_answer()
        assert len(listener.token_ids) == heard


async def test_a_full_batch_does_not_keep_a_new_prompt_out() -> None:
    async with running(blocks=64, limits=StepLimits(64, 2)) as bench:
        running_ones = [bench.add(f"r{n}", [n] * 20, 200) for n in range(2)]
        for listener in running_ones:
            await listener.begun.wait()
        new = bench.add("new", [7] * 20, 5)
        await new.expect_answer()
        assert not any(listener.ended.is_set() for listener in running_ones)
        for listener in running_ones:
            await listener.expect_answer()


async def test_more_sequences_than_places_advance_together() -> None:
    async with running(blocks=64, limits=StepLimits(64, 2)) as bench:
        listeners = [bench.add(f"r{n}", [n] * 20, 60) for n in range(5)]
        for listener in listeners:
            await listener.begun.wait()
        started = [len(listener.token_ids) for listener in listeners]
        await listeners[0].expect_answer()
        advanced = [
            len(listener.token_ids) - before for listener, before in zip(listeners, started, strict=True)
        ]
        assert max(advanced[1:]) - min(advanced[1:]) <= 1
        for listener in listeners:
            await listener.expect_answer()
