"""Decode looks at the target between tokens once more when it is asked for blocks."""

import pytest
from tests.support.workers import TOKENS, Workers, prompt

from cluster.messages import RefusalReason, Refused, Release, Reserve, Reserved, Submit
from kvindex.core import InstanceId
from policy.core import CostCoefficients, SamplingParams
from policy.cost import step_s
from policy.details import told_s

pytestmark = pytest.mark.unit

PROMPT = prompt(40)


def announced_cost(pair: Workers) -> CostCoefficients:
    """What decode told of itself last: it answers by the same."""
    cost = pair.apps["d"].load().cost
    assert cost is not None
    return cost


async def reserve(pair: Workers, name: str, tbt_ms_max: float | None, **fields: object) -> object:
    work = pair.work(name, PROMPT, TOKENS, **fields)
    return await pair.ear.ask("d", Reserve(work, InstanceId("p"), 5.0, tbt_ms_max))


async def release(pair: Workers, reserved: object) -> None:
    assert isinstance(reserved, Reserved)
    await pair.ear.ask("d", Release(reserved.request_id, reserved.attempt, reserved.generation))


async def test_what_would_miss_its_target_beside_what_is_reserved_is_refused(pair: Workers) -> None:
    cost = announced_cost(pair)
    alone_ms, beside_ms = (step_s(cost, count, count * len(PROMPT)) * 1e3 for count in (1, 2))
    between_ms = (alone_ms + beside_ms) / 2
    first = await reserve(pair, "a", between_ms)
    assert isinstance(first, Reserved)
    refused = await reserve(pair, "b", between_ms)
    assert isinstance(refused, Refused)
    assert (refused.reason, refused.retry_after_s) == (RefusalReason.TBT, 1.0)
    assert refused.detail == (
        f"{told_s(beside_ms / 1e3)} between tokens predicted, wanted within {told_s(between_ms / 1e3)}"
    )
    await release(pair, first)
    # The refusal left nothing behind: there is room for it again.
    await release(pair, await reserve(pair, "b", between_ms))
    await pair.quiet()


async def test_samples_count_as_the_sequences_that_they_will_be(pair: Workers) -> None:
    cost = announced_cost(pair)
    within_ms = step_s(cost, 3, 3 * len(PROMPT)) * 1e3
    four = await reserve(pair, "a", within_ms, sampling=SamplingParams(TOKENS, samples=4))
    assert isinstance(four, Refused)
    assert four.reason is RefusalReason.TBT
    await release(pair, await reserve(pair, "b", within_ms, sampling=SamplingParams(TOKENS, samples=3)))
    await pair.quiet()


async def test_without_a_target_and_for_an_answer_that_goes_on_it_is_not_asked(pair: Workers) -> None:
    announced_cost(pair)
    assert isinstance(await reserve(pair, "a", 1e-9), Refused)
    await release(pair, await reserve(pair, "a", None))
    going_on = pair.work("b", PROMPT, TOKENS, output_token_ids=b"\x05\x00\x00\x00")
    await release(pair, await pair.ear.ask("d", Reserve(going_on, InstanceId("p"), 5.0, 1e-9)))
    await pair.quiet()


async def test_prefill_hands_the_target_on_and_tells_the_gateway_why_it_failed(pair: Workers) -> None:
    announced_cost(pair)
    work = pair.work("r", PROMPT, TOKENS)
    await pair.ear.ask("p", Submit(work, InstanceId("d"), tbt_ms_max=1e-9))
    await pair.ear.wait(lambda: pair.ear.failed)
    (failed,) = pair.ear.failed
    assert (failed.retryable, failed.reason, failed.culprit) == (True, RefusalReason.TBT, "d")
    assert "between tokens predicted" in failed.detail
    await pair.quiet()
