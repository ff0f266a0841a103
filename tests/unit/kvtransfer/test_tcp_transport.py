"""The tcp transport below the endpoint: tags, digests, what an error says of the bytes."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from tests.support.eventually import eventually
from tests.support.transfer import no_leaks, pattern

from kvtransfer import Access, GrantError, Limits, PeerLostError, Region, TransferError
from kvtransfer import verification as digests
from kvtransfer.errors import ArrivalError, ChecksumError
from kvtransfer.grants import Arrival, Grant, GrantTable
from kvtransfer.kinds import TransportKind
from kvtransfer.memory import Ranges, checked_ranges
from kvtransfer.statistics import Statistics, TransferCounters
from kvtransfer.tcp.transport import TcpTransport
from kvtransfer.transport import Address, Call, Link, LocalMemory, TransportContext

pytestmark = pytest.mark.unit

MIB = 1 << 20
SIZE = 8 * MIB
SECRET = b"a secret of a cluster"
TIMEOUT_S = 10.0


@dataclass
class End:
    """A transport with one region of SIZE bytes."""

    context: TransportContext
    transport: TcpTransport
    memory: np.ndarray
    address: Address
    arrivals: list[Arrival] = field(default_factory=list)

    @classmethod
    async def start(cls, name: str, memory: np.ndarray, limits: Limits) -> "End":
        context = TransportContext(name, SECRET, limits, GrantTable(100), Statistics())
        transport = TcpTransport(context, "127.0.0.1", 0, "127.0.0.1")
        return cls(context, transport, memory, await transport.start())

    def grant(
        self,
        access: Access = Access.WRITE,
        on_arrival: Callable[[Arrival], None] | None = None,
        ranges: object = ((0, SIZE),),
    ) -> Grant:
        region = Region(1, self.memory)
        return self.context.grants.issue(region, ranges, "near", 1, access, on_arrival)

    async def revoke(self, grant: Grant) -> None:
        self.context.grants.revoke(grant)
        await self.transport.quiesce(grant)

    def call(self, token: str, ranges: object = ((0, SIZE),), remote: object = None) -> Call:
        local = checked(ranges)
        payload_bytes = int(local[:, 1].sum())
        there = local if remote is None else checked(remote)
        return Call(LocalMemory(Region(1, self.memory), local, payload_bytes), token, there)

    def served(self) -> TransferCounters:
        return self.context.statistics.of("near", TransportKind.TCP)


def checked(ranges: object) -> Ranges:
    return checked_ranges(ranges, SIZE, "ranges")


LIMITS = Limits(turn_bytes=256 << 10, tcp_part_bytes_min=MIB, connections_max=20)


@pytest.fixture(params=[1, 3], ids=["one stream", "three streams"])
async def near(request: pytest.FixtureRequest) -> AsyncIterator[End]:
    """Has a pattern; the one that calls."""
    async with no_leaks():
        end = await End.start("near", pattern(SIZE), replace(LIMITS, tcp_streams=request.param))
        yield end
        await end.transport.close()


@pytest.fixture
async def far(near: End) -> AsyncIterator[End]:
    """Has zeros; the owner."""
    end = await End.start("far", np.zeros(SIZE, np.uint8), LIMITS)
    yield end
    await end.transport.close()


@pytest.fixture
async def link(near: End, far: End) -> AsyncIterator[Link]:
    made = await near.transport.dial(far.address, "far")
    yield made
    made.close()


SMALL = ((10, 1000),)
LARGE = ((0, 4 * MIB), (5 * MIB, MIB))
assert digests.INLINE_BYTES_MAX < 5 * MIB


@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize("ranges", [(), SMALL, LARGE])
async def test_a_tag_arrives_once_after_the_bytes_and_before_the_end_of_the_call(
    near: End, far: End, link: Link, ranges: object, verify: bool
) -> None:
    seen: list[tuple[Arrival, bool]] = []

    def on_arrival(arrival: Arrival) -> None:
        equal = all(
            np.array_equal(far.memory[at : at + length], near.memory[at : at + length])
            for at, length in checked(ranges).tolist()
        )
        seen.append((arrival, equal))

    grant = far.grant(on_arrival=on_arrival)
    call = replace(near.call(grant.token, ranges), tag=b"t" * 256, verify=verify)
    await link.write(call)
    assert seen == [(Arrival(grant, b"t" * 256, call.memory.payload_bytes), True)]
    await link.write(near.call(grant.token, SMALL))
    assert len(seen) == 1
    assert far.served().served_writes >= 2


async def test_a_tag_without_a_taker_is_refused_before_a_byte_lands(near: End, far: End, link: Link) -> None:
    grant = far.grant()
    with pytest.raises(GrantError, match="no tags") as raised:
        await link.write(replace(near.call(grant.token), tag=b"tag"))
    assert raised.value.landed == ()
    assert not far.memory.any()
    await link.write(near.call(grant.token))


async def test_a_taker_that_fails_fails_that_write_only(
    near: End, far: End, link: Link, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(arrival: Arrival) -> None:
        raise KeyError("no such request")

    grant = far.grant(on_arrival=fail)
    other = asyncio.create_task(link.write(near.call(far.grant().token, LARGE)))
    with caplog.at_level(logging.ERROR), pytest.raises(ArrivalError) as raised:
        await link.write(replace(near.call(grant.token, SMALL), tag=b"tag"))
    assert "no such request" in caplog.text
    assert raised.value.landed == ((0, 1000),)
    await other
    assert not link.closed
    assert far.served().served_failures == 1


@pytest.mark.parametrize("ranges", [SMALL, LARGE])
async def test_bytes_that_change_on_the_way_are_noticed(
    near: End, far: End, link: Link, ranges: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The source changes between its digest and its way out, as a defect of the network would do it."""
    arrivals: list[Arrival] = []
    write = far.grant(on_arrival=arrivals.append)
    read = far.grant(Access.READ)
    monkeypatch.setattr("kvtransfer.tcp.caller.digest", _digest_then_spoil(near.memory))
    with pytest.raises(ChecksumError) as raised:
        await link.write(replace(near.call(write.token, ranges), tag=b"tag", verify=True))
    assert raised.value.retryable
    assert arrivals == []
    with pytest.raises(ChecksumError):
        await link.read(replace(near.call(read.token, ranges), verify=True))
    monkeypatch.undo()
    await link.write(replace(near.call(write.token, ranges), tag=b"tag", verify=True))
    await link.read(replace(near.call(read.token, ranges), verify=True))
    assert len(arrivals) == 1


def _digest_then_spoil(memory: np.ndarray) -> object:
    async def digest(view: memoryview, ranges: Ranges) -> bytes:
        found = bytearray(await digests.digest(view, ranges))
        memory[ranges[0, 0]] ^= 255
        found[0] ^= 255
        return bytes(found)

    return digest


async def test_a_grant_revoked_while_the_digest_is_made_gets_no_tag(
    near: End, far: End, link: Link, monkeypatch: pytest.MonkeyPatch
) -> None:
    started, go_on = asyncio.Event(), asyncio.Event()
    real = digests._digest_then

    async def slow(cursor: object, grant: Grant, then: Callable[[bytes], None]) -> None:
        started.set()
        await go_on.wait()
        await real(cursor, grant, then)

    monkeypatch.setattr(digests, "_digest_then", slow)
    grant = far.grant(on_arrival=far.arrivals.append)
    writing = asyncio.create_task(link.write(replace(near.call(grant.token, LARGE), tag=b"tag", verify=True)))
    async with asyncio.timeout(TIMEOUT_S):
        await started.wait()
        revoking = asyncio.create_task(far.revoke(grant))
        with pytest.raises(GrantError) as raised:
            await writing
        assert not revoking.done()  # the memory is still read
        go_on.set()
        await revoking
    assert sum(count for _, count in raised.value.landed) > MIB
    assert far.arrivals == []


@pytest.mark.parametrize("access", [Access.WRITE, Access.READ])
async def test_an_error_says_what_landed(near: End, far: End, link: Link, access: Access) -> None:
    """The stretch that it names is there; a revoke half-way leaves neither nothing nor all."""
    source, target = (near, far) if access is Access.WRITE else (far, near)
    source.memory[:] = pattern(SIZE, seed=5)
    target.memory[:] = 0
    grant = far.grant(access)
    move = link.write if access is Access.WRITE else link.read
    moving = asyncio.create_task(move(near.call(grant.token)))
    await eventually(lambda: target.memory[MIB] != 0)
    await far.revoke(grant)
    with pytest.raises(TransferError) as raised:
        await moving
    landed = raised.value.landed
    # The parts on other streams end with the first one that fails: less may be known of them than landed.
    assert sum(count for _, count in landed) < SIZE
    assert near.context.limits.tcp_streams > 1 or (landed[0][0] == 0 and landed[0][1] > MIB)
    for start, count in landed:
        assert np.array_equal(target.memory[start : start + count], source.memory[start : start + count])


@pytest.mark.parametrize("access", [Access.WRITE, Access.READ])
async def test_a_large_call_takes_all_streams_and_a_small_one_takes_one(
    near: End, far: End, link: Link, access: Access
) -> None:
    streams = near.context.limits.tcp_streams
    grant = far.grant(access)
    move = link.write if access is Access.WRITE else link.read
    source, target = (near, far) if access is Access.WRITE else (far, near)
    source.memory[:] = pattern(SIZE, seed=6)
    target.memory[:] = 0
    large = near.call(grant.token, [(MIB, 5 * MIB), (0, MIB // 2), (7 * MIB, MIB)])
    await move(large)
    assert far.served().served_writes + far.served().served_reads == streams
    for at, length in large.remote.tolist():
        assert np.array_equal(target.memory[at : at + length], source.memory[at : at + length])
    assert not target.memory[MIB // 2 : MIB].any()
    await move(near.call(grant.token, SMALL))
    assert far.served().served_writes + far.served().served_reads == streams + 1


async def test_a_small_call_overtakes_a_large_one_on_another_stream(near: End, far: End) -> None:
    limits = replace(LIMITS, tcp_streams=2, tcp_part_bytes_min=SIZE)
    two = TcpTransport(replace(near.context, limits=limits), "127.0.0.1", 0, "127.0.0.1")
    link = await two.dial(far.address, "far")
    grant = far.grant()
    large = asyncio.create_task(link.write(near.call(grant.token)))
    await eventually(lambda: grant.landed_bytes > 0)
    await link.write(near.call(grant.token, SMALL))
    assert not large.done()
    assert {len(session._serving) for session in far.transport._links["near"].sessions} == {0, 1}
    await large
    link.close()


async def test_a_write_that_was_given_up_does_not_land_after_a_newer_one(
    near: End, far: End, link: Link
) -> None:
    """Whatever streams the two take: what still was under way of the first is thrown away or comes before."""
    grant = far.grant()
    pieces = [(at, MIB // 2) for at in range(0, SIZE, MIB // 2)]
    for more in range(0, 5 * MIB, MIB):
        near.memory[:] = 1
        far.memory[:] = 0
        landed = grant.landed_bytes
        first = asyncio.create_task(link.write(near.call(grant.token)))
        await eventually(lambda least=landed + more: grant.landed_bytes > least)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        near.memory[:] = 2
        await asyncio.gather(*(link.write(near.call(grant.token, [piece])) for piece in pieces))
        assert (far.memory == 2).all()
        await link.write(near.call(grant.token, SMALL))
        assert (far.memory == 2).all()


async def test_a_lost_stream_takes_the_link_with_it(near: End, far: End, link: Link) -> None:
    grant = far.grant()
    calls = [asyncio.create_task(link.write(near.call(grant.token))) for _ in range(4)]
    await eventually(lambda: grant.landed_bytes > 0)
    far.transport._links["near"].sessions[-1].close("a test")
    for call in calls:
        with pytest.raises(PeerLostError):
            await call
    assert link.closed
    await eventually(lambda: not far.transport._links["near"].sessions)
    again = await near.transport.dial(far.address, "far")
    await again.write(near.call(grant.token))
    again.close()


async def test_a_newer_link_ends_all_streams_of_the_older_one_first(near: End, far: End, link: Link) -> None:
    older = far.transport._links["near"]
    grant = far.grant()
    writing = asyncio.create_task(link.write(near.call(grant.token)))
    await eventually(lambda: grant.landed_bytes > 0)
    assert far.transport.admit("near", b"newer")
    assert older.sessions
    assert all(session._connection.closed for session in older.sessions)
    with pytest.raises(PeerLostError):
        await writing
    # A stream of the older link whose handshake took longer must not end the newer link.
    assert not far.transport.admit("near", older.link_id)
    assert far.transport.admit("near", b"newer")


async def test_a_late_stream_of_a_link_that_is_gone_does_not_end_the_newer_one(
    near: End, far: End, link: Link
) -> None:
    older = far.transport._links["near"]
    link.close()
    await eventually(lambda: not older.sessions)
    newer = await near.transport.dial(far.address, "far")
    assert not far.transport.admit("near", older.link_id)
    await newer.write(near.call(far.grant().token))
    newer.close()


async def test_links_without_streams_are_forgotten_in_time(near: End, far: End) -> None:
    connections_max = far.context.limits.connections_max
    for number in range(3 * connections_max):
        assert far.transport.admit(str(number), bytes(16))
        assert len(far.transport._links) <= 2 * connections_max + 1


async def test_a_link_lives_with_fewer_streams_if_the_owner_has_no_room(near: End) -> None:
    far = await End.start("far", np.zeros(SIZE, np.uint8), replace(LIMITS, connections_max=2))
    link = await near.transport.dial(far.address, "far")
    assert len(far.transport._links["near"].sessions) == min(2, near.context.limits.tcp_streams)
    await link.write(near.call(far.grant().token))
    assert np.array_equal(near.memory, far.memory)
    link.close()
    await far.transport.close()
