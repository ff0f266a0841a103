"""What every transport promises about tags, verification and what is known of a call that failed."""

import asyncio

import numpy as np
import pytest
from tests.support.transfer import Pair, Side, firing, landing

from kvtransfer import (
    TAG_BYTES_MAX,
    Access,
    Arrival,
    ChecksumError,
    Grant,
    GrantError,
    Peer,
    RangeError,
    TransferError,
)

pytestmark = pytest.mark.contract

MIB = 1 << 20
TOTAL = 20 * MIB
WHOLE = [(0, TOTAL)]
TIMEOUT_S = 20.0


class Arrivals:
    """The tags that came, each with whether the bytes under it were there."""

    def __init__(self, owner: Side, source: Side) -> None:
        self._owner = owner
        self._source = source
        self.seen: list[tuple[bytes, int, bool]] = []

    def __call__(self, arrival: Arrival) -> None:
        count = arrival.payload_bytes
        there = np.array_equal(self._owner.memory[:count], self._source.memory[:count])
        self.seen.append((arrival.tag, count, there))


@pytest.fixture
def arrivals(pair: Pair) -> Arrivals:
    near, far = pair
    return Arrivals(far, near)


async def write(peer: Peer, near: Side, grant: Grant, ranges: list[tuple[int, int]], **more: object) -> None:
    await peer.write(near.region, ranges, grant.token, ranges, timeout_s=TIMEOUT_S, **more)


@pytest.mark.parametrize("size", [0, 1, 4096, 16 * MIB + 1])
@pytest.mark.parametrize("verify", [False, True])
async def test_a_tag_arrives_once_and_after_its_bytes(
    pair: Pair, arrivals: Arrivals, size: int, verify: bool
) -> None:
    near, far = pair
    grant = far.grant(WHOLE, "near", on_arrival=arrivals)
    peer = await near.connect(far)
    tag = bytes(range(TAG_BYTES_MAX))
    await write(peer, near, grant, [(0, size)], tag=tag, verify=verify)
    assert arrivals.seen == [(tag, size, True)]
    await write(peer, near, grant, [(0, size)])
    assert len(arrivals.seen) == 1


async def test_tags_of_many_writes_at_once(pair: Pair) -> None:
    """Each knows its own bytes: write number n brings n + 1 blocks, tagged n."""
    near, far = pair
    seen: list[tuple[int, int]] = []
    grant = far.grant(
        WHOLE, "near", on_arrival=lambda arrival: seen.append((arrival.tag[0], arrival.payload_bytes))
    )
    peer = await near.connect(far)
    calls = [
        write(peer, near, grant, [(block * 8192, 4096) for block in range(n + 1)], tag=bytes([n]))
        for n in range(100)
    ]
    await asyncio.gather(*calls)
    assert sorted(seen) == [(n, (n + 1) * 4096) for n in range(100)]


async def test_a_tag_that_nobody_takes_is_refused(pair: Pair) -> None:
    near, far = pair
    grant = far.grant(WHOLE, "near")
    peer = await near.connect(far)
    with pytest.raises(GrantError):
        await write(peer, near, grant, WHOLE, tag=b"tag")
    assert not far.memory.any()
    with pytest.raises(RangeError, match="tag has 257 bytes"):
        await write(peer, near, grant, WHOLE, tag=bytes(TAG_BYTES_MAX + 1))
    await write(peer, near, grant, [(0, 1)])


async def test_a_write_that_fails_brings_no_tag(pair: Pair, arrivals: Arrivals) -> None:
    """Revoked in the middle of writes: as many tags as writes that ended well."""
    near, far = pair
    grant = far.grant(WHOLE, "near", on_arrival=arrivals)
    peer = await near.connect(far)
    done = 0

    async def call() -> None:
        nonlocal done
        await write(peer, near, grant, WHOLE, tag=b"tag")
        done += 1

    writing = asyncio.create_task(firing(call))
    await landing(far, grant, TOTAL + TOTAL // 2)
    await far.endpoint.revoke(grant)
    arrived = len(arrivals.seen)
    with pytest.raises(GrantError):
        await writing
    # The answer to a write that ended before the revoke was on its way.
    assert arrived == len(arrivals.seen) >= 1
    assert done == arrived
    assert arrivals.seen == [(b"tag", TOTAL, True)] * arrived
    with pytest.raises(GrantError):
        await write(peer, near, grant, [(0, 100)], tag=b"late")
    assert len(arrivals.seen) == arrived


@pytest.mark.parametrize("direction", ["write", "read"])
@pytest.mark.parametrize("size", [1000, 16 * MIB])
async def test_verified_calls(pair: Pair, direction: str, size: int) -> None:
    near, far = pair
    source = [(size - size // 2, size // 2), (0, size - size // 2)]
    target = [(MIB, size)]
    if direction == "write":
        peer = await near.connect(far)
        token = far.grant(WHOLE, "near").token
        await peer.write(near.region, source, token, target, timeout_s=TIMEOUT_S, verify=True)
    else:
        peer = await far.connect(near)
        token = near.grant(WHOLE, "far", access=Access.READ).token
        await peer.read(far.region, target, token, source, timeout_s=TIMEOUT_S, verify=True)
    expected = np.concatenate([near.memory[start : start + count] for start, count in source])
    assert np.array_equal(far.memory[MIB : MIB + size], expected)


@pytest.mark.parametrize("direction", ["write", "read"])
async def test_bytes_that_change_on_their_way_are_noticed(
    pair: Pair, arrivals: Arrivals, direction: str
) -> None:
    """As a defect of memory would do it: the end of the source changes at every turn of the loop, so also
    after it was digested and before it is moved."""
    near, far = pair
    if direction == "write":
        peer = await near.connect(far)
        token = far.grant(WHOLE, "near", on_arrival=arrivals).token
        move = peer.write(near.region, WHOLE, token, WHOLE, timeout_s=TIMEOUT_S, verify=True, tag=b"tag")
    else:
        peer = await far.connect(near)
        token = near.grant(WHOLE, "far", access=Access.READ).token
        move = peer.read(far.region, WHOLE, token, WHOLE, timeout_s=TIMEOUT_S, verify=True)
    moving = asyncio.create_task(move)
    turn = near.memory[-8:].view(np.uint64)
    while not moving.done():
        turn += 1
        await asyncio.sleep(0)
    with pytest.raises(ChecksumError) as raised:
        await moving
    assert raised.value.retryable
    assert arrivals.seen == []


async def test_an_error_names_the_ranges_that_landed(pair: Pair) -> None:
    """Those that it names are there. Nothing is known to have landed of a call that was refused."""
    near, far = pair
    peer = await near.connect(far)
    ranges = [(start, 4096) for start in range(0, TOTAL, 8192)]
    grant = far.grant(WHOLE, "near")
    calls = 0

    async def call() -> None:
        nonlocal calls
        calls += 1
        far.memory[:] = 0
        await write(peer, near, grant, ranges)

    writing = asyncio.create_task(firing(call))
    await landing(far, grant, TOTAL // 8)
    await far.endpoint.revoke(grant)
    with pytest.raises(GrantError) as raised:
        await writing
    landed = raised.value.landed_ranges
    assert landed is not None
    assert landed.shape == (len(ranges),)
    for index in np.flatnonzero(landed):
        start, count = ranges[index]
        assert np.array_equal(far.memory[start : start + count], near.memory[start : start + count])
    with pytest.raises(TransferError) as refused:
        await write(peer, near, grant, ranges)
    assert refused.value.landed_ranges is not None
    assert not refused.value.landed_ranges.any()
