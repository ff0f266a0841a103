"""Several samples of one prompt: each is what the engine would draw for it alone, blocks are shared, and
everything that can happen to a request happens to all of them."""

import asyncio
from pathlib import Path

import pytest
from tests.support.engines import sampled_answer
from tests.support.reference import Reference
from tests.support.workers import (
    PAIR,
    TOKENS,
    Workers,
    after_each_step,
    greedy,
    packed,
    prompt,
    workers,
)

from cluster.messages import Accepted, Cancel, Finish, RefusalReason, Refused, Reserve, Reserved, Resume
from engine.layout import KVLayout
from engine.model_folder import ModelConfig
from kvindex.core import InstanceId
from policy.core import FinishReason, RequestId, Role, SamplingParams

pytestmark = pytest.mark.unit

COUPLED = {"w": (Role.PREFILL, Role.DECODE)}
SAMPLES = 4
R = RequestId("r")


def sampled(samples: int = SAMPLES, tokens: int = TOKENS, **fields: object) -> SamplingParams:
    return SamplingParams(tokens, samples=samples, temperature=1.0, seed=11, **fields)


@pytest.mark.parametrize("length", [1, 16, 17, 40])
@pytest.mark.parametrize("roles", [PAIR, COUPLED], ids=["pair", "coupled"])
async def test_each_sample_is_drawn_as_if_it_were_alone(
    tiny: Path, roles: dict[str, tuple[Role, ...]], length: int
) -> None:
    async with workers(tiny, roles) as cluster:
        at = ("p", "d") if roles is PAIR else ("w", "w")
        await cluster.submit("r", prompt(length), TOKENS, at=at, sampling=sampled())
        answers = await cluster.ear.wait_answers("r", SAMPLES)
        assert answers == [sampled_answer(tiny, prompt(length), sampled(), n) for n in range(SAMPLES)]
        assert len({tuple(answer) for answer in answers}) == SAMPLES
        await cluster.ear.ask(at[1], Finish(R, 0, TOKENS))
        await cluster.quiet()


async def test_greedy_samples_are_all_the_models_answer(pair: Workers, reference: Reference) -> None:
    await pair.submit("r", prompt(40), TOKENS, sampling=SamplingParams(TOKENS, samples=3))
    assert await pair.ear.wait_answers("r", 3) == [greedy(reference, prompt(40))] * 3


async def test_samples_share_the_blocks_of_the_prompt(pair: Workers) -> None:
    """100 tokens are 6 full blocks and a partial one: 4 samples hold 6 blocks together, and their own."""
    decode = pair.apps["d"]
    most = 0

    def count() -> None:
        nonlocal most
        most = max(most, decode._node.pool.stats().in_use)

    after_each_step(decode, count)
    await pair.submit("r", prompt(100), TOKENS, sampling=sampled())
    await pair.ear.wait_answers("r", SAMPLES)
    own_blocks = -(-(100 + TOKENS) // 16) - 6
    assert 6 + SAMPLES <= most <= 6 + SAMPLES * own_blocks


async def test_a_reservation_covers_the_first_step_of_every_sample(pair: Workers) -> None:
    work = pair.work("r", prompt(40), TOKENS, sampling=sampled())
    answer = await pair.ear.ask("d", Reserve(work, InstanceId("p"), 5.0))
    assert isinstance(answer, Reserved)
    assert pair.apps["d"].load().blocks_in_use == 3 + SAMPLES
    assert len(answer.block_ids) == 3 * 4
    (listed,) = pair.apps["d"].load().running
    assert (listed.samples, listed.kv_tokens, listed.committed) == (SAMPLES, 40, False)
    await pair.ear.ask("d", Cancel(R, 0))
    await pair.quiet()


async def test_samples_count_one_each_where_a_decode_is_full(tiny: Path) -> None:
    """Two batches of two may be held: one more than that is refused, but the first may be any number."""
    async with workers(tiny, PAIR, batch_requests_max=2) as both:

        async def reserve(name: str, samples: int) -> object:
            work = both.work(name, prompt(20), TOKENS, sampling=sampled(samples=samples))
            return await both.ear.ask("d", Reserve(work, InstanceId("p"), 5.0))

        assert isinstance(await reserve("one", 1), Reserved)
        refused = await reserve("four", 4)
        assert isinstance(refused, Refused)
        assert refused.reason is RefusalReason.QUEUE_FULL
        assert isinstance(await reserve("three", 3), Reserved)
        await both.ear.ask("d", Cancel(RequestId("one"), 0))
        await both.ear.ask("d", Cancel(RequestId("three"), 0))
        await both.quiet()
        assert isinstance(await reserve("nine", 9), Reserved)


@pytest.mark.parametrize("roles", [PAIR, COUPLED], ids=["pair", "coupled"])
async def test_a_first_token_that_ends_one_sample_does_not_end_the_others(
    tiny: Path, roles: dict[str, tuple[Role, ...]]
) -> None:
    alone = [sampled_answer(tiny, prompt(40), sampled(), n) for n in range(SAMPLES)]
    stop = alone[0][0]
    stopped = [answer[: answer.index(stop) + 1] if stop in answer else answer for answer in alone]
    async with workers(tiny, roles) as cluster:
        at = ("p", "d") if roles is PAIR else ("w", "w")
        await cluster.submit("r", prompt(40), TOKENS, at=at, sampling=sampled(stop_token_ids=(stop,)))
        assert await cluster.ear.wait_answers("r", SAMPLES) == stopped
        finish = await cluster.ear.wait_finish("r")
        assert (finish.reason, finish.output_tokens) == (FinishReason.STOP, 1)
        await cluster.ear.ask(at[1], Finish(R, 0, 1))
        await cluster.quiet()


async def test_answers_of_one_token_each(pair: Workers, tiny: Path) -> None:
    one = sampled(tokens=1)
    await pair.submit("r", prompt(40), 1, sampling=one)
    answers = await pair.ear.wait_answers("r", SAMPLES)
    assert answers == [sampled_answer(tiny, prompt(40), one, n) for n in range(SAMPLES)]


async def test_resume_is_for_one_sample(pair: Workers) -> None:
    await pair.submit("r", prompt(40), TOKENS, sampling=sampled())
    whole = await pair.ear.wait_answers("r", SAMPLES)
    pair.ear.tokens.clear()
    pair.ear.finished.clear()
    assert await pair.ear.ask("d", Resume(R, 0, 2, 5)) == Accepted(R, 0)
    await pair.ear.wait_finish("r", sample=2)
    assert pair.ear.answer("r", sample=2) == whole[2][5:]
    assert pair.ear.answer("r", sample=1) == []
    for sample in (-1, SAMPLES):
        refused = await pair.ear.ask("d", Resume(R, 0, sample, 0))
        assert isinstance(refused, Refused)
        assert refused.reason is RefusalReason.BAD_REQUEST
    await pair.ear.ask("d", Finish(R, 0, TOKENS))
    refused = await pair.ear.ask("d", Resume(R, 0, 2, 5))
    assert isinstance(refused, Refused)


@pytest.mark.parametrize("message", [Cancel(R, 0), Finish(R, 0, 3)], ids=["cancel", "finish"])
async def test_one_word_ends_all_samples(pair: Workers, message: object) -> None:
    await pair.submit("r", prompt(40), 400, sampling=sampled(tokens=400))
    await pair.ear.wait(lambda: all(len(pair.ear.answer("r", sample=n)) > 2 for n in range(SAMPLES)))
    assert await pair.ear.ask("d", message) == Accepted(R, 0)
    await pair.quiet()
    assert pair.ear.finished == {}


@pytest.mark.parametrize("roles", [PAIR, COUPLED], ids=["pair", "coupled"])
async def test_samples_that_do_not_fit_together_are_all_right(
    tiny: Path, roles: dict[str, tuple[Role, ...]]
) -> None:
    """Three requests of four samples on 20 blocks: preempted one by one, computed again, none mixed up."""
    pool_bytes = 20 * KVLayout.of(ModelConfig.load(tiny)).block_bytes
    async with workers(tiny, roles, pool_bytes=pool_bytes) as cluster:
        at = ("p", "d") if roles is PAIR else ("w", "w")
        requests = {f"r{n}": prompt(60, seed=n) for n in range(3 if roles is COUPLED else 1)}
        for name, ids in requests.items():
            await cluster.submit(name, ids, 60, at=at, sampling=sampled(tokens=60))
        for name, ids in requests.items():
            answers = await cluster.ear.wait_answers(name, SAMPLES)
            assert answers == [sampled_answer(tiny, ids, sampled(tokens=60), n) for n in range(SAMPLES)]
        preemptions = cluster.apps[at[1]]._node.metrics.preemptions.labels("recompute")._value.get()
        assert preemptions > 0
        await cluster.quiet()


async def test_a_step_that_fails_is_told_once(pair: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    await pair.submit("r", prompt(40), 400, sampling=sampled(tokens=400))
    await pair.ear.wait(lambda: all(len(pair.ear.answer("r", sample=n)) > 2 for n in range(SAMPLES)))

    async def broken(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(pair.apps["d"]._node.engine, "run", broken)
    await pair.ear.wait(lambda: pair.ear.failed)
    await pair.quiet()
    assert [entry.retryable for entry in pair.ear.failed] == [True]


async def test_a_drain_waits_for_all_samples(pair: Workers) -> None:
    await pair.submit("r", prompt(40), TOKENS, sampling=sampled())
    await pair.ear.wait(lambda: pair.ear.answer("r", sample=SAMPLES - 1))
    drain = asyncio.create_task(pair.apps["d"].drain(10.0))
    answers = await pair.ear.wait_answers("r", SAMPLES)
    assert [len(answer) for answer in answers] == [TOKENS] * SAMPLES
    assert not drain.done()
    await pair.ear.ask("d", Finish(R, 0, TOKENS))
    await drain
    assert pair.ear.failed == []


async def test_what_is_not_drained_is_handed_back_once(pair: Workers) -> None:
    await pair.submit("r", prompt(40), 400, sampling=sampled(tokens=400))
    await pair.ear.wait(lambda: pair.ear.answer("r", sample=1))
    await pair.apps["d"].drain(0.0)
    await pair.ear.wait(lambda: pair.ear.failed)
    await pair.quiet()
    assert [entry.detail for entry in pair.ear.failed] == ["the instance drains"]


async def test_more_samples_than_a_batch_takes_take_turns(tiny: Path) -> None:
    async with workers(tiny, COUPLED, batch_requests_max=2) as one:
        await one.submit("r", prompt(40), TOKENS, at=("w", "w"), sampling=sampled(samples=7))
        await one.ear.wait(lambda: one.ear.answer("r", sample=6))
        (listed,) = one.apps["w"].load().running
        assert listed.samples == 7
        assert listed.kv_tokens > 7 * 40
        answers = await one.ear.wait_answers("r", 7)
        assert answers == [sampled_answer(tiny, prompt(40), sampled(samples=7), n) for n in range(7)]


async def test_samples_of_an_answer_that_has_begun_are_refused(pair: Workers) -> None:
    """`output_token_ids` is one answer's: whoever places samples again starts them all again."""
    answer = await pair.submit(
        "r", prompt(40), TOKENS, sampling=sampled(), attempt=1, output_token_ids=packed([5, 6])
    )
    assert isinstance(answer, Refused)
    assert answer.reason is RefusalReason.BAD_REQUEST
    assert "output_token_ids" in answer.detail


async def test_samples_that_can_never_start_together_are_refused(tiny: Path) -> None:
    pool_bytes = 16 * KVLayout.of(ModelConfig.load(tiny)).block_bytes
    async with workers(tiny, COUPLED, pool_bytes=pool_bytes) as one:
        for samples, reason in ((14, RefusalReason.NO_BLOCKS), (0, RefusalReason.BAD_REQUEST)):
            answer = await one.submit(
                "r", prompt(40), TOKENS, at=("w", "w"), sampling=sampled(samples=samples)
            )
            assert isinstance(answer, Refused)
            assert answer.reason is reason
            assert "samples" in answer.detail
