"""What the transport between hosts promises, with each side on a host of its own."""

import asyncio
from collections.abc import Iterator

import numpy as np
import pytest
from tests.support.netns import HostPair, host_pair
from tests.support.transfer_peer import PeerProcess
from tests.support.two_hosts import (
    SLOW_MEGABITS_PER_S,
    TOTAL,
    begun,
    call,
    checksum,
    count,
    peer_on,
    token_of,
)

pytestmark = pytest.mark.contract

SIZES = (0, 1, 4096, TOTAL)


@pytest.fixture
def hosts() -> Iterator[HostPair]:
    with host_pair() as pair:
        yield pair


@pytest.mark.parametrize("do", ["write", "read"])
async def test_exactly_the_bytes_asked_for(caller: PeerProcess, owner: PeerProcess, do: str) -> None:
    source, target = (caller, owner) if do == "write" else (owner, caller)
    await source.ask("fill_random", seed=7)
    token = await token_of(owner, access=do)
    for size in SIZES:
        await target.ask("fill", value=0)
        ranges = [(TOTAL - size, size)]
        answer = await call(do, caller, owner, token, ranges, ranges)
        assert answer["bytes"] == size
        assert await checksum(target, ranges) == await checksum(source, ranges)
        assert await count(target, 0) == TOTAL - size


def scattered(length: int, stride: int, seed: int) -> list[list[int]]:
    """10,000 ranges that do not touch, in random order."""
    places = np.random.default_rng(seed).permutation(10_000)
    ranges: list[list[int]] = np.stack((places * stride, np.full(len(places), length)), axis=1).tolist()
    return ranges


@pytest.mark.parametrize("do", ["write", "read"])
async def test_10000_ranges_in_a_call(caller: PeerProcess, owner: PeerProcess, do: str) -> None:
    source, target = (caller, owner) if do == "write" else (owner, caller)
    await source.ask("fill_random", seed=7)
    local, remote = scattered(1000, 1500, 1), scattered(1000, 1600, 2)
    token = await token_of(owner, remote, access=do)
    answer = await call(do, caller, owner, token, local, remote)
    assert answer["bytes"] == 10_000_000
    assert await checksum(caller, local) == await checksum(owner, remote)
    assert await count(target, 0) == TOTAL - 10_000_000


async def test_overlapping_reads(caller: PeerProcess, owner: PeerProcess) -> None:
    await owner.ask("fill_random", seed=7)
    local, remote = [(5, 15_000)], [(0, 5000), (2000, 5000), (0, 5000)]
    answer = await call("read", caller, owner, await token_of(owner, access="read"), local, remote)
    assert answer["bytes"] == 15_000
    assert await checksum(caller, local) == await checksum(owner, remote)


@pytest.mark.parametrize("do", ["write", "read"])
async def test_a_call_cancelled_half_way_touches_no_memory_afterwards(
    hosts: HostPair, caller: PeerProcess, owner: PeerProcess, do: str
) -> None:
    hosts.shape(SLOW_MEGABITS_PER_S)
    token, task = await begun(do, caller, owner, call="half")
    await caller.ask("cancel", call="half")
    assert (await task)["error"] == asyncio.CancelledError.__name__
    # The caller's memory is given away: as a source not one of these may leave, as a target nothing may land.
    await caller.ask("fill", value=255)
    # Behind the first call's bytes on the same connection, or after the end of that connection.
    assert (await call(do, caller, owner, token, [(0, 1)], [(0, 1)]))["bytes"] == 1
    assert await count(owner, 255) == (1 if do == "write" else 0)
    assert await count(caller, 255) == (TOTAL if do == "write" else TOTAL - 1)


async def test_an_owner_killed_half_way(hosts: HostPair, caller: PeerProcess, owner: PeerProcess) -> None:
    hosts.shape(SLOW_MEGABITS_PER_S)
    token, task = await begun("write", caller, owner)
    await owner.kill()
    answer = await task
    assert answer["error"] == "PeerLostError"
    assert answer["retryable"]
    assert (await call("write", caller, owner, token))["error"] == "PeerLostError"
    hosts.unshape()
    async with peer_on(hosts.far, "owner") as successor:
        assert (await call("write", caller, successor, token))["error"] == "GrantError"
        assert (await call("write", caller, successor, await token_of(successor)))["bytes"] == TOTAL
        assert await checksum(successor) == await checksum(caller)


async def test_a_caller_killed_half_way(hosts: HostPair, caller: PeerProcess, owner: PeerProcess) -> None:
    hosts.shape(SLOW_MEGABITS_PER_S)
    token, task = await begun("write", caller, owner)
    await caller.kill()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (await owner.ask("written", token=token))["bytes"] < TOTAL
    hosts.unshape()
    async with peer_on(hosts.near, "caller") as successor:
        await successor.ask("fill", value=3)
        assert (await call("write", successor, owner, token))["bytes"] == TOTAL
        assert await count(owner, 3) == TOTAL


@pytest.mark.parametrize("do", ["write", "read"])
async def test_an_owner_stopped_past_the_deadline(
    hosts: HostPair, caller: PeerProcess, owner: PeerProcess, do: str
) -> None:
    hosts.shape(SLOW_MEGABITS_PER_S)
    token, task = await begun(do, caller, owner, timeout_s=1.0)
    owner.stop()
    assert (await task)["error"] == "TransferTimeout"
    await caller.ask("fill", value=255)
    hosts.unshape()
    owner.resume()
    assert (await call(do, caller, owner, token, [(0, 9)], [(0, 9)]))["bytes"] == 9
    assert await count(owner, 255) == (9 if do == "write" else 0)
    assert await count(caller, 255) == (TOTAL if do == "write" else TOTAL - 9)


@pytest.mark.parametrize("do", ["write", "read"])
async def test_a_grant_revoked_under_fire(
    hosts: HostPair, caller: PeerProcess, owner: PeerProcess, do: str
) -> None:
    hosts.shape(SLOW_MEGABITS_PER_S)
    token, task = await begun(do, caller, owner)
    await owner.ask("revoke", token=token)
    await owner.ask("fill", value=255)  # the owner's memory is given away
    hosts.unshape()
    assert (await task)["error"] == "GrantError"
    again = await token_of(owner, access=do)
    assert (await call(do, caller, owner, again, [(0, 1)], [(0, 1)]))["bytes"] == 1
    assert await count(owner, 255) == (TOTAL - 1 if do == "write" else TOTAL)
    assert await count(caller, 255) == (0 if do == "write" else 1)


async def test_a_writer_stopped_while_its_grant_is_revoked(
    hosts: HostPair, caller: PeerProcess, owner: PeerProcess
) -> None:
    hosts.shape(SLOW_MEGABITS_PER_S)
    token, task = await begun("write", caller, owner)
    caller.stop()
    await owner.ask("revoke", token=token)
    await owner.ask("fill", value=255)
    hosts.unshape()
    caller.resume()
    assert (await task)["error"] == "GrantError"
    again = await token_of(owner)
    assert (await call("write", caller, owner, again, [(0, 1)], [(0, 1)]))["bytes"] == 1
    assert await count(owner, 255) == TOTAL - 1


async def test_wrong_secret(hosts: HostPair, owner: PeerProcess) -> None:
    async with peer_on(hosts.near, "caller", secret=b"another secret, as long") as stranger:
        token = await token_of(owner)
        assert (await call("write", stranger, owner, token))["error"] == "AuthError"
    assert await count(owner, 0) == TOTAL


async def test_shared_memory_is_for_one_host_only(hosts: HostPair) -> None:
    """Both hosts have the same kernel, so by its identity alone they look like one: the dial tells."""
    async with (
        peer_on(hosts.near, "caller", transport="shm,tcp") as caller,
        peer_on(hosts.near, "owner", transport="shm,tcp") as beside,
        peer_on(hosts.far, "owner", transport="shm,tcp") as owner,
    ):
        await caller.ask("fill_random", seed=7)
        for process, expected in ((owner, "tcp"), (beside, "shm"), (owner, "tcp")):
            answer = await call("write", caller, process, await token_of(process))
            assert answer == {"bytes": TOTAL, "transport": expected}
            assert await checksum(process) == await checksum(caller)
