"""Which link carries a call, and what a failure does to the pair and to other calls; links obey the test."""

import asyncio
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any

import numpy as np
import pytest
from tests.support.virtual_time import run_in_virtual_time

from kvtransfer import (
    AuthError,
    BusyError,
    ChecksumError,
    GrantError,
    Limits,
    Peer,
    PeerLostError,
    RangeError,
    TransferError,
    Transferred,
    TransferTimeout,
    TransportKind,
    TransportUnfit,
)
from kvtransfer.bounce import Bounce
from kvtransfer.descriptor import Descriptor
from kvtransfer.lines import Lines
from kvtransfer.memory import Region
from kvtransfer.statistics import Statistics
from kvtransfer.transport import Call

pytestmark = pytest.mark.unit

SHM, TCP = TransportKind.SHM, TransportKind.TCP
LIMITS = Limits(
    retry_s_min=1.0, retry_s_max=60.0, dial_backoff_s_min=0.1, dial_backoff_s_max=5.0, stall_s_max=2.0
)
RANGES = [(0, 100)]


def in_virtual_time(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @wraps(test)
    def run(*arguments: Any, **named: Any) -> None:
        run_in_virtual_time(test(*arguments, **named))

    return run


class FakeLink:
    """A call waits until the test ends it; `answer` ends each at once."""

    def __init__(self, kind: TransportKind, answer: TransferError | str | None) -> None:
        self.kind = kind
        self.closed = False
        self.answer = answer
        self.calls: list[asyncio.Future[None]] = []
        self.made: list[Call] = []
        self.stall_checks = 0

    async def write(self, call: Call) -> None:
        if self.closed:
            raise PeerLostError("closed")
        self.made.append(call)
        if isinstance(self.answer, TransferError):
            raise self.answer
        if self.answer == "waits":
            future = asyncio.get_running_loop().create_future()
            self.calls.append(future)
            await future

    async def read(self, call: Call) -> None:
        await self.write(call)

    def close_if_stalled(self) -> None:
        self.stall_checks += 1

    def close(self) -> None:
        self.lose(PeerLostError("closed by us"))

    def lose(self, error: TransferError) -> None:
        self.closed = True
        for future in self.calls:
            if not future.done():
                future.set_exception(error)


class FakeNetwork:
    """Dials by kind: an error, or a link whose calls end as `answers` says."""

    def __init__(self, *kinds: TransportKind) -> None:
        self.dial_errors: dict[TransportKind, Exception] = {}
        self.dial_s = 0.0
        self.answers: dict[TransportKind, TransferError | str | None] = dict.fromkeys(kinds)
        self.links: dict[TransportKind, list[FakeLink]] = {kind: [] for kind in kinds}
        self.dialled_at_s: dict[TransportKind, list[float]] = {kind: [] for kind in kinds}
        self.eras = 1

    def begin_era(self) -> None:
        self.eras += 1

    async def dial(self, kind: TransportKind) -> FakeLink:
        self.dialled_at_s[kind].append(asyncio.get_running_loop().time())
        await asyncio.sleep(self.dial_s)
        if kind in self.dial_errors:
            raise self.dial_errors[kind]
        link = FakeLink(kind, self.answers[kind])
        self.links[kind].append(link)
        return link

    def peer(self, limits: Limits = LIMITS) -> Peer:
        diallers = {kind: lambda kind=kind: self.dial(kind) for kind in self.links}
        lines = Lines("far", diallers, limits, lambda: 0.0, self.begin_era)
        return Peer(Descriptor("far", ()), lines, Bounce(limits), limits, Statistics())


REGION = Region(1, np.zeros(1000, np.uint8))


async def write(peer: Peer, timeout_s: float = 10.0, **more: Any) -> Transferred:
    return await peer.write(REGION, RANGES, "token", RANGES, timeout_s=timeout_s, **more)


async def turns(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


@in_virtual_time
async def test_the_best_transport_carries_a_call() -> None:
    network = FakeNetwork(SHM, TCP)
    peer = network.peer()
    assert await write(peer) == Transferred(100, SHM)
    assert await peer.read(REGION, RANGES, "token", RANGES, timeout_s=1.0) == Transferred(100, SHM)
    assert network.links[TCP] == []
    counted = peer.statistics().by_transport
    assert (counted[SHM].writes, counted[SHM].written_bytes, counted[SHM].reads) == (1, 100, 1)
    assert list(counted) == [SHM]


@in_virtual_time
async def test_a_failed_dial_of_the_better_falls_through_in_the_same_call() -> None:
    network = FakeNetwork(SHM, TCP)
    network.dial_errors[SHM] = PeerLostError("no such socket")
    assert (await write(network.peer())).transport is TCP


@in_virtual_time
async def test_a_call_whose_transport_fails_is_the_callers_to_make_again() -> None:
    network = FakeNetwork(SHM, TCP)
    network.answers[SHM] = "waits"
    peer = network.peer()
    running = [asyncio.create_task(write(peer)) for _ in range(3)]
    await turns()
    network.links[SHM][0].lose(PeerLostError("cut"))
    results = await asyncio.gather(*running, return_exceptions=True)
    assert [type(result) for result in results] == [PeerLostError] * 3
    assert len(set(map(id, results))) == 3  # each its own, though the link had one
    assert len(network.links[SHM][0].made) == 3
    assert await write(peer) == Transferred(100, TCP)
    # Three calls failed with one link: that is one failure, and one second.
    await asyncio.sleep(1.0)
    network.answers[SHM] = None
    await write(peer)
    await turns()
    assert len(network.dialled_at_s[SHM]) == 2
    assert (await write(peer)).transport is SHM
    counted = peer.statistics().by_transport
    assert (counted[SHM].failures, counted[TCP].failures) == (3, 0)


@in_virtual_time
async def test_the_way_back_up_holds_no_call_up() -> None:
    network = FakeNetwork(SHM, TCP)
    network.dial_errors[SHM] = PeerLostError("not yet")
    peer = network.peer()
    await write(peer)
    del network.dial_errors[SHM]
    network.dial_s = 3.0
    old = network.links[TCP][0]
    old.answer = "waits"
    running = asyncio.create_task(write(peer))
    await asyncio.sleep(0.99)
    assert len(network.dialled_at_s[SHM]) == 1
    await asyncio.sleep(0.01)
    meanwhile = asyncio.create_task(write(peer))  # dials the better one and does not wait for it
    await turns()
    assert (len(old.calls), len(network.dialled_at_s[SHM])) == (2, 2)
    await asyncio.sleep(3.0)
    assert (await write(peer)).transport is SHM
    assert not old.closed  # two calls still run on it
    old.calls[0].set_result(None)
    assert (await running).transport is TCP
    assert not old.closed
    old.calls[1].set_result(None)
    assert (await meanwhile).transport is TCP
    assert old.closed
    assert (await write(peer)).transport is SHM


@in_virtual_time
async def test_calls_share_one_dial_and_it_outlives_the_call_that_began_it() -> None:
    network = FakeNetwork(TCP)
    network.dial_s = 2.0
    peer = network.peer()
    hasty = asyncio.create_task(write(peer, timeout_s=1.0))
    patient = asyncio.create_task(write(peer, timeout_s=5.0))
    with pytest.raises(TransferTimeout):
        await hasty
    assert (await patient).transport is TCP
    assert len(network.dialled_at_s[TCP]) == 1


@in_virtual_time
async def test_the_last_transport_is_waited_for_if_there_is_time() -> None:
    network = FakeNetwork(TCP)
    network.dial_errors[TCP] = PeerLostError("refused")
    peer = network.peer()
    for _ in range(4):
        with pytest.raises(PeerLostError, match="refused"):
            await write(peer)
    times = network.dialled_at_s[TCP]
    assert np.allclose(np.diff(times), [0.1, 0.2, 0.4])
    with pytest.raises(PeerLostError, match=r"far is tried again in 0\.80 s \(tcp: refused\)"):
        await write(peer, timeout_s=0.5)
    assert len(times) == 4
    del network.dial_errors[TCP]
    assert (await write(peer, timeout_s=1.0)).transport is TCP


@in_virtual_time
async def test_a_dial_that_fails_on_a_defect_is_a_failure_like_others() -> None:
    network = FakeNetwork(SHM, TCP)
    network.dial_errors[SHM] = OSError(24, "too many open files")
    peer = network.peer()
    for _ in range(3):
        assert (await write(peer)).transport is TCP
    assert len(network.dialled_at_s[SHM]) == 1
    network.dial_errors[TCP] = MemoryError()
    network.links[TCP][0].lose(PeerLostError("gone"))
    with pytest.raises(PeerLostError, match="MemoryError"):
        await write(peer, timeout_s=0.2)


@in_virtual_time
async def test_a_link_that_comes_and_goes_is_not_hammered() -> None:
    network = FakeNetwork(TCP)
    peer = network.peer()
    loop = asyncio.get_running_loop()
    end_s = loop.time() + 100
    calls = 0
    while loop.time() < end_s:
        calls += 1
        try:
            await write(peer, timeout_s=0.01)
        except TransferError:
            await asyncio.sleep(0.01)
            continue
        network.links[TCP][-1].lose(PeerLostError("flaps"))
    assert calls > 1_000
    assert len(network.dialled_at_s[TCP]) < 7 + 100 / LIMITS.dial_backoff_s_max


@pytest.mark.parametrize("error", [GrantError("no"), RangeError("no"), BusyError("full")])
@in_virtual_time
async def test_a_refusal_is_no_failure_of_the_transport(error: TransferError) -> None:
    network = FakeNetwork(SHM, TCP)
    network.answers[SHM] = error
    peer = network.peer()
    for _ in range(3):
        with pytest.raises(type(error)):
            await write(peer)
    assert len(network.dialled_at_s[SHM]) == 1
    assert network.links[TCP] == []


@in_virtual_time
async def test_a_wrong_secret_is_one_over_each_transport() -> None:
    network = FakeNetwork(SHM, TCP)
    network.dial_errors[SHM] = AuthError("another secret")
    peer = network.peer()
    for _ in range(2):
        with pytest.raises(AuthError):
            await write(peer)
    assert network.dialled_at_s[TCP] == []


@in_virtual_time
async def test_a_wrong_secret_of_a_better_transport_is_not_tried_at_each_call() -> None:
    network = FakeNetwork(SHM, TCP)
    network.dial_errors[SHM] = PeerLostError("not yet")
    peer = network.peer()
    await write(peer)
    network.dial_errors[SHM] = AuthError("another secret")
    for _ in range(100):
        await asyncio.sleep(0.1)
        await write(peer)
        await turns()
    assert len(network.dialled_at_s[SHM]) == 4  # at 0, 1, 3, 7 s


@in_virtual_time
async def test_memory_that_a_transport_cannot_serve_goes_over_the_next_for_that_call() -> None:
    network = FakeNetwork(SHM, TCP)
    network.answers[SHM] = TransportUnfit("device memory")
    peer = network.peer()
    for _ in range(3):
        assert (await write(peer)).transport is TCP
    network.links[SHM][0].answer = None
    assert (await write(peer)).transport is SHM
    assert (len(network.dialled_at_s[SHM]), len(network.dialled_at_s[TCP])) == (1, 1)
    network.links[SHM][0].answer = network.links[TCP][0].answer = TransportUnfit("device memory")
    with pytest.raises(TransportUnfit):
        await write(peer)


@in_virtual_time
async def test_parts_left_on_a_transport_that_cannot_serve_the_others() -> None:
    network = FakeNetwork(SHM, TCP)
    unfit = network.answers[SHM] = TransportUnfit("device memory")
    unfit.settled = False
    peer = network.peer()
    assert (await write(peer)).transport is TCP
    assert network.links[SHM][0].closed
    assert network.eras == 2


@in_virtual_time
async def test_a_transport_that_corrupts_is_left() -> None:
    network = FakeNetwork(SHM, TCP)
    peer = network.peer()
    await write(peer)
    bad = network.links[SHM][0]
    bad.answer = ChecksumError("other bytes")
    with pytest.raises(ChecksumError):
        await write(peer, verify=True)
    assert bad.closed
    assert (await write(peer, verify=True)).transport is TCP


@in_virtual_time
async def test_a_link_found_closed_is_a_failure_too() -> None:
    network = FakeNetwork(SHM, TCP)
    peer = network.peer()
    await write(peer)
    network.links[SHM][0].lose(PeerLostError("idle"))
    assert (await write(peer)).transport is TCP


@in_virtual_time
async def test_a_call_that_is_late_has_its_link_looked_at() -> None:
    network = FakeNetwork(SHM, TCP)
    network.answers[SHM] = "waits"
    peer = network.peer()
    with pytest.raises(TransferTimeout) as raised:
        await write(peer, timeout_s=3.0)
    assert raised.value.landed_ranges.tolist() == [False]
    assert network.links[SHM][0].stall_checks == 1
    assert peer.idle
    with pytest.raises(TransferTimeout):
        await write(peer, timeout_s=0.0)
    assert peer.statistics().failures == 2


@in_virtual_time
async def test_a_cancelled_call_stays_cancelled_at_its_deadline() -> None:
    network = FakeNetwork(TCP)
    network.answers[TCP] = "waits"
    peer = network.peer()

    async def call() -> str:
        try:
            await write(peer, timeout_s=1.0)
        except asyncio.CancelledError:
            return "cancelled"
        except TransferTimeout:
            return "late"
        return "done"

    task = asyncio.create_task(call())
    await asyncio.sleep(0.5)
    task.cancel()
    assert await task == "cancelled"
    late = asyncio.create_task(call())
    await asyncio.sleep(0.5)
    assert await late == "late"
    assert late.cancelling() == 0
    assert network.links[TCP][0].stall_checks == 1


@in_virtual_time
async def test_ranges_that_landed_are_named_as_the_caller_cut_them() -> None:
    network = FakeNetwork(TCP)
    error = GrantError("revoked")
    error.landed = ((0, 25), (40, 60))
    network.answers[TCP] = error
    peer = network.peer()
    remote = [(500, 20), (520, 20), (0, 0), (540, 60)]  # neighbours: they travel as one range
    with pytest.raises(GrantError) as raised:
        await peer.write(REGION, RANGES, "token", remote, timeout_s=1.0)
    assert raised.value.landed_ranges.tolist() == [True, False, True, True]
    assert error.landed_ranges is None


@in_virtual_time
async def test_where_a_write_may_still_land_no_link_of_before_is_used() -> None:
    network = FakeNetwork(SHM, TCP)
    network.answers[SHM] = TransportUnfit("device memory")
    peer = network.peer()
    await write(peer)
    shm, tcp = network.links[SHM][0], network.links[TCP][0]
    shm.answer = "waits"
    running = asyncio.create_task(write(peer))
    await turns()
    shm.lose(PeerLostError("cut"))
    with pytest.raises(PeerLostError):
        await running
    assert network.eras == 2
    assert tcp.closed
    assert (await write(peer)).transport is TCP
    assert len(network.links[TCP]) == 2


@pytest.mark.parametrize("closed", [False, True])
@in_virtual_time
async def test_a_write_that_is_late_on_a_link_that_was_left(closed: bool) -> None:
    network = FakeNetwork(SHM, TCP)
    network.dial_errors[SHM] = PeerLostError("not yet")
    peer = network.peer()
    await write(peer)
    old = network.links[TCP][0]
    old.answer = "waits"
    late = asyncio.create_task(write(peer, timeout_s=5.0))
    await asyncio.sleep(1.0)
    del network.dial_errors[SHM]
    meanwhile = asyncio.create_task(write(peer, timeout_s=100.0))
    await turns()
    assert (await write(peer)).transport is SHM
    assert network.eras == 1
    with pytest.raises(TransferTimeout):
        await late
    assert network.eras == 2
    assert (await write(peer)).transport is SHM
    assert len(network.links[SHM]) == 2
    assert [link.closed for link in network.links[SHM]] == [True, False]
    if closed:
        peer.close()
        with pytest.raises(PeerLostError):
            await meanwhile
        return
    old.calls[1].set_result(None)
    await meanwhile
    assert old.closed


@in_virtual_time
async def test_moving_up_from_a_write_that_was_given_up() -> None:
    network = FakeNetwork(SHM, TCP)
    network.dial_errors[SHM] = PeerLostError("not yet")
    peer = network.peer()
    await write(peer)
    network.links[TCP][0].answer = "waits"
    with pytest.raises(TransferTimeout):
        await write(peer, timeout_s=1.5)
    network.links[TCP][0].answer = None
    assert network.eras == 1  # the link is still the one in use
    del network.dial_errors[SHM]
    await write(peer)
    await turns()
    assert network.eras == 2
    assert (await write(peer)).transport is SHM
    assert network.eras == 2


@in_virtual_time
async def test_moving_up_from_a_write_of_which_a_part_was_refused() -> None:
    network = FakeNetwork(SHM, TCP)
    network.dial_errors[SHM] = PeerLostError("not yet")
    peer = network.peer()
    await write(peer)
    refused = network.links[TCP][0].answer = BusyError("one part is one too many")
    refused.settled = False
    with pytest.raises(BusyError):
        await write(peer)
    network.links[TCP][0].answer = None
    del network.dial_errors[SHM]
    await asyncio.sleep(1.5)
    await write(peer)
    await turns()
    assert (await write(peer)).transport is SHM
    assert network.eras == 2


@pytest.mark.parametrize("lost_with_a_call", [True, False])
@in_virtual_time
async def test_reads_and_idle_links_leave_nothing_behind(lost_with_a_call: bool) -> None:
    network = FakeNetwork(SHM, TCP)
    peer = network.peer()
    await write(peer)
    link = network.links[SHM][0]
    link.answer = "waits"
    if lost_with_a_call:
        reading = asyncio.create_task(peer.read(REGION, RANGES, "token", RANGES, timeout_s=5.0))
        await turns()
    link.lose(PeerLostError("cut"))
    if lost_with_a_call:
        with pytest.raises(PeerLostError):
            await reading
    await write(peer)
    assert network.eras == 1


@in_virtual_time
async def test_close_ends_dials_and_calls() -> None:
    network = FakeNetwork(SHM, TCP)
    network.dial_s = 100.0
    peer = network.peer()
    dialling = asyncio.create_task(write(peer))
    await turns()
    peer.close()
    await peer.wait_closed()
    with pytest.raises(PeerLostError, match="given up"):
        await dialling
    with pytest.raises(PeerLostError, match="given up"):
        await write(peer)
    assert asyncio.all_tasks() == {asyncio.current_task()}


@in_virtual_time
async def test_a_tag_is_bounded() -> None:
    network = FakeNetwork(TCP)
    peer = network.peer()
    with pytest.raises(RangeError, match="tag has 257 bytes, at most 256"):
        await write(peer, tag=bytes(257))
    await write(peer, tag=b"layer 3", verify=True)
    assert network.links[TCP][0].made[0].tag == b"layer 3"
    assert network.links[TCP][0].made[0].verify
