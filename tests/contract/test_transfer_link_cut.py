"""What transfers between two hosts promise when the link between them fails in the middle."""

import asyncio
from collections.abc import Iterator

import pytest
from tests.support.eventually import eventually
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

pytestmark = pytest.mark.contract

DEADLINE_S = 1.5
FLAPS = 5
FLAP_S = 0.1
RECOVERY_S_MAX = 15.0
"""TCP doubles its waits during an outage, so it may notice the end as late as the outage was long."""


@pytest.fixture
def hosts() -> Iterator[HostPair]:
    """The link is slow until a test says otherwise."""
    with host_pair() as pair:
        pair.shape(SLOW_MEGABITS_PER_S)
        yield pair


async def cut(hosts: HostPair, kind: Cut, sender: PeerProcess) -> None:
    """Cut the link; returns when the sender's kernel waited in vain for an acknowledgement."""
    before = tcp_counter(sender.pid, "TCPTimeouts")
    hosts.cut(kind)
    await eventually(lambda: tcp_counter(sender.pid, "TCPTimeouts") > before)


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


@pytest.mark.parametrize("do", ["write", "read"])
@pytest.mark.parametrize("kind", list(Cut))
async def test_what_a_cut_stopped_for_good_never_lands_in_memory_given_away(
    hosts: HostPair, caller: PeerProcess, owner: PeerProcess, kind: Cut, do: str
) -> None:
    source, target = (caller, owner) if do == "write" else (owner, caller)
    token, task = await begun(do, caller, owner, timeout_s=DEADLINE_S)
    patient = asyncio.create_task(call(do, caller, owner, token))
    await cut(hosts, kind, source)
    answer = await task
    assert (answer["error"], answer["retryable"]) == ("TransferTimeout", True)
    # The connection is given up as stalled, for all calls on it.
    answer = await patient
    assert (answer["error"], answer["retryable"]) == ("PeerLostError", True)
    await owner.ask("revoke", token=token)
    assert 0 < await count(target, 0) < TOTAL
    await target.ask("fill", value=255)
    received = tcp_counter(target.pid, "InSegs")
    hosts.unshape()
    hosts.restore(kind)
    # What the sender's kernel still had of the old connection arrives now; then that connection ends.
    await eventually(lambda: tcp_counter(target.pid, "InSegs") > received, RECOVERY_S_MAX)
    await eventually(lambda: tcp_counter(owner.pid, "CurrEstab") == 0, RECOVERY_S_MAX)
    assert await count(target, 255) == TOTAL
    again = await token_of(owner, access=do)
    assert (await call(do, caller, owner, again))["bytes"] == TOTAL
    assert await checksum(target) == await checksum(source)


@pytest.mark.parametrize("transport", ["tcp", "shm,tcp"])
@pytest.mark.parametrize("kind", list(Cut))
async def test_a_retry_need_not_wait_for_what_the_cut_left_in_the_kernel(
    hosts: HostPair, kind: Cut, transport: str
) -> None:
    """Nor, where the hosts seem to have another way, for that one to be tried again."""
    async with (
        peer_on(hosts.near, "caller", transport=transport, stall_s_max=STALL_S) as caller,
        peer_on(hosts.far, "owner", transport=transport) as owner,
    ):
        token, task = await begun("write", caller, owner, timeout_s=DEADLINE_S)
        await cut(hosts, kind, caller)
        assert (await task)["error"] == "TransferTimeout"
        await caller.ask("fill", value=7)
        hosts.unshape()
        hosts.restore(kind)
        # Under the same grant, so only the end of the old connection keeps its late bytes out.
        answer = await call("write", caller, owner, token)
        assert answer == {"bytes": TOTAL, "transport": "tcp"}
        # What the caller closed is closed at the owner too.
        await eventually(lambda: tcp_counter(caller.pid, "CurrEstab") == tcp_counter(owner.pid, "CurrEstab"))
        assert await count(owner, 7) == TOTAL


async def flap(hosts: HostPair, kind: Cut) -> None:
    """The pauses are the failure itself; nothing is waited for."""
    for _ in range(FLAPS):
        hosts.cut(kind)
        await asyncio.sleep(FLAP_S)
        hosts.restore(kind)
        await asyncio.sleep(FLAP_S)


@pytest.mark.parametrize("do", ["write", "read"])
@pytest.mark.parametrize("kind", list(Cut))
async def test_a_flapping_link_costs_a_patient_call_only_time(
    hosts: HostPair, caller: PeerProcess, owner: PeerProcess, kind: Cut, do: str
) -> None:
    _, task = await begun(do, caller, owner)
    connections = tcp_counter(owner.pid, "PassiveOpens")
    await flap(hosts, kind)
    hosts.unshape()
    assert (await task)["bytes"] == TOTAL
    assert await checksum(owner) == await checksum(caller)
    assert tcp_counter(owner.pid, "PassiveOpens") == connections


@pytest.mark.parametrize("kind", list(Cut))
async def test_a_flapping_link_is_not_hammered_by_impatient_calls(hosts: HostPair, kind: Cut) -> None:
    async with (
        peer_on(hosts.near, "caller", stall_s_max=FLAP_S / 4, handshake_s_max=FLAP_S) as caller,
        peer_on(hosts.far, "owner") as owner,
    ):
        token = await token_of(owner)
        assert (await call("write", caller, owner, token, [(0, 1)], [(0, 1)]))["bytes"] == 1
        connections = tcp_counter(caller.pid, "ActiveOpens")
        flapping = asyncio.create_task(flap(hosts, kind))
        failures = 0
        while not flapping.done():
            answer = await call("write", caller, owner, token, timeout_s=FLAP_S / 2)
            assert answer["retryable"]
            failures += 1
        await flapping
        hosts.unshape()
        await caller.ask("fill_random", seed=8)
        while "bytes" not in await call("write", caller, owner, token):
            failures += 1
        assert await checksum(owner) == await checksum(caller)
        # No call dials more than once.
        assert tcp_counter(caller.pid, "ActiveOpens") <= connections * (1 + failures)


async def test_a_host_that_lost_its_power(hosts: HostPair) -> None:
    async with (
        peer_on(hosts.near, "caller", stall_s_max=STALL_S, handshake_s_max=DEADLINE_S) as caller,
        peer_on(hosts.far, "owner") as owner,
    ):
        token, task = await begun("write", caller, owner, timeout_s=DEADLINE_S)
        await cut(hosts, Cut.SILENT, caller)
        await owner.kill()  # whatever its kernel says about it is lost too
        assert (await task)["error"] == "TransferTimeout"
        # Nobody answers the dial: its own limit ends it, long before the deadline of the call.
        answer = await call("write", caller, owner, token)
        assert (answer["error"], answer["retryable"]) == ("PeerLostError", True)
        hosts.unshape()
        hosts.restore(Cut.SILENT)
        async with peer_on(hosts.far, "owner") as successor:
            assert (await call("write", caller, successor, await token_of(successor)))["bytes"] == TOTAL
            assert await checksum(successor) == await checksum(caller)


async def test_a_host_that_is_gone_with_its_link(
    hosts: HostPair, caller: PeerProcess, owner: PeerProcess
) -> None:
    token, task = await begun("write", caller, owner, timeout_s=DEADLINE_S)
    hosts.unplug()
    assert (await task)["error"] == "TransferTimeout"
    assert (await call("write", caller, owner, token))["error"] == "PeerLostError"
    assert MIB < (await owner.ask("written", token=token))["bytes"] < TOTAL
