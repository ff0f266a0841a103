"""What happens at the same moment, twice, in the wrong order or not at all: nothing hangs, nothing leaks."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.support.reference import Reference
from tests.support.workers import PAIR, TOKENS, Workers, greedy, packed, prompt, workers

from cluster.messages import (
    Accepted,
    Cancel,
    Commit,
    Finish,
    PromptPart,
    RefusalReason,
    Refused,
    Reserve,
    Reserved,
)
from engine.layout import KVLayout
from engine.model_folder import ModelConfig
from kvindex.core import InstanceId
from policy.core import RequestId, Role
from protocol import parts
from worker.app import WorkerApp

pytestmark = pytest.mark.unit

COUPLED = {"w": (Role.PREFILL, Role.DECODE)}
WAIT_S_MAX = 10.0
R = RequestId("r")


def after_each_step(app: WorkerApp, action: Callable[[], None]) -> None:
    """Have `action` run between the end of a step and what the step loop makes of it."""
    run = app._node.engine.run

    async def run_then_act(*arguments):
        result = await run(*arguments)
        action()
        return result

    app._node.engine.run = run_then_act


async def reserve(pair: Workers, prompt_ids: list[int], **fields: object) -> object:
    work = pair.work("r", prompt_ids, TOKENS, **fields)
    return await pair.ear.ask("d", Reserve(work, InstanceId("p"), 5.0))


async def answers_still(pair: Workers, reference: Reference, at: tuple[str, str] = ("p", "d")) -> None:
    """Another request goes through, and then nothing is held."""
    await pair.submit("other", prompt(40, seed=7), TOKENS, at=at)
    await pair.ear.wait_finish("other")
    assert pair.ear.answer("other") == greedy(reference, prompt(40, seed=7))
    await pair.quiet()


async def test_a_cancel_at_the_very_end_of_a_step(pair: Workers, reference: Reference) -> None:
    decode = pair.apps["d"]
    after_each_step(decode, lambda: decode._decode.cancel(R, 0))
    await pair.submit("r", prompt(40), 400)
    await pair.ear.wait(lambda: pair.ear.answer("r"))
    await pair.quiet()
    await answers_still(pair, reference)


async def test_an_older_attempt_that_was_prefilled_late_changes_nothing_of_the_newer(tiny: Path) -> None:
    """Coupled: while attempt 0 is still computed here, attempt 1 is reserved here by another prefill."""
    async with workers(tiny, {**COUPLED, "p": (Role.PREFILL,)}, step_tokens_max=16) as both:
        app = both.apps["w"]
        answers = []

        def reserve_once() -> None:
            if not answers:
                work = both.work("r", prompt(40), TOKENS, attempt=1)
                answers.append(app._decode._reserve(Reserve(work, InstanceId("p"), 1.0), None))

        after_each_step(app, reserve_once)
        await both.submit("r", prompt(40), TOKENS, at=("w", "w"))
        await both.ear.wait(lambda: both.ear.answer("r"))
        assert isinstance(answers[0], Reserved)
        await both.quiet()
        late = Commit(R, 1, answers[0].generation, 0, 0, "", 5, 0)
        refused = await both.ear.ask("w", late)
        assert refused.reason is RefusalReason.EXPIRED
        assert both.ear.finished == {}


async def test_a_newer_attempt_takes_the_place_of_one_that_is_prefilled(
    tiny: Path, reference: Reference
) -> None:
    async with workers(tiny, COUPLED, step_tokens_max=16) as one:
        await one.submit("r", prompt(400), TOKENS, at=("w", "w"))
        await one.submit("r", prompt(40), TOKENS, at=("w", "w"), attempt=1)
        assert [queued.attempt for queued in one.apps["w"].load().queued][-1] == 1
        stale = await one.submit("r", prompt(400), TOKENS, at=("w", "w"))
        assert isinstance(stale, Refused)
        await one.ear.wait_finish("r", attempt=1)
        assert one.ear.answer("r", attempt=1) == greedy(reference, prompt(40))
        assert one.ear.answer("r", attempt=0) == []
        await one.quiet()


async def test_a_newer_attempt_takes_the_place_of_one_that_decodes(tiny: Path, reference: Reference) -> None:
    async with workers(tiny, COUPLED) as one:
        await one.submit("r", prompt(30), 1500, at=("w", "w"))
        await one.ear.wait(lambda: one.ear.answer("r"))
        await one.submit("r", prompt(40), TOKENS, at=("w", "w"), attempt=1)
        await one.ear.wait_finish("r", attempt=1)
        assert one.ear.answer("r", attempt=1) == greedy(reference, prompt(40))
        await one.quiet()
        assert (R, 0, 0) not in one.ear.finished


async def test_an_older_attempt_is_refused_while_a_newer_is_here(pair: Workers) -> None:
    await pair.submit("r", prompt(1500), TOKENS, attempt=1)
    answer = await pair.submit("r", prompt(1500), TOKENS, attempt=0)
    assert isinstance(answer, Refused)
    assert answer.reason is RefusalReason.CANCELLED
    await pair.ear.ask("p", Cancel(R, 1))
    await pair.quiet()


@pytest.mark.parametrize(
    "part",
    [
        "worker.step_loop.plan_step",
        "worker.outbox.batches",
        "worker.pool_reporter.event_messages",
        "worker.decode_duty.reservation.TimePassed",
        "worker.prefill_request.prefill.TimePassed",
    ],
)
async def test_a_loop_that_breaks_ends_the_service(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    """Else it would stay registered, take requests and answer none."""

    def broken(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("worker.prefill_duty.TICK_S", 0.01)
    async with workers(tiny, COUPLED, step_tokens_max=16) as one:
        monkeypatch.setattr(part, broken)
        await one.submit("r", prompt(600), 1400, at=("w", "w"))
        async with asyncio.timeout(WAIT_S_MAX):
            reason = await one.apps["w"]._context.failure
        assert "ZeroDivisionError" in reason


async def test_what_breaks_in_one_request_fails_that_request(
    pair: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError

    with monkeypatch.context() as patch:
        patch.setattr("worker.handover.checksum", broken)
        await pair.submit("r", prompt(40), TOKENS)
        await pair.ear.wait(lambda: pair.ear.failed)
    assert "ZeroDivisionError" in pair.ear.failed[0].detail
    await pair.quiet()


async def test_a_coupled_drain_waits_for_what_is_still_prefilled(tiny: Path, reference: Reference) -> None:
    async with workers(tiny, COUPLED, step_tokens_max=16) as one:
        await one.submit("r", prompt(400), TOKENS, at=("w", "w"))
        drain = asyncio.create_task(one.apps["w"].drain(WAIT_S_MAX))
        await one.ear.wait(lambda: one.ear.answer("r"))
        refused = await one.submit("s", prompt(40), TOKENS, at=("w", "w"))
        assert refused.reason is RefusalReason.DRAINING
        await one.ear.wait_finish("r")
        assert not drain.done()
        await one.ear.ask("w", Finish(R, 0, TOKENS))
        await drain
        assert one.ear.answer("r") == greedy(reference, prompt(400))


async def test_a_reserve_that_cannot_be_granted_holds_nothing(pair: Workers) -> None:
    work = pair.work("r", prompt(40), TOKENS)
    answer = await pair.ear.ask("d", Reserve(work, InstanceId(""), 5.0))
    assert isinstance(answer, Refused)
    assert answer.reason is RefusalReason.BAD_REQUEST
    await pair.quiet()


@pytest.mark.parametrize(
    ("first_token_id", "cached_tokens", "named"),
    [(512, 0, "first_token_id is 512"), (5, -1, "cached_tokens is -1"), (5, 2049, "cached_tokens is 2049")],
)
async def test_a_commit_with_impossible_numbers_harms_nobody(
    pair: Workers, first_token_id: int, cached_tokens: int, named: str
) -> None:
    reserved = await reserve(pair, prompt(40))
    assert isinstance(reserved, Reserved)
    commit = Commit(R, 0, reserved.generation, 3, 0, "", first_token_id, cached_tokens)
    answer = await pair.ear.ask("d", commit)
    assert isinstance(answer, Refused)
    assert answer.reason is RefusalReason.BAD_REQUEST
    assert named in answer.detail


async def test_no_reservation_is_given_while_a_preempted_sequence_waits(tiny: Path) -> None:
    """It would take the blocks that come back, one by one, and the one that waits would never go on."""
    block_bytes = KVLayout.of(ModelConfig.load(tiny)).block_bytes
    roles = {**COUPLED, "p": (Role.PREFILL,)}
    async with workers(tiny, roles, pool_bytes=16 * block_bytes) as both:
        app = both.apps["w"]
        refusals = []

        def ask() -> None:
            if app._node.steps.preempted:
                work = both.work("new", prompt(3), 2)
                refusals.append(app._decode._reserve(Reserve(work, InstanceId("p"), 5.0), None))

        after_each_step(app, ask)
        for n in range(3):
            await both.submit(f"r{n}", prompt(60, seed=n), 60, at=("w", "w"))
        for n in range(3):
            await both.ear.wait_finish(f"r{n}")
        assert refusals
        assert {getattr(answer, "reason", None) for answer in refusals} == {RefusalReason.NO_BLOCKS}


async def test_a_lost_finish_is_told_again(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the last message nothing follows that would show the gateway a gap."""
    monkeypatch.setattr("protocol.reservation.TELL_END_AGAIN_S", 0.3)
    async with workers(tiny, PAIR) as both:
        await both.submit("r", prompt(40), TOKENS)
        await both.ear.wait_finish("r")
        for _ in range(2):
            both.ear.finished.clear()
            assert (await both.ear.wait_finish("r")).output_tokens == TOKENS
        await both.ear.ask("d", Finish(R, 0, TOKENS))
        both.ear.finished.clear()
        await asyncio.sleep(1.0)
        assert both.ear.finished == {}


@pytest.mark.parametrize("heard", [False, True])
async def test_who_closes_in_the_middle_hands_back(pair: Workers, heard: bool) -> None:
    """A service that broke does not drain; its gateways need not wait until they miss it."""
    await pair.submit("r", prompt(1500), 400)
    if heard:
        await pair.ear.wait(lambda: len(pair.ear.answer("r")) > 2)
    app = pair.apps["d" if heard else "p"]
    await app._node.outbox.flush()
    await app.close()
    await pair.ear.wait(lambda: pair.ear.failed)
    assert pair.ear.failed[0].retryable


async def test_cached_tokens_are_of_the_prompt(pair: Workers) -> None:
    """Where an answer goes on in a later attempt, the output so far may be cached as well."""
    await pair.submit("first", prompt(100), 1)
    await pair.ear.wait_finish("first")
    so_far = packed(prompt(100)[40:])
    await pair.submit("r", prompt(40), 80, attempt=1, output_token_ids=so_far)
    await pair.ear.wait_finish("r", attempt=1)
    assert pair.ear.cached_tokens["r"] == 40


async def test_parts_of_what_is_refused_do_not_stay(pair: Workers) -> None:
    await pair.apps["p"].drain(0.0)
    ids = prompt(300)
    for index, piece in enumerate((ids[:100], ids[100:])):
        await pair.ear.ask("p", PromptPart(R, 0, index, 2, packed(piece)))
    answer = await pair.submit("r", ids, TOKENS, prompt_token_ids=b"", prompt_parts=2)
    assert answer.reason is RefusalReason.DRAINING
    assert pair.apps["p"]._parts.buffered_bytes == 0
    await pair.ear.ask("p", PromptPart(R, 1, 0, 2, packed(ids[:100])))
    await pair.ear.ask("p", Cancel(R, 1))
    assert pair.apps["p"]._parts.buffered_bytes == 0


async def test_parts_of_a_reserve_that_meets_a_tombstone_do_not_stay(pair: Workers) -> None:
    await pair.ear.ask("d", Cancel(R, 0))
    ids = prompt(300)
    for index, piece in enumerate((ids[:100], ids[100:])):
        await pair.ear.ask("d", PromptPart(R, 0, index, 2, packed(piece)))
    answer = await reserve(pair, ids, prompt_token_ids=b"", prompt_parts=2)
    assert answer.reason is RefusalReason.CANCELLED
    assert pair.apps["d"]._parts.buffered_bytes == 0


async def test_no_room_for_parts_is_not_the_clients_fault(pair: Workers) -> None:
    for number in range(parts.BUFFERED_REQUESTS_MAX):
        part = PromptPart(RequestId(f"r{number}"), 0, 0, 2, packed([5]))
        assert isinstance(await pair.ear.ask("p", part), Accepted)
    refused = await pair.ear.ask("p", PromptPart(R, 0, 0, 2, packed([5])))
    assert refused.reason is RefusalReason.QUEUE_FULL
    assert refused.retry_after_s > 0
