"""What every transport promises, between two endpoints of this process."""

import asyncio

import numpy as np
import pytest
from tests.support.eventually import eventually
from tests.support.transfer import Pair, Side, landing, make_endpoint, no_leaks, pattern, side

import kvtransfer
from kvtransfer import (
    Access,
    AuthError,
    BusyError,
    Endpoint,
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


def served_bytes(owner: Side, caller: str) -> tuple[int, int]:
    """Written and read by that caller; an owner may hear of reads a little later."""
    counted = owner.endpoint.statistics()[caller]
    return counted.served_written_bytes, counted.served_read_bytes


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
    await eventually(lambda: served_bytes(far, "near") == (total, total))


async def test_a_small_transfer_does_not_wait_for_large_ones(pair: Pair) -> None:
    near, far = pair
    grant = far.grant([(0, 20 * MIB)], "near")
    peer = await near.connect(far)
    whole = [(0, 20 * MIB)]
    large = [
        asyncio.create_task(peer.write(near.region, whole, grant.token, whole, timeout_s=TIMEOUT_S))
        for _ in range(10)
    ]
    await landing(far, grant)
    await peer.write(near.region, [(0, 10)], grant.token, [(0, 10)], timeout_s=TIMEOUT_S)
    assert not all(task.done() for task in large)
    await asyncio.gather(*large)


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
    for secret in (b"short", "a text, not bytes, of enough characters"):
        with pytest.raises(ValueError, match="secret must be bytes"):
            Endpoint("name", secret)
    with pytest.raises(RangeError, match="region must be what"):
        await peer.write(near.memory, [(0, 1)], grant.token, [(0, 1)], timeout_s=TIMEOUT_S)
    with pytest.raises(RangeError, match="grant_token must be a grant's token"):
        await peer.write(near.region, [(0, 1)], grant, [(0, 1)], timeout_s=TIMEOUT_S)
    with pytest.raises(RangeError, match="tag must be bytes"):
        await peer.write(near.region, [(0, 1)], grant.token, [(0, 1)], timeout_s=TIMEOUT_S, tag="text")
    with pytest.raises(RangeError, match="access must be one of"):
        far.grant([(0, 1)], "near", access="append")
    assert far.grant([(0, 1)], "near", access="read").access is Access.READ
    read_only = np.zeros(10, np.uint8)
    read_only.flags.writeable = False
    for buffer, text in ((read_only, "read-only"), (np.zeros(0), "empty"), ([1, 2], "must be a buffer")):
        with pytest.raises(RangeError, match=text):
            near.endpoint.register(buffer)
    with pytest.raises(ValueError, match="turn_bytes"):
        Limits(turn_bytes=0)
    with pytest.raises(kvtransfer.DescriptorError):
        await near.endpoint.connect("not a descriptor", timeout_s=TIMEOUT_S)
