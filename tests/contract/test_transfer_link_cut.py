"""What transfers between two hosts promise when the link between them fails in the middle."""

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest
from tests.support.netns import Cut, HostPair, host_pair, tcp_counter
from tests.support.transfer_peer import PeerProcess
from tests.support.two_hosts import (
    MIB,
    SLOW_MEGABITS_PER_S,
    STALL_S,
    TOTAL,
    begun,
    call,
    checksum,
    count,
    peer_on,
    token_of,
)
from tests.support.waiting import until

pytestmark = pytest.mark.contract

RECOVERY_S_MAX = 15.0
"""TCP doubles its waits during an outage, so it may notice the end as late as the outage was long."""


@pytest.fixture
def hosts() -> Iterator[HostPair]:
    """The link is slow until a test says otherwise."""
    with host_pair() as pair:
        pair.shape(SLOW_MEGABITS_PER_S)
        yield pair


@pytest.fixture
async def caller(hosts: HostPair) -> AsyncIterator[PeerProcess]:
    async with peer_on(hosts.near, "caller", stall_s_max=STALL_S) as process:
        yield process


@pytest.fixture
async def owner(hosts: HostPair) -> AsyncIterator[PeerProcess]:
    async with peer_on(hosts.far, "owner") as process:
        yield process


async def cut(hosts: HostPair, kind: Cut, sender: PeerProcess) -> None:
    """Cut the link; returns when the sender's kernel waited in vain for an acknowledgement."""
    before = tcp_counter(sender.pid, "TCPTimeouts")
    hosts.cut(kind)
    await until(lambda: tcp_counter(sender.pid, "TCPTimeouts") > before)


@pytest.mark.parametrize("do", ["write", "read"])
@pytest.mark.parametrize("kind", list(Cut))
async def test_a_link_that_comes_back_in_time_costs_only_time(
    hosts: HostPair, caller: PeerProcess, owner: PeerProcess, kind: Cut, do: str
) -> None:
    source, target = (caller, owner) if do == "write" else (owner, caller)
    _, task = await begun(do, caller, owner)
    connections = tcp_counter(owner.pid, "PassiveOpens")
    await cut(hosts, kind, source)
    assert not task.done()
    assert await count(target, 0) > 0
    hosts.unshape()
    hosts.restore(kind)
    assert (await task)["bytes"] == TOTAL
    assert await checksum(target) == await checksum(source)
    # It was the same connection all the time.
    assert tcp_counter(owner.pid, "PassiveOpens") == connections


@pytest.mark.parametrize("kind", list(Cut))
async def test_a_write_that_the_link_cut_off_never_lands_in_memory_given_away(
    hosts: HostPair, caller: PeerProcess, owner: PeerProcess, kind: Cut
) -> None:
    token, task = await begun("write", caller, owner, timeout_s=1.5)
    patient = asyncio.create_task(call("write", caller, owner, token, timeout_s=20.0))
    await cut(hosts, kind, caller)
    answer = await task
    assert (answer["error"], answer["retryable"]) == ("TransferTimeout", True)
    # The connection is given up as stalled, for all calls on it.
    answer = await patient
    assert (answer["error"], answer["retryable"]) == ("PeerLostError", True)
    landed = (await owner.ask("written", token=token))["bytes"]
    assert MIB < landed < TOTAL
    await owner.ask("revoke", token=token)
    await owner.ask("fill", value=255)
    received = tcp_counter(owner.pid, "InSegs")
    hosts.unshape()
    hosts.restore(kind)
    # What the caller's kernel still had of the old connection arrives now; then that connection ends.
    await until(lambda: tcp_counter(owner.pid, "CurrEstab") == 0, RECOVERY_S_MAX)
    assert tcp_counter(owner.pid, "InSegs") > received
    assert await count(owner, 255) == TOTAL
    again = await token_of(owner)
    assert (await call("write", caller, owner, again))["bytes"] == TOTAL
    assert await checksum(owner) == await checksum(caller)
