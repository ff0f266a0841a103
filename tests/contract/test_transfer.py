"""What every transport promises, between two endpoints of this process."""

import asyncio
import mmap
from collections.abc import AsyncIterator

import numpy as np
import pytest
from tests.support.eventually import eventually
from tests.support.transfer import TRANSPORTS, Side, make_endpoint, no_leaks, pattern, side

import kvtransfer
from kvtransfer import (
    Access,
    AuthError,
    BusyError,
    Endpoint,
    EndpointClosedError,
    Grant,
    GrantError,
    Limits,
    PeerLostError,
    RangeError,
    Transferred,
    TransferTimeout,
    TransportKind,
)

pytestmark = pytest.mark.contract

MIB = 1 << 20
SIZES = (0, 1, 4096, 16 * MIB + 1)
TIMEOUT_S = 20.0
Pair = tuple[Side, Side]


@pytest.fixture(params=TRANSPORTS)
def transport(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
async def pair(transport: str) -> AsyncIterator[Pair]:
    """`near` has a pattern, `far` has zeros, 20 MiB each."""
    near_memory, far_memory = pattern(20 * MIB), np.zeros(20 * MIB, np.uint8)
    async with (
        no_leaks(),
        side(transport, "near", near_memory) as near,
        side(transport, "far", far_memory) as far,
    ):
        yield near, far


@pytest.mark.parametrize("size", SIZES)
async def test_write_moves_exactly_the_bytes_asked_for(pair: Pair, size: int) -> None:
    near, far = pair
    grant = far.grant([(100, size)], "near")
    peer = await near.connect(far)
    moved = await peer.write(near.region, [(7, size)], grant.token, [(100, size)], timeout_s=TIMEOUT_S)
    assert moved.payload_bytes == size == far.endpoint.written_bytes(grant)
    assert np.array_equal(far.memory[100 : 100 + size], near.memory[7 : 7 + size])
    assert not far.memory[:100].any()
    assert not far.memory[100 + size :].any()


@pytest.mark.parametrize("size", SIZES)
async def test_read_moves_exactly_the_bytes_asked_for(pair: Pair, size: int) -> None:
    near, far = pair
    grant = near.grant([(7, size)], "far", access=Access.READ)
    peer = await far.connect(near)
    moved = await peer.read(far.region, [(100, size)], grant.token, [(7, size)], timeout_s=TIMEOUT_S)
    assert moved.payload_bytes == size
    assert np.array_equal(far.memory[100 : 100 + size], near.memory[7 : 7 + size])
    assert not far.memory[:100].any()
    assert not far.memory[100 + size :].any()


async def landing(owner: Side, grant: Grant, more_than_bytes: int = 0) -> None:
    """Wait until some bytes of the grant are there."""
    await eventually(lambda: owner.endpoint.written_bytes(grant) > more_than_bytes)


def scattered(count: int, length: int, stride: int, seed: int) -> np.ndarray:
    """`count` ranges that do not touch, in random order."""
    places = np.random.default_rng(seed).permutation(count)
    return np.stack((places * stride, np.full(count, length)), axis=1)


@pytest.mark.parametrize("direction", ["write", "read"])
async def test_10000_ranges_in_a_call(pair: Pair, direction: str) -> None:
    near, far = pair
    source, target = scattered(10_000, 1000, 1500, 1), scattered(10_000, 1000, 2000, 2)
    if direction == "write":
        peer = await near.connect(far)
        token = far.grant(target, "near").token
        moved = await peer.write(near.region, source, token, target, timeout_s=TIMEOUT_S)
    else:
        peer = await far.connect(near)
        token = near.grant(source, "far", access=Access.READ).token
        moved = await peer.read(far.region, target, token, source, timeout_s=TIMEOUT_S)
    assert moved.payload_bytes == 10_000_000
    expected = np.zeros_like(far.memory)
    for (begin, length), (to, _) in zip(source.tolist(), target.tolist(), strict=True):
        expected[to : to + length] = near.memory[begin : begin + length]
    assert np.array_equal(far.memory, expected)


async def test_both_sides_cut_the_same_bytes_as_they_like(pair: Pair, transport: str) -> None:
    near, far = pair
    local = [(5000, 3), (0, 0), (10, 70_001), (9, 1)]
    remote = [(40_000, 20_000), (0, 1), (1, 30_000), (90_000, 20_004)]
    token = far.grant([(0, 200_000)], "near").token
    peer = await near.connect(far)
    moved = await peer.write(near.region, local, token, remote, timeout_s=TIMEOUT_S)
    assert moved == Transferred(70_005, TransportKind(transport))
    assert kvtransfer.checksum(near.region, local) == kvtransfer.checksum(far.region, remote)
    assert kvtransfer.checksum(near.region, local) != kvtransfer.checksum(near.region, local[::-1])


async def test_overlapping_reads(pair: Pair) -> None:
    near, far = pair
    token = near.grant([(0, MIB)], "far", access=Access.READ).token
    peer = await far.connect(near)
    remote = [(0, 5000), (2000, 5000), (0, 5000)]
    await peer.read(far.region, [(0, 15_000)], token, remote, timeout_s=TIMEOUT_S)
    expected = np.concatenate([near.memory[o : o + n] for o, n in remote])
    assert np.array_equal(far.memory[:15_000], expected)


async def test_many_transfers_at_once_in_both_directions(pair: Pair) -> None:
    near, far = pair
    length, count = 40_000, 200
    write = far.grant([(0, count * length)], "near")
    read = far.grant([(0, count * length)], "near", access=Access.READ)
    peer = await near.connect(far)

    async def there_and_back(number: int) -> None:
        at = number * length
        await peer.write(near.region, [(at, length)], write.token, [(at, length)], timeout_s=TIMEOUT_S)
        back = count * length + at
        await peer.read(near.region, [(back, length)], read.token, [(at, length)], timeout_s=TIMEOUT_S)

    await asyncio.gather(*map(there_and_back, range(count)))
    total = count * length
    assert np.array_equal(far.memory[:total], near.memory[:total])
    assert np.array_equal(near.memory[total : 2 * total], near.memory[:total])
    counted = near.endpoint.statistics()["far"]
    assert (counted.writes, counted.reads, counted.failures) == (count, count, 0)
    assert (counted.written_bytes, counted.read_bytes) == (total, total)
    assert counted.transfer_s > 0
    served = far.endpoint.statistics()["near"]
    assert (served.served_written_bytes, served.served_read_bytes) == (total, total)


async def test_a_small_transfer_does_not_wait_for_a_large_one(pair: Pair) -> None:
    near, far = pair
    grant = far.grant([(0, 20 * MIB)], "near")
    peer = await near.connect(far)
    large = asyncio.create_task(
        peer.write(near.region, [(0, 20 * MIB)], grant.token, [(0, 20 * MIB)], timeout_s=TIMEOUT_S)
    )
    await landing(far, grant)
    await peer.write(near.region, [(0, 10)], grant.token, [(0, 10)], timeout_s=TIMEOUT_S)
    assert not large.done()
    await large


async def test_the_loop_gets_its_turn_during_a_large_transfer(transport: str) -> None:
    limits = Limits(turn_bytes=64 << 10)
    total = 16 * MIB
    async with (
        side(transport, "near", pattern(total), limits=limits) as near,
        side(transport, "far", np.zeros(total, np.uint8), limits=limits) as far,
    ):
        grant = far.grant([(0, total)], "near")
        peer = await near.connect(far)
        writing = asyncio.create_task(
            peer.write(near.region, [(0, total)], grant.token, [(0, total)], timeout_s=TIMEOUT_S)
        )
        turns = 0
        while not writing.done():
            await asyncio.sleep(0)
            turns += 1
        # Each turn of the loop moves at most turn_bytes into the memory.
        assert turns >= total // limits.turn_bytes


@pytest.mark.parametrize(
    ("ranges", "remote"),
    [
        ([(100, 50)], [(99, 10)]),
        ([(100, 50)], [(149, 2)]),
        ([(100, 50), (200, 50)], [(140, 70)]),
        ([(100, 50)], [(110, 5), (300, 5)]),
        ([], [(0, 1)]),
        ([(100, 50)], [(30 * MIB, 10)]),
    ],
)
async def test_outside_the_grant_nothing_lands(
    pair: Pair, ranges: list[tuple[int, int]], remote: list[tuple[int, int]]
) -> None:
    near, far = pair
    grant = far.grant(ranges, "near")
    peer = await near.connect(far)
    local = [(0, sum(length for _, length in remote))]
    with pytest.raises(GrantError):
        await peer.write(near.region, local, grant.token, remote, timeout_s=TIMEOUT_S)
    assert not far.memory.any()
    assert far.endpoint.written_bytes(grant) == 0


async def test_adjacent_granted_ranges_are_one(pair: Pair) -> None:
    near, far = pair
    grant = far.grant([(150, 50), (100, 50), (120, 10)], "near")
    peer = await near.connect(far)
    moved = await peer.write(near.region, [(0, 100)], grant.token, [(100, 100)], timeout_s=TIMEOUT_S)
    assert moved.payload_bytes == 100


async def test_a_grant_is_for_one_peer_one_access_one_generation(pair: Pair) -> None:
    near, far = pair
    peer = await near.connect(far)
    other = far.grant([(0, 100)], "somebody-else")
    readable = far.grant([(0, 100)], "near", access=Access.READ)
    revoked = far.grant([(0, 100)], "near")
    await far.endpoint.revoke(revoked)
    await far.endpoint.revoke(revoked)
    current = far.grant([(0, 100)], "near", generation=7)
    stale = current.token.removesuffix(".7") + ".6"
    assert stale != current.token
    for token in (other.token, readable.token, revoked.token, stale, "nonsense"):
        with pytest.raises(GrantError):
            await peer.write(near.region, [(0, 100)], token, [(0, 100)], timeout_s=TIMEOUT_S)
    for token in (current.token, other.token):
        with pytest.raises(GrantError):
            await peer.read(near.region, [(0, 100)], token, [(0, 100)], timeout_s=TIMEOUT_S)
    assert not far.memory.any()
    # A refusal is the call's error, not the connection's.
    await peer.write(near.region, [(0, 100)], current.token, [(0, 100)], timeout_s=TIMEOUT_S)


async def test_revoke_under_fire_stops_a_write(pair: Pair) -> None:
    near, far = pair
    total = 20 * MIB
    peer = await near.connect(far)
    for generation in range(5):
        grant = far.grant([(0, total)], "near", generation=generation)
        writing = asyncio.create_task(
            peer.write(near.region, [(0, total)], grant.token, [(0, total)], timeout_s=TIMEOUT_S)
        )
        await landing(far, grant, generation * MIB)
        await far.endpoint.revoke(grant)
        landed = far.endpoint.written_bytes(grant)
        assert landed < total
        far.memory[:] = 255
        with pytest.raises(GrantError):
            await writing
        again = far.grant([(0, 1)], "near", generation=generation)
        await peer.write(near.region, [(0, 1)], again.token, [(0, 1)], timeout_s=TIMEOUT_S)
        assert (far.memory[1:] == 255).all()
        assert far.endpoint.written_bytes(grant) == landed


async def test_revoke_under_fire_stops_a_read(pair: Pair) -> None:
    near, far = pair
    total = 20 * MIB
    grant = near.grant([(0, total)], "far", access=Access.READ)
    peer = await far.connect(near)
    reading = asyncio.create_task(
        peer.read(far.region, [(0, total)], grant.token, [(0, total)], timeout_s=TIMEOUT_S)
    )
    await eventually(lambda: far.memory[0] != 0)
    await near.endpoint.revoke(grant)
    near.memory[:] = 255
    with pytest.raises(GrantError):
        await reading
    assert not (far.memory == 255).any()


@pytest.mark.parametrize("direction", ["write", "read"])
async def test_a_cancelled_call_touches_no_memory_afterwards(pair: Pair, direction: str) -> None:
    near, far = pair
    total = 20 * MIB
    if direction == "write":
        peer = await near.connect(far)
        grant = far.grant([(0, total)], "near")
        calling = peer.write(near.region, [(0, total)], grant.token, [(0, total)], timeout_s=TIMEOUT_S)
    else:
        peer = await far.connect(near)
        grant = near.grant([(0, total)], "far", access=Access.READ)
        calling = peer.read(far.region, [(0, total)], grant.token, [(0, total)], timeout_s=TIMEOUT_S)
    task = asyncio.create_task(calling)
    await eventually(lambda: far.memory[0] != 0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    if direction == "write":
        near.memory[:] = 255  # the source is given away: not one of these may leave
        await peer.write(near.region, [(0, 1)], grant.token, [(0, 1)], timeout_s=TIMEOUT_S)
        assert not (far.memory[1:] == 255).any()
    else:
        far.memory[:] = 0  # the target is given away: nothing may land there
        await peer.read(far.region, [(0, 1)], grant.token, [(0, 1)], timeout_s=TIMEOUT_S)
        assert not far.memory[1:].any()
    assert peer.idle
    # The owner was told: it did not go on to the end for nobody.
    served = (far if direction == "write" else near).endpoint.statistics()
    assert served["near" if direction == "write" else "far"].served_failures == 1


async def test_deadline(pair: Pair) -> None:
    near, far = pair
    grant = far.grant([(0, MIB)], "near")
    peer = await near.connect(far)
    with pytest.raises(TransferTimeout) as raised:
        await peer.write(near.region, [(0, MIB)], grant.token, [(0, MIB)], timeout_s=0)
    assert raised.value.retryable
    await peer.write(near.region, [(0, MIB)], grant.token, [(0, MIB)], timeout_s=TIMEOUT_S)
    assert near.endpoint.statistics()["far"].failures == 1


async def test_limits_of_transfers_in_flight(transport: str) -> None:
    limits = Limits(transfers_in_flight_max=2, transfers_waiting_max=3)
    async with (
        no_leaks(),
        side(transport, "near", pattern(MIB), limits=limits) as near,
        side(transport, "far", np.zeros(MIB, np.uint8)) as far,
    ):
        grant = far.grant([(0, MIB)], "near")
        peer = await near.connect(far)
        calls = [
            peer.write(near.region, [(0, MIB)], grant.token, [(0, MIB)], timeout_s=TIMEOUT_S)
            for _ in range(8)
        ]
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(result) for result in results] == [Transferred] * 5 + [BusyError] * 3


async def test_an_owner_serves_no_more_than_its_limit(transport: str) -> None:
    limits = Limits(transfers_served_max=1)
    async with (
        no_leaks(),
        side(transport, "near", pattern(8 * MIB)) as near,
        side(transport, "far", np.zeros(8 * MIB, np.uint8), limits=limits) as far,
    ):
        grant = far.grant([(0, 8 * MIB)], "near")
        peer = await near.connect(far)
        calls = [
            peer.write(near.region, [(0, 8 * MIB)], grant.token, [(0, 8 * MIB)], timeout_s=TIMEOUT_S)
            for _ in range(3)
        ]
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(result) for result in results] == [Transferred, BusyError, BusyError]


async def test_wrong_secret(pair: Pair, transport: str) -> None:
    _, far = pair
    stranger = make_endpoint(transport, "near", secret=b"another secret, as long")
    await stranger.start()
    try:
        with pytest.raises(AuthError):
            await stranger.connect(far.endpoint.descriptor(), timeout_s=TIMEOUT_S)
        with pytest.raises(AuthError):
            await far.endpoint.connect(stranger.descriptor(), timeout_s=TIMEOUT_S)
    finally:
        await stranger.close()


async def test_another_endpoint_at_the_address(pair: Pair) -> None:
    near, far = pair
    renamed = far.endpoint.descriptor().replace('"far"', '"gone"')
    with pytest.raises(PeerLostError):
        await near.endpoint.connect(renamed, timeout_s=TIMEOUT_S)


def test_on_uvloop(transport: str) -> None:
    uvloop = pytest.importorskip("uvloop")

    async def there_and_back() -> None:
        async with (
            no_leaks(),
            side(transport, "near", pattern(4 * MIB)) as near,
            side(transport, "far", np.zeros(4 * MIB, np.uint8)) as far,
        ):
            whole = [(0, 4 * MIB)]
            peer = await near.connect(far)
            await peer.write(near.region, whole, far.grant(whole, "near").token, whole, timeout_s=TIMEOUT_S)
            assert np.array_equal(near.memory, far.memory)
            near.memory[:] = 0
            readable = far.grant(whole, "near", access=Access.READ)
            await peer.read(near.region, whole, readable.token, whole, timeout_s=TIMEOUT_S)
            assert np.array_equal(near.memory, far.memory)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(there_and_back())


async def test_nobody_at_the_address_then_somebody(transport: str) -> None:
    async with no_leaks(), side(transport, "near", pattern(100)) as near:
        async with side(transport, "far", np.zeros(100, np.uint8)) as far:
            peer = await near.connect(far)
            port = far.endpoint.descriptor()
        with pytest.raises(PeerLostError):
            await peer.write(near.region, [(0, 1)], "g1.x.1", [(0, 1)], timeout_s=TIMEOUT_S)
        with pytest.raises(PeerLostError):
            await near.endpoint.connect(port, timeout_s=TIMEOUT_S)
        async with side(transport, "far", np.zeros(100, np.uint8)) as far:
            grant = far.grant([(0, 100)], "near")
            fresh = await near.connect(far)
            assert fresh is not peer
            await fresh.write(near.region, [(0, 100)], grant.token, [(0, 100)], timeout_s=TIMEOUT_S)
            assert np.array_equal(far.memory, near.memory)


async def test_connect_gives_one_peer_per_endpoint(pair: Pair) -> None:
    near, far = pair
    peers = await asyncio.gather(*(near.connect(far) for _ in range(10)))
    assert len(set(map(id, peers))) == 1


async def test_closing_an_endpoint_fails_the_calls_of_both_sides(pair: Pair) -> None:
    near, far = pair
    grant = far.grant([(0, 20 * MIB)], "near")
    peer = await near.connect(far)
    writing = asyncio.create_task(
        peer.write(near.region, [(0, 20 * MIB)], grant.token, [(0, 20 * MIB)], timeout_s=TIMEOUT_S)
    )
    await landing(far, grant)
    await far.endpoint.close()
    with pytest.raises((PeerLostError, GrantError)):
        await writing
    with pytest.raises(EndpointClosedError):
        far.endpoint.descriptor()


async def test_memory_is_let_go(transport: str) -> None:
    """`close` of a mapping raises BufferError while anything points into it."""
    source, target = mmap.mmap(-1, 16 * MIB), mmap.mmap(-1, 16 * MIB)
    near, far = make_endpoint(transport, "near"), make_endpoint(transport, "far")
    await near.start()
    await far.start()
    gone = near.register(source)
    await near.unregister(gone)
    with pytest.raises(RangeError):
        near.grant(gone, [(0, 1)], peer="far", generation=1)
    near_region, far_region = near.register(source), far.register(target)
    whole = [(0, 16 * MIB)]
    grant = far.grant(far_region, whole, peer="near", generation=1)
    peer = await near.connect(far.descriptor(), timeout_s=TIMEOUT_S)
    writing = asyncio.create_task(peer.write(near_region, whole, grant.token, whole, timeout_s=TIMEOUT_S))
    await eventually(lambda: far.written_bytes(grant) > 0)
    await far.unregister(far_region)
    target.close()
    with pytest.raises(GrantError):
        await writing
    await near.close()
    source.close()
    await far.close()
    assert near_region.region_bytes == far_region.region_bytes == 16 * MIB


async def test_malformed_arguments_name_the_field(pair: Pair) -> None:
    near, far = pair
    grant = far.grant([(0, 100)], "near")
    peer = await near.connect(far)
    cases = [
        ([(0, 10)], [(0, 11)], "local has 10 bytes, remote has 11"),
        ([(-1, 10)], [(0, 10)], "local"),
        ([(20 * MIB - 5, 10)], [(0, 10)], "local"),
        ([(0, 10)], [(0, -10)], "remote"),
        ([0, 10], [(0, 10)], "local"),
        ([(0.5, 10)], [(0, 10)], "local"),
        ([(0, 2**62)], [(0, 2**62)], "local"),
        (scattered(70_000, 1, 2, 1), [(0, 70_000)], "65536"),
    ]
    for local, remote, text in cases:
        with pytest.raises(RangeError, match=text):
            await peer.write(near.region, local, grant.token, remote, timeout_s=TIMEOUT_S)
    with pytest.raises(RangeError, match="grant_token"):
        await peer.write(near.region, [(0, 1)], "x" * 500, [(0, 1)], timeout_s=TIMEOUT_S)
    with pytest.raises(ValueError, match="secret"):
        Endpoint("name", b"short")
    with pytest.raises(ValueError, match="turn_bytes"):
        Limits(turn_bytes=0)
    with pytest.raises(kvtransfer.DescriptorError):
        await near.endpoint.connect("not a descriptor", timeout_s=TIMEOUT_S)
