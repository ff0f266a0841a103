"""The part that both buses share: sequence numbers and the running of handlers."""

import asyncio

import pytest

from cluster import delivery, wire
from cluster.bus import Received
from cluster.delivery import TAKEN_AT_ONCE_MAX, HandlerRunner, InOrderRunner, RawMessage, Stamp
from cluster.logs import Level, Logger
from cluster.messages import Accepted, Cancel, HandlerFailed
from cluster.metrics import ServiceMetrics
from kvindex.core import InstanceId
from policy.core import RequestId

pytestmark = pytest.mark.unit

BODY = Cancel(RequestId("r"), 1)


def seq_of(data: bytes) -> int:
    return wire.decode(data)[0].seq


def test_the_memory_of_sequences_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivery, "SEQUENCES_MAX", 3)
    stamp = Stamp(InstanceId("me"), 1)
    assert [seq_of(stamp.encode(subject, BODY)) for subject in "aabcad"] == [1, 2, 1, 1, 3, 1]
    # "b" was used longest ago and went when "d" came; the others count on.
    assert [seq_of(stamp.encode(subject, BODY)) for subject in "acd"] == [4, 2, 2]
    assert seq_of(stamp.encode("b", BODY)) == 1


async def test_a_reply_that_cannot_be_encoded_is_answered_as_a_failure() -> None:
    answers: asyncio.Queue[bytes] = asyncio.Queue()

    async def handler(_: Received) -> object:
        return object()

    runner = HandlerRunner(
        handler, 1, Stamp(InstanceId("me"), 1), ServiceMetrics(), Logger(Level.ERROR, stream=_Nowhere())
    )
    data = Stamp(InstanceId("you"), 1).encode("s", BODY)
    await runner.deliver(RawMessage("s", data, None, answers.put))
    answer = wire.decode(await asyncio.wait_for(answers.get(), 5.0))[1]
    assert isinstance(answer, HandlerFailed)
    await runner.stop()


async def test_stop_cancels_what_does_not_end_in_time() -> None:
    cancelled, started = asyncio.Event(), asyncio.Event()

    async def handler(_: Received) -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    runner = HandlerRunner(handler, 1, Stamp(InstanceId("me"), 1), ServiceMetrics(), Logger(Level.ERROR))
    await runner.deliver(RawMessage("s", Stamp(InstanceId("you"), 1).encode("s", BODY), None, None))
    await started.wait()
    await asyncio.wait_for(runner.stop(0.01), 5.0)
    assert cancelled.is_set()


async def test_a_handler_may_stop_its_own_subscription() -> None:
    done = asyncio.Event()

    async def handler(_: Received) -> Accepted:
        await runner.stop()
        done.set()
        return Accepted(RequestId("r"), 1)

    runner = HandlerRunner(handler, 2, Stamp(InstanceId("me"), 1), ServiceMetrics(), Logger(Level.ERROR))
    await runner.deliver(RawMessage("s", Stamp(InstanceId("you"), 1).encode("s", BODY), None, None))
    await asyncio.wait_for(done.wait(), 5.0)


def raw(number: int) -> RawMessage:
    return RawMessage(
        "s", Stamp(InstanceId("you"), 1).encode("s", Cancel(RequestId("r"), number)), None, None
    )


async def test_what_finds_a_place_starts_at_once_and_what_comes_behind_a_waiting_one_waits_too() -> None:
    started: list[int] = []
    ends = [asyncio.Event() for _ in range(4)]

    async def handler(received: Received) -> None:
        assert isinstance(received.body, Cancel)
        started.append(received.body.attempt)
        await ends[received.body.attempt].wait()

    runner = HandlerRunner(handler, 1, Stamp(InstanceId("me"), 1), ServiceMetrics(), Logger(Level.ERROR))
    assert runner.deliver_now(raw(0))
    assert not runner.deliver_now(raw(1))
    waiting = asyncio.create_task(runner.deliver(raw(1)))
    await asyncio.sleep(0)
    ends[0].set()
    assert not runner.deliver_now(raw(2)), "it would come before the one that waits"
    await asyncio.wait_for(waiting, 5.0)
    ends[1].set()
    await asyncio.wait_for(runner.deliver(raw(3)), 5.0)
    ends[3].set()
    await runner.stop(5.0)
    assert started == [0, 1, 3]
    assert runner.deliver_now(raw(2)), "what comes after the stop is dropped, not kept"
    await asyncio.sleep(0)
    assert started == [0, 1, 3]


async def test_who_takes_in_order_lets_others_have_their_turn() -> None:
    taken: list[int] = []

    def take(received: Received) -> None:
        assert isinstance(received.body, Cancel)
        taken.append(received.body.attempt)

    runner = InOrderRunner(take, Stamp(InstanceId("me"), 1), ServiceMetrics(), Logger(Level.ERROR))
    assert all(runner.deliver_now(raw(number)) for number in range(TAKEN_AT_ONCE_MAX))
    assert not runner.deliver_now(raw(TAKEN_AT_ONCE_MAX))
    await asyncio.sleep(0)
    assert runner.deliver_now(raw(TAKEN_AT_ONCE_MAX))
    assert taken == list(range(TAKEN_AT_ONCE_MAX + 1))


class _Nowhere:
    def write(self, _: str) -> int:
        return 0

    def flush(self) -> None:
        return
