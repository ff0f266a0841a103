"""Two real workers hand a request over: tokens as the model says, blocks back where they were."""

import asyncio
from pathlib import Path

import pytest
from tests.support.reference import Reference
from tests.support.workers import PAIR, TOKENS, Workers, greedy, packed, prompt, workers

from cluster.messages import Accepted, Cancel, Finish, PromptPart, RefusalReason, Refused, Resume
from engine.layout import KVLayout
from engine.model_folder import ModelConfig
from policy.core import FinishReason, RequestId, Role, SamplingParams

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("length", [1, 15, 16, 17, 32, 33, 100, 200])
async def test_handed_over_tokens_are_the_models(pair: Workers, reference: Reference, length: int) -> None:
    ids = prompt(length)
    assert await pair.submit("r", ids, TOKENS) == Accepted(RequestId("r"), 0)
    finish = await pair.ear.wait_finish("r")
    assert pair.ear.answer("r") == greedy(reference, ids)
    assert (finish.reason, finish.output_tokens) == (FinishReason.LENGTH, TOKENS)
    await pair.ear.ask("d", Finish(RequestId("r"), 0, TOKENS))
    await pair.quiet()


async def test_a_warm_prefix_is_reused_and_changes_nothing(pair: Workers, reference: Reference) -> None:
    shared = prompt(150)
    for name, tail in (("cold", [9, 8, 7]), ("warm", [6, 5, 9, 11])):
        await pair.submit(name, shared + tail, TOKENS)
        await pair.ear.wait_finish(name)
        assert pair.ear.answer(name) == greedy(reference, shared + tail)
    assert pair.ear.cached_tokens == {"cold": 0, "warm": 144}
    computed = pair.apps["p"].load().prefill_tokens_total
    assert computed == 153 + 154 - 144


async def test_many_at_once(pair: Workers, reference: Reference) -> None:
    prompts = {f"r{n}": prompt(10 + 13 * n, seed=n % 3) for n in range(8)}
    for name, ids in prompts.items():
        await pair.submit(name, ids, TOKENS)
    for name, ids in prompts.items():
        await pair.ear.wait_finish(name)
        assert pair.ear.answer(name) == greedy(reference, ids)
    await pair.quiet()


async def test_too_few_blocks_preempt_and_recompute(tiny: Path, reference: Reference) -> None:
    """Eight answers that do not fit together: all are right, none is lost."""
    roles = {"w": (Role.PREFILL, Role.DECODE)}
    layout = KVLayout.of(ModelConfig.load(tiny))
    async with workers(tiny, roles, pool_bytes=20 * layout.block_bytes) as one:
        assert one.apps["w"].load().blocks == 20
        prompts = {f"r{n}": prompt(60, seed=n) for n in range(8)}
        for name, ids in prompts.items():
            await one.submit(name, ids, TOKENS, at=("w", "w"))
        for name, ids in prompts.items():
            await one.ear.wait_finish(name)
            assert one.ear.answer(name) == greedy(reference, ids)
        await one.quiet()


async def test_a_coupled_worker_sends_nothing(tiny: Path, reference: Reference) -> None:
    async with workers(tiny, {"w": (Role.PREFILL, Role.DECODE)}) as one:
        await one.submit("r", prompt(40), TOKENS, at=("w", "w"))
        await one.ear.wait_finish("r")
        assert one.ear.answer("r") == greedy(reference, prompt(40))
        await one.quiet()


async def test_an_answer_of_one_token_ends_at_prefill(pair: Workers, reference: Reference) -> None:
    await pair.submit("r", prompt(40), 1)
    finish = await pair.ear.wait_finish("r")
    assert (finish.reason, finish.output_tokens) == (FinishReason.LENGTH, 1)
    assert pair.ear.answer("r") == greedy(reference, prompt(40))[:1]
    await pair.quiet()


async def test_a_stop_token_ends_the_answer(pair: Workers, reference: Reference) -> None:
    expected = greedy(reference, prompt(40))
    stop = expected[7]
    end = expected.index(stop) + 1
    sampling = SamplingParams(TOKENS, stop_token_ids=(stop,))
    await pair.submit("r", prompt(40), TOKENS, sampling=sampling)
    finish = await pair.ear.wait_finish("r")
    assert finish.reason is FinishReason.STOP
    assert pair.ear.answer("r") == expected[:end]


async def test_seeded_sampling_goes_on_alike_in_a_later_attempt(pair: Workers) -> None:
    sampling = SamplingParams(TOKENS, temperature=1.0, seed=11)
    await pair.submit("r", prompt(40), TOKENS, sampling=sampling)
    await pair.ear.wait_finish("r")
    whole = pair.ear.answer("r")
    resumed = packed(whole[:10])
    await pair.submit("s", prompt(40), TOKENS, sampling=sampling, attempt=1, output_token_ids=resumed)
    await pair.ear.wait_finish("s", attempt=1)
    assert pair.ear.answer("s", attempt=1) == whole[10:]
    assert min(pair.ear.tokens[(RequestId("s"), 1, 0)]) == 10


async def test_a_long_prompt_comes_in_parts(pair: Workers, reference: Reference) -> None:
    ids = prompt(300)
    for index, piece in enumerate((ids[:100], ids[100:])):
        answer = await pair.ear.ask("p", PromptPart(RequestId("r"), 0, index, 2, packed(piece)))
        assert answer == Accepted(RequestId("r"), 0)
    await pair.submit("r", ids, TOKENS, prompt_token_ids=b"", prompt_parts=2)
    await pair.ear.wait_finish("r")
    assert pair.ear.answer("r") == greedy(reference, ids)


async def test_a_submit_said_twice_is_one_request(pair: Workers) -> None:
    for _ in range(2):
        assert await pair.submit("r", prompt(100), TOKENS) == Accepted(RequestId("r"), 0)
    assert pair.apps["p"].load().requests == 1
    await pair.ear.wait_finish("r")


@pytest.mark.parametrize("tokens_heard", [0, 1, 5])
async def test_a_cancel_at_any_time_gives_everything_back(pair: Workers, tokens_heard: int) -> None:
    await pair.submit("r", prompt(200), 400)
    await pair.ear.wait(lambda: len(pair.ear.answer("r")) >= tokens_heard) if tokens_heard else None
    for name in ("p", "d"):
        assert await pair.ear.ask(name, Cancel(RequestId("r"), 0)) == Accepted(RequestId("r"), 0)
    await pair.quiet()
    late = await pair.submit("r", prompt(200), 400)
    assert isinstance(late, Refused)
    assert late.reason is RefusalReason.CANCELLED


async def test_a_lost_gateways_requests_are_cancelled(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ear is never registered: after the grace time nobody waits for its answer."""
    monkeypatch.setattr("worker.app.GATEWAY_GRACE_S", 0.5)
    async with workers(tiny, PAIR) as pair:
        await pair.submit("r", prompt(20), 1500)
        await pair.ear.wait(lambda: len(pair.ear.answer("r")) > 2)
        await pair.quiet()
        assert ("r", 0, 0) not in pair.ear.finished


async def test_resume_tells_everything_again(pair: Workers) -> None:
    await pair.submit("r", prompt(40), TOKENS)
    await pair.ear.wait_finish("r")
    whole = pair.ear.answer("r")
    pair.ear.tokens.clear()
    pair.ear.finished.clear()
    assert await pair.ear.ask("d", Resume(RequestId("r"), 0, 0, 5)) == Accepted(RequestId("r"), 0)
    await pair.ear.wait_finish("r")
    assert pair.ear.answer("r") == whole[5:]
    await pair.ear.ask("d", Finish(RequestId("r"), 0, TOKENS))
    forgotten = await pair.ear.ask("d", Resume(RequestId("r"), 0, 0, 5))
    assert isinstance(forgotten, Refused)


async def test_a_decode_that_is_not_there_fails_retryably(pair: Workers) -> None:
    await pair.submit("r", prompt(40), TOKENS, at=("p", "nobody"))
    await pair.ear.wait(lambda: pair.ear.failed)
    assert pair.ear.failed[0].retryable
    await pair.quiet()


@pytest.mark.parametrize(
    ("fields", "reason", "named"),
    [
        ({"fingerprint": "other"}, RefusalReason.WRONG_MODEL, "fingerprint"),
        ({"prompt_tokens": 41}, RefusalReason.BAD_REQUEST, "prompt_tokens is 41"),
        (
            {"prompt_token_ids": packed([5] * 39 + [512])},
            RefusalReason.BAD_REQUEST,
            "holds 512, must be 0",
        ),
        ({"prompt_token_ids": packed([5] * 39 + [-1])}, RefusalReason.BAD_REQUEST, "holds -1"),
        ({"sampling": SamplingParams(0)}, RefusalReason.BAD_REQUEST, "output_tokens_max is 0"),
        ({"sampling": SamplingParams(5, top_p=0.0)}, RefusalReason.BAD_REQUEST, "top_p is 0"),
        ({"sampling": SamplingParams(5, temperature=-1.0)}, RefusalReason.BAD_REQUEST, "temperature is -1"),
        ({"deadline_s": 0.0}, RefusalReason.BAD_REQUEST, "deadline_s"),
        ({"attempt": -1}, RefusalReason.BAD_REQUEST, "attempt is -1"),
        ({"prompt_parts": 3}, RefusalReason.BAD_REQUEST, "prompt_parts is 3"),
        ({"output_token_ids": b"abc"}, RefusalReason.BAD_REQUEST, "output_token_ids has 3 bytes"),
    ],
)
async def test_bad_work_is_refused_by_name(
    pair: Workers, fields: dict[str, object], reason: RefusalReason, named: str
) -> None:
    answer = await pair.submit("r", prompt(40), TOKENS, **fields)
    assert isinstance(answer, Refused)
    assert answer.reason is reason
    assert named in answer.detail
    await pair.quiet()


async def test_a_prompt_that_fills_the_context_is_refused(pair: Workers) -> None:
    answer = await pair.submit("r", prompt(2048), TOKENS)
    assert isinstance(answer, Refused)
    assert "context of 2048" in answer.detail


async def test_a_full_queue_says_so(tiny: Path) -> None:
    async with workers(tiny, PAIR, queue_requests_max=1, prefill_requests_max=1) as pair:
        answers = [await pair.submit(f"r{n}", prompt(300, seed=n), 4) for n in range(4)]
        reasons = [answer.reason for answer in answers if isinstance(answer, Refused)]
        assert reasons == [RefusalReason.QUEUE_FULL] * 2


async def test_draining_refuses_and_ends_what_runs(pair: Workers) -> None:
    await pair.submit("r", prompt(40), TOKENS)
    await pair.apps["p"].drain(10.0)
    refused = await pair.submit("s", prompt(40), TOKENS)
    assert isinstance(refused, Refused)
    assert refused.reason is RefusalReason.DRAINING
    await pair.ear.wait_finish("r")
    await pair.ear.ask("d", Finish(RequestId("r"), 0, TOKENS))
    await pair.apps["d"].drain(10.0)


async def test_a_drain_that_takes_too_long_hands_back(pair: Workers) -> None:
    await pair.submit("r", prompt(40), 1500)
    await pair.ear.wait(lambda: len(pair.ear.answer("r")) > 2)
    await pair.apps["d"].drain(0.0)
    await pair.ear.wait(lambda: pair.ear.failed)
    assert pair.ear.failed[0].retryable
    await pair.quiet()


async def test_resume_at_prefill_says_whether_it_still_works_on_it(pair: Workers) -> None:
    await pair.submit("r", prompt(1500), TOKENS)
    asked = Resume(RequestId("r"), 0, 0, 0)
    assert await pair.ear.ask("p", asked) == Accepted(RequestId("r"), 0)
    await pair.ear.wait_finish("r")
    await pair.quiet()
    assert isinstance(await pair.ear.ask("p", asked), Refused)


async def test_a_bus_that_is_away_for_a_moment_costs_no_placement(
    pair: Workers, reference: Reference
) -> None:
    """Prefill offers its commit again until the bus is back."""
    bus = pair.apps["p"]._context.bus
    await pair.submit("r", prompt(600), TOKENS)
    await pair.ear.wait(lambda: pair.apps["d"].load().running)
    bus.disconnect()
    await asyncio.sleep(1.0)
    bus.reconnect()
    await pair.ear.wait_finish("r")
    assert not pair.ear.failed
    assert pair.ear.answer("r") == greedy(reference, prompt(600))
