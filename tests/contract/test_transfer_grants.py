"""What every transport promises about grants: what lands where, and that nothing does after a revoke."""

import asyncio
import mmap

import numpy as np
import pytest
from tests.support.eventually import eventually
from tests.support.transfer import READERS_LOOK_TWICE, Pair, firing, landing, make_endpoint

from kvtransfer import Access, EndpointClosedError, GrantError, PeerLostError, RangeError

pytestmark = pytest.mark.contract

MIB = 1 << 20
TOTAL = 20 * MIB
WHOLE = [(0, TOTAL)]
TIMEOUT_S = 20.0


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


async def test_revoke_under_fire_stops_writes(pair: Pair) -> None:
    near, far = pair
    peer = await near.connect(far)
    for generation in range(5):
        grant = far.grant(WHOLE, "near", generation=generation)
        writing = asyncio.create_task(
            firing(lambda: peer.write(near.region, WHOLE, grant.token, WHOLE, timeout_s=TIMEOUT_S))  # noqa: B023
        )
        await landing(far, grant, generation * MIB)
        await far.endpoint.revoke(grant)
        landed = far.endpoint.written_bytes(grant)
        far.memory[:] = 255
        with pytest.raises(GrantError):
            await writing
        again = far.grant([(0, 1)], "near", generation=generation)
        await peer.write(near.region, [(0, 1)], again.token, [(0, 1)], timeout_s=TIMEOUT_S)
        assert (far.memory[1:] == 255).all()
        assert far.endpoint.written_bytes(grant) == landed


async def test_revoke_under_fire_stops_reads(pair: Pair, transport: str) -> None:
    """No read ends well with bytes of after the revoke."""
    near, far = pair
    grant = near.grant(WHOLE, "far", access=Access.READ)
    peer = await far.connect(near)
    expected = near.memory.copy()

    async def read() -> None:
        far.memory[:] = 0
        await peer.read(far.region, WHOLE, grant.token, WHOLE, timeout_s=TIMEOUT_S)
        assert np.array_equal(far.memory, expected)

    reading = asyncio.create_task(firing(read))
    await eventually(lambda: far.memory[0] != 0)
    await near.endpoint.revoke(grant)
    near.memory[:] = 255
    with pytest.raises(GrantError):
        await reading
    if transport not in READERS_LOOK_TWICE:
        assert not (far.memory == 255).any()


@pytest.mark.parametrize("direction", ["write", "read"])
async def test_a_cancelled_call_touches_no_memory_afterwards(pair: Pair, direction: str) -> None:
    near, far = pair
    if direction == "write":
        peer = await near.connect(far)
        grant = far.grant(WHOLE, "near")
        call = lambda: peer.write(near.region, WHOLE, grant.token, WHOLE, timeout_s=TIMEOUT_S)  # noqa: E731
    else:
        peer = await far.connect(near)
        grant = near.grant(WHOLE, "far", access=Access.READ)
        call = lambda: peer.read(far.region, WHOLE, grant.token, WHOLE, timeout_s=TIMEOUT_S)  # noqa: E731
    task = asyncio.create_task(firing(call))
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


async def test_closing_an_endpoint_fails_the_calls_of_both_sides(pair: Pair) -> None:
    near, far = pair
    grant = far.grant(WHOLE, "near")
    peer = await near.connect(far)
    writing = asyncio.create_task(
        firing(lambda: peer.write(near.region, WHOLE, grant.token, WHOLE, timeout_s=TIMEOUT_S))
    )
    await landing(far, grant)
    await far.endpoint.close()
    with pytest.raises((PeerLostError, GrantError)):
        await writing
    with pytest.raises(EndpointClosedError):
        far.endpoint.descriptor()


async def test_memory_is_let_go(transport: str) -> None:
    """`close` of a mapping raises BufferError while anything points into it."""
    size = 16 * MIB
    whole = [(0, size)]
    source, target = mmap.mmap(-1, size), mmap.mmap(-1, size)
    near, far = make_endpoint(transport, "near"), make_endpoint(transport, "far")
    await near.start()
    await far.start()
    gone = near.register(source)
    await near.unregister(gone)
    with pytest.raises(RangeError):
        near.grant(gone, [(0, 1)], peer="far", generation=1)
    near_region, far_region = near.register(source), far.register(target)
    grant = far.grant(far_region, whole, peer="near", generation=1)
    peer = await near.connect(far.descriptor(), timeout_s=TIMEOUT_S)
    writing = asyncio.create_task(
        firing(lambda: peer.write(near_region, whole, grant.token, whole, timeout_s=TIMEOUT_S))
    )
    await eventually(lambda: far.written_bytes(grant) > 0)
    await far.unregister(far_region)
    target.close()
    with pytest.raises(GrantError):
        await writing
    await near.close()
    source.close()
    await far.close()
    assert near_region.region_bytes == far_region.region_bytes == size
