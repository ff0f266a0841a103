"""A pair with two real transports, of which the better one fails and comes back: tcp through a relay that the
test cuts, shared memory below it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import msgspec
import numpy as np
import pytest
from tests.support.eventually import eventually
from tests.support.relay import Relay
from tests.support.transfer import Pair, Side, firing, landing, no_leaks, pattern, side

from kvtransfer import (
    DescriptorError,
    Endpoint,
    Grant,
    Limits,
    Peer,
    PeerLostError,
    RetryableTransferError,
    Transferred,
    TransferTimeout,
    TransportKind,
    TransportUnavailable,
)

pytestmark = pytest.mark.contract

SHM, TCP, RDMA = TransportKind.SHM, TransportKind.TCP, TransportKind.RDMA
MIB = 1 << 20
TOTAL = 16 * MIB
WHOLE = [(0, TOTAL)]
TIMEOUT_S = 20.0
STALL_S = 0.2
LIMITS = Limits(retry_s_min=0.05, retry_s_max=0.4, stall_s_max=STALL_S)


@dataclass(slots=True)
class Crossing:
    """`near` and its peer `far`, reached over tcp through the relay, and over shared memory."""

    near: Side
    far: Side
    relay: Relay
    peer: Peer

    async def write(self, grant: Grant, timeout_s: float = TIMEOUT_S) -> Transferred:
        return await self.peer.write(self.near.region, WHOLE, grant.token, WHOLE, timeout_s=timeout_s)

    async def write_until(self, kind: TransportKind, grant: Grant, *, errors: bool = False) -> None:
        """Call on and on, one day over `kind`. Without `errors` each call must go through."""
        async with asyncio.timeout(TIMEOUT_S):
            while True:
                try:
                    if (await self.write(grant)).transport is kind:
                        return
                except RetryableTransferError:
                    assert errors
                await asyncio.sleep(0.01)


def through(descriptor: str, port: int) -> str:
    """The descriptor with another port for tcp."""
    found = msgspec.json.decode(descriptor)
    for address in found["transports"]:
        if address["kind"] == TCP:
            address["port"] = port
    return msgspec.json.encode(found).decode()


def port_of(descriptor: str) -> int:
    return next(a["port"] for a in msgspec.json.decode(descriptor)["transports"] if a["kind"] == TCP)


@asynccontextmanager
async def two_transports() -> AsyncIterator[Pair]:
    async with (
        side((TCP, SHM), "near", pattern(TOTAL), limits=LIMITS) as near,
        side((SHM, TCP), "far", np.zeros(TOTAL, np.uint8), limits=LIMITS) as far,
    ):
        yield near, far


@pytest.fixture
async def crossing() -> AsyncIterator[Crossing]:
    async with no_leaks(), two_transports() as (near, far):
        descriptor = far.endpoint.descriptor()
        async with Relay.running(port_of(descriptor)) as relay:
            peer = await near.endpoint.connect(through(descriptor, relay.port), timeout_s=TIMEOUT_S)
            yield Crossing(near, far, relay, peer)


async def test_cut_in_the_middle_of_a_call(crossing: Crossing) -> None:
    grant = crossing.far.grant(WHOLE, "near")
    assert (await crossing.write(grant)).transport is TCP
    writing = asyncio.create_task(firing(lambda: crossing.write(grant)))
    await landing(crossing.far, grant, TOTAL + MIB)
    await crossing.relay.cut()
    with pytest.raises(PeerLostError) as raised:
        await writing
    assert raised.value.retryable
    crossing.near.memory[:] = pattern(TOTAL, seed=2)
    assert (await crossing.write(grant)).transport is SHM
    assert np.array_equal(crossing.far.memory, crossing.near.memory)
    failures = crossing.near.endpoint.statistics()["far"].by_transport
    assert (failures[TCP].failures, failures[SHM].failures) == (1, 0)


async def test_back_to_the_better_one(crossing: Crossing) -> None:
    grant = crossing.far.grant(WHOLE, "near")
    for seed in range(2):
        await crossing.write_until(TCP, grant)
        await crossing.relay.cut()
        await crossing.write_until(SHM, grant, errors=True)
        crossing.near.memory[:] = pattern(TOTAL, seed=seed)
        assert (await crossing.write(grant)).transport is SHM
        assert np.array_equal(crossing.far.memory, crossing.near.memory)
        await crossing.relay.restore()
        await crossing.write_until(TCP, grant)


async def test_a_network_that_swallows_everything(crossing: Crossing) -> None:
    """The call ends at its deadline, the silent link is closed, the next call takes the other transport."""
    grant = crossing.far.grant(WHOLE, "near")
    await crossing.write(grant)
    crossing.relay.stall()
    with pytest.raises(TransferTimeout):
        await crossing.write(grant, timeout_s=3 * STALL_S)
    assert (await crossing.write(grant)).transport is SHM


async def test_bytes_that_were_stuck_do_not_land_after_those_of_the_retry(crossing: Crossing) -> None:
    """The first write is given up while its bytes are in the network, the second takes another transport."""
    grant = crossing.far.grant(WHOLE, "near")
    await crossing.write(grant)
    crossing.relay.stall()
    crossing.near.memory[:] = 254
    with pytest.raises(TransferTimeout):
        await crossing.write(grant, timeout_s=3 * STALL_S)
    crossing.near.memory[:] = pattern(TOTAL, seed=3)
    assert (await crossing.write(grant)).transport is SHM
    landed = crossing.far.endpoint.written_bytes(grant)
    crossing.relay.resume()
    await eventually(lambda: not crossing.relay.busy)
    assert np.array_equal(crossing.far.memory, crossing.near.memory)
    assert crossing.far.endpoint.written_bytes(grant) == landed


async def test_a_transport_that_is_gone_is_dialled_now_and_then(crossing: Crossing) -> None:
    """No call waits for it or fails by it."""
    grant = crossing.far.grant(WHOLE, "near")
    await crossing.relay.refuse()
    await crossing.write_until(SHM, grant, errors=True)
    before = crossing.relay.connections
    loop = asyncio.get_running_loop()
    begin_s = loop.time()
    calls = 0
    while loop.time() < begin_s + 1.5:
        calls += 1
        assert (await crossing.write(grant)).transport is SHM
    # Waits of 50 to 400 ms, each by up to a half shorter; the machine may have stood still meanwhile.
    assert 1 <= crossing.relay.connections - before <= 4 + (loop.time() - begin_s) / 0.2
    assert calls > 2 * (crossing.relay.connections - before)


async def test_only_what_both_have_is_used() -> None:
    async with (
        no_leaks(),
        side((SHM, TCP), "near", pattern(100)) as near,
        side((TCP,), "far", np.zeros(100, np.uint8)) as far,
        side((SHM,), "other", np.zeros(100, np.uint8)) as other,
    ):
        for owner, kind in ((far, TCP), (other, SHM)):
            grant = owner.grant([(0, 100)], "near")
            peer = await near.connect(owner)
            moved = await peer.write(near.region, [(0, 100)], grant.token, [(0, 100)], timeout_s=TIMEOUT_S)
            assert moved == Transferred(100, kind)
        with pytest.raises(DescriptorError, match="far offers"):
            await other.connect(far)


async def test_what_a_machine_lacks_is_left_out_and_said(tmp_path_factory: pytest.TempPathFactory) -> None:
    nowhere = tmp_path_factory.mktemp("none") / "missing"
    async with no_leaks():
        endpoint = Endpoint("name", bytes(16), transports=(RDMA, TCP), rdma_devices=["no_such_device"])
        await endpoint.start()
        try:
            assert list(endpoint.unavailable) == [RDMA]
            assert endpoint.unavailable[RDMA]
            offered = msgspec.json.decode(endpoint.descriptor())["transports"]
            assert [address["kind"] for address in offered] == [TCP]
        finally:
            await endpoint.close()
        alone = Endpoint("name", bytes(16), transports=(RDMA,), rdma_devices=["no_such_device"])
        with pytest.raises(TransportUnavailable, match="rdma"):
            await alone.start()
        broken = Endpoint("name", bytes(16), transports=(TCP, SHM), shm_folder=nowhere)
        with pytest.raises(OSError, match="No such file"):
            await broken.start()
        for wrong in ((), (TCP, TCP), ("carrier pigeon",)):
            with pytest.raises(ValueError, match=r"transports|carrier pigeon"):
                Endpoint("name", bytes(16), transports=wrong)
