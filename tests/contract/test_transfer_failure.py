"""What every transport promises when the process at the other end stops, dies or comes back."""

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.eventually import eventually
from tests.support.transfer import READERS_LOOK_TWICE, Side, firing, no_leaks, pattern, side
from tests.support.transfer_peer import PeerProcess

from kvtransfer import Access, Grant, GrantError, Limits, PeerLostError, TransferTimeout, checksum

pytestmark = pytest.mark.contract

MIB = 1 << 20
TOTAL = 64 * MIB  # far more than the kernel buffers of a connection hold
WHOLE = [(0, TOTAL)]
STALL_S = 0.2
TIMEOUT_S = 20.0


@pytest.fixture
async def here(transport: str) -> AsyncIterator[Side]:
    """Our side: TOTAL bytes of a pattern."""
    async with (
        no_leaks(),
        side(transport, "here", pattern(TOTAL), limits=Limits(stall_s_max=STALL_S)) as made,
    ):
        yield made


@pytest.fixture
async def there(here: Side, transport: str) -> AsyncIterator[PeerProcess]:
    """The other process: TOTAL bytes, zero."""
    async with PeerProcess.run("there", TOTAL, transport=transport) as process:
        yield process


def to(owner: Side, grant: Grant, ranges: list[tuple[int, int]] = WHOLE) -> dict[str, Any]:
    """What a peer process needs to call us under a grant."""
    return {
        "descriptor": owner.endpoint.descriptor(),
        "local": ranges,
        "token": grant.token,
        "remote": ranges,
    }


async def test_between_two_processes_write_and_read(here: Side, there: PeerProcess) -> None:
    peer = await here.endpoint.connect(there.descriptor, timeout_s=TIMEOUT_S)
    write = await there.ask("grant", ranges=WHOLE, peer="here")
    assert (
        await peer.write(here.region, WHOLE, write["token"], WHOLE, timeout_s=TIMEOUT_S)
    ).payload_bytes == TOTAL
    assert (await there.ask("checksum", ranges=WHOLE))["checksum"] == checksum(here.region, WHOLE)
    expected = here.memory.copy()
    here.memory[:] = 0
    read = await there.ask("grant", ranges=WHOLE, peer="here", access="read")
    assert (
        await peer.read(here.region, WHOLE, read["token"], WHOLE, timeout_s=TIMEOUT_S)
    ).payload_bytes == TOTAL
    assert np.array_equal(here.memory, expected)
    assert (await there.ask("written", token=write["token"]))["bytes"] == TOTAL


async def test_a_stopped_writer_whose_grant_was_revoked_writes_nothing(
    here: Side, there: PeerProcess
) -> None:
    await there.ask("fill", value=1)
    here.memory[:] = 0
    grant = here.grant(WHOLE, "there")
    writing = asyncio.create_task(there.ask("write", **to(here, grant), until_it_fails=True))
    await eventually(lambda: here.endpoint.written_bytes(grant) > 0)
    there.stop()
    # What the stopped writer had sent still waits in the kernel; it is read after the revoke only.
    await here.endpoint.revoke(grant)
    landed = here.endpoint.written_bytes(grant)
    here.memory[:] = 2
    there.resume()
    assert (await writing)["error"] == GrantError.__name__
    # In order on the same connection, so everything of the first write has arrived when this is done.
    again = here.grant([(0, 1)], "there", generation=2)
    answer = await there.ask("write", **to(here, again, [(0, 1)]))
    assert answer["bytes"] == 1
    assert here.memory[0] == 1
    assert (here.memory[1:] == 2).all()
    assert here.endpoint.written_bytes(grant) == landed


async def test_an_owner_killed_half_way(here: Side, there: PeerProcess, transport: str) -> None:
    peer = await here.endpoint.connect(there.descriptor, timeout_s=TIMEOUT_S)
    grant = await there.ask("grant", ranges=WHOLE, peer="here")
    there.stop()
    writing = asyncio.create_task(peer.write(here.region, WHOLE, grant["token"], WHOLE, timeout_s=TIMEOUT_S))
    await eventually(lambda: not peer.idle)
    await there.kill()
    with pytest.raises(PeerLostError) as raised:
        await writing
    assert raised.value.retryable
    with pytest.raises(PeerLostError):
        await peer.write(here.region, WHOLE, grant["token"], WHOLE, timeout_s=TIMEOUT_S)
    async with PeerProcess.run("there", TOTAL, transport=transport) as successor:
        fresh = await here.endpoint.connect(successor.descriptor, timeout_s=TIMEOUT_S)
        with pytest.raises(GrantError):
            await fresh.write(here.region, WHOLE, grant["token"], WHOLE, timeout_s=TIMEOUT_S)
        grant = await successor.ask("grant", ranges=WHOLE, peer="here")
        assert (
            await fresh.write(here.region, WHOLE, grant["token"], WHOLE, timeout_s=TIMEOUT_S)
        ).payload_bytes == TOTAL


async def test_a_writer_killed_half_way(here: Side, there: PeerProcess, transport: str) -> None:
    grant = here.grant(WHOLE, "there")
    writing = asyncio.create_task(there.ask("write", **to(here, grant), until_it_fails=True))
    await eventually(lambda: here.endpoint.written_bytes(grant) > 0)
    await there.kill()
    with pytest.raises(asyncio.CancelledError):
        await writing
    await here.endpoint.revoke(grant)
    landed = here.endpoint.written_bytes(grant)
    served = here.endpoint.statistics()["there"]
    # Half a write is not taken for one.
    assert served.served_written_bytes == served.served_writes * TOTAL <= landed
    here.memory[:] = 2
    async with PeerProcess.run("there", TOTAL, transport=transport) as successor:
        again = here.grant([(0, 1)], "there", generation=2)
        answer = await successor.ask("write", **to(here, again, [(0, 1)]))
        assert answer["bytes"] == 1
    assert (here.memory[1:] == 2).all()
    assert here.endpoint.written_bytes(grant) == landed


async def test_a_stalled_owner_past_the_deadline(here: Side, there: PeerProcess) -> None:
    """Both calls end in time, nothing of the source leaves afterwards, and the next call goes through."""
    peer = await here.endpoint.connect(there.descriptor, timeout_s=TIMEOUT_S)
    write = await there.ask("grant", ranges=WHOLE, peer="here")
    read = await there.ask("grant", ranges=WHOLE, peer="here", access="read")
    there.stop()
    results = await asyncio.gather(
        peer.write(here.region, WHOLE, write["token"], WHOLE, timeout_s=0.1),
        peer.read(here.region, [(0, 1)], read["token"], [(0, 1)], timeout_s=0.1),
        return_exceptions=True,
    )
    assert [type(result) for result in results] == [TransferTimeout] * 2
    here.memory[:] = 255
    there.resume()
    assert (
        await peer.write(here.region, [(0, 9)], write["token"], [(0, 9)], timeout_s=TIMEOUT_S)
    ).payload_bytes == 9
    assert (await there.ask("count", value=255))["count"] == 9


async def test_a_connection_that_stalls_for_long_is_replaced(here: Side, there: PeerProcess) -> None:
    peer = await here.endpoint.connect(there.descriptor, timeout_s=TIMEOUT_S)
    write = await there.ask("grant", ranges=WHOLE, peer="here")
    there.stop()
    other = asyncio.create_task(peer.write(here.region, WHOLE, write["token"], WHOLE, timeout_s=TIMEOUT_S))
    with pytest.raises(TransferTimeout):
        await peer.write(here.region, WHOLE, write["token"], WHOLE, timeout_s=2 * STALL_S)
    with pytest.raises(PeerLostError, match="stalls"):
        await other
    there.resume()
    # The old connection's bytes still lie in the other kernel; on the new one comes what counts.
    here.memory[:] = 7
    assert (
        await peer.write(here.region, WHOLE, write["token"], WHOLE, timeout_s=TIMEOUT_S)
    ).payload_bytes == TOTAL
    assert (await there.ask("count", value=7))["count"] == TOTAL


async def test_a_stopped_reader_gets_nothing_of_memory_given_away(here: Side, transport: str) -> None:
    grant = here.grant(WHOLE, "slow", access=Access.READ)
    async with PeerProcess.run("slow", TOTAL, transport=transport, turn_bytes=4096) as slow:
        untouched = (await slow.ask("checksum", ranges=[(0, 4096)]))["checksum"]
        reading = asyncio.create_task(slow.ask("read", **to(here, grant), until_it_fails=True))
        # Of a few bytes only: the process reads while it answers.
        while (await slow.ask("checksum", ranges=[(0, 4096)]))["checksum"] == untouched:
            assert not reading.done()
        slow.stop()
        await here.endpoint.revoke(grant)
        here.memory[:] = 255
        slow.resume()
        assert (await reading)["error"] == GrantError.__name__
        if transport not in READERS_LOOK_TWICE:
            assert (await slow.ask("count", value=255))["count"] == 0


async def test_a_small_call_waits_for_no_other_peer(here: Side, there: PeerProcess, transport: str) -> None:
    async with PeerProcess.run("well", MIB, transport=transport) as well:
        stalled_peer = await here.endpoint.connect(there.descriptor, timeout_s=TIMEOUT_S)
        grant = await there.ask("grant", ranges=WHOLE, peer="here")
        there.stop()
        stalled = asyncio.create_task(
            stalled_peer.write(here.region, WHOLE, grant["token"], WHOLE, timeout_s=TIMEOUT_S)
        )
        peer = await here.endpoint.connect(well.descriptor, timeout_s=TIMEOUT_S)
        token = (await well.ask("grant", ranges=[(0, MIB)], peer="here"))["token"]
        for _ in range(10):
            await peer.write(here.region, [(0, MIB)], token, [(0, MIB)], timeout_s=TIMEOUT_S)
        assert not stalled.done()
        there.resume()
        assert (await stalled).payload_bytes == TOTAL


async def test_of_many_peers_one_fails_and_the_others_are_well(
    here: Side, there: PeerProcess, transport: str
) -> None:
    """Killed in the middle of its calls; nobody else's call fails or is late."""
    async with PeerProcess.run("well", MIB, transport=transport) as well:
        doomed = await here.endpoint.connect(there.descriptor, timeout_s=TIMEOUT_S)
        peer = await here.endpoint.connect(well.descriptor, timeout_s=TIMEOUT_S)
        grant = await there.ask("grant", ranges=WHOLE, peer="here")
        token = (await well.ask("grant", ranges=[(0, MIB)], peer="here"))["token"]
        lost = asyncio.create_task(
            firing(lambda: doomed.write(here.region, WHOLE, grant["token"], WHOLE, timeout_s=TIMEOUT_S))
        )
        for number in range(20):
            if number == 10:
                await there.kill()
            await peer.write(here.region, [(0, MIB)], token, [(0, MIB)], timeout_s=TIMEOUT_S)
        with pytest.raises(PeerLostError):
            await lost
        assert (await well.ask("checksum", ranges=[(0, MIB)]))["checksum"] == checksum(
            here.region, [(0, MIB)]
        )
        assert here.endpoint.statistics()["well"].failures == 0


async def test_memory_stays_the_same_over_many_failures(here: Side, there: PeerProcess) -> None:
    """Calls that are refused, cancelled and late, on links that are broken: nothing of them is kept."""
    peer = await here.endpoint.connect(there.descriptor, timeout_s=TIMEOUT_S)
    grant = await there.ask("grant", ranges=[(0, 4 * MIB)], peer="here")
    part = [(0, 4 * MIB)]

    async def fail_in_all_ways() -> None:
        with pytest.raises(GrantError):
            await peer.write(here.region, part, "g1.unknown.1", part, timeout_s=TIMEOUT_S)
        with pytest.raises(TransferTimeout):
            await peer.write(here.region, part, grant["token"], part, timeout_s=0.0001)
        task = asyncio.create_task(
            firing(lambda: peer.write(here.region, part, grant["token"], part, timeout_s=TIMEOUT_S))
        )
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])

    for _ in range(50):
        await fail_in_all_ways()
    before_bytes = _resident_bytes()
    for _ in range(200):
        await fail_in_all_ways()
    assert _resident_bytes() - before_bytes < 100 * 4 * MIB / 10  # a tenth of what half of them moved


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
