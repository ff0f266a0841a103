"""Links over two devices: both carry a large call, one that fails ends calls in time, the pair recovers."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import numpy as np
import pytest
from tests.rdma.device.conftest import DEVICES, packets_sent, set_link
from tests.support.eventually import eventually
from tests.support.transfer import Side, no_leaks, pattern
from tests.support.transfer_peer import SECRET, PeerProcess

from kvtransfer import (
    Access,
    Endpoint,
    GrantError,
    Limits,
    RetryableTransferError,
    TransportKind,
    TransportUnavailable,
    checksum,
)

pytestmark = pytest.mark.rdma

MIB = 1 << 20
TOTAL = 32 * MIB
WHOLE = [(0, TOTAL)]
MTU_BYTES = 4096
TIMEOUT_S = 30.0


@asynccontextmanager
async def side(
    name: str,
    memory: np.ndarray,
    *,
    devices: Sequence[str] | None = None,
    transports: Sequence[TransportKind] = (TransportKind.RDMA,),
    limits: Limits | None = None,
) -> AsyncIterator[Side]:
    endpoint = Endpoint(name, SECRET, transports=transports, rdma_devices=devices, limits=limits)
    await endpoint.start()
    try:
        yield Side(endpoint, memory, endpoint.register(memory))
    finally:
        await endpoint.close()


def packets() -> dict[str, int]:
    return {device: packets_sent(device) for device in DEVICES}


async def moved(direction: str, near: Side, far: Side) -> dict[str, int]:
    """Packets that each device sent for one call over all of the memory."""
    grant = far.grant(WHOLE, "near", access=Access(direction))
    peer = await near.connect(far)
    call = peer.write if direction == "write" else peer.read
    before = packets()
    done = await call(near.region, WHOLE, grant.token, WHOLE, timeout_s=TIMEOUT_S)
    assert done.transport is TransportKind.RDMA
    assert np.array_equal(near.memory, far.memory)
    return {device: count - before[device] for device, count in packets().items()}


@pytest.mark.parametrize("direction", ["write", "read"])
async def test_a_large_call_goes_over_both_devices(direction: str) -> None:
    async with (
        no_leaks(),
        side("near", pattern(TOTAL)) as near,
        side("far", pattern(TOTAL, 2)) as far,
    ):
        sent = await moved(direction, near, far)
    for device in DEVICES:
        assert sent[device] >= TOTAL / 2 / MTU_BYTES, sent


async def test_many_small_calls_to_another_process() -> None:
    """The other processor answers while ours is still posting."""
    async with (
        side("near", pattern(MIB)) as near,
        PeerProcess.run("there", MIB, transport="rdma") as there,
    ):
        peer = await near.endpoint.connect(there.descriptor, timeout_s=TIMEOUT_S)
        write = await there.ask("grant", ranges=[(0, MIB)], peer="near")
        for number in range(100):
            part = [(number * 4096, 4096)]
            await peer.write(near.region, part, write["token"], part, timeout_s=TIMEOUT_S)
        written = [(0, 100 * 4096)]
        assert (await there.ask("checksum", ranges=written))["checksum"] == checksum(near.region, written)
        near.memory[:] = 0
        read = await there.ask("grant", ranges=[(0, MIB)], peer="near", access="read")
        for number in range(100):
            part = [(number * 4096, 4096)]
            await peer.read(near.region, part, read["token"], part, timeout_s=TIMEOUT_S)
        assert np.array_equal(near.memory[: 100 * 4096], pattern(MIB)[: 100 * 4096])
        counted = near.endpoint.statistics()["there"]
        assert (counted.writes, counted.reads, counted.failures) == (100, 100, 0)


async def test_only_the_named_device_is_used() -> None:
    async with (
        side("near", pattern(TOTAL), devices=["rxe1"]) as near,
        side("far", pattern(TOTAL, 2), devices=["rxe1:1"]) as far,
    ):
        sent = await moved("write", near, far)
    assert sent["rxe1"] >= TOTAL / MTU_BYTES
    assert sent["rxe0"] < 100


async def test_a_device_that_is_not_there_is_named() -> None:
    with pytest.raises(TransportUnavailable, match="mlx5_9 is not a device"):
        async with side("near", pattern(MIB), devices=["mlx5_9"]):
            pass
    with pytest.raises(TransportUnavailable, match="no GID of index 99"):
        async with side("near", pattern(MIB), devices=["rxe0:99"]):
            pass


async def test_a_device_that_is_down_is_left_out(links_restored: None) -> None:
    set_link("rxe0", "down")
    async with side("near", pattern(TOTAL)) as near, side("far", pattern(TOTAL, 2)) as far:
        sent = await moved("write", near, far)
    assert sent["rxe1"] >= TOTAL / MTU_BYTES
    set_link("rxe1", "down")
    with pytest.raises(TransportUnavailable, match="not active"):
        async with side("near", pattern(MIB)):
            pass


@pytest.mark.parametrize(("down", "up"), [DEVICES, DEVICES[::-1]])
async def test_a_lane_that_does_not_work_is_given_up_when_peers_meet(
    links_restored: None, down: str, up: str
) -> None:
    """Both ends believe that it does: it went down after they looked."""
    async with (
        no_leaks(),
        side("near", pattern(TOTAL)) as near,
        side("far", pattern(TOTAL, 2)) as far,
    ):
        set_link(down, "down")
        for direction in ("write", "read"):
            sent = await moved(direction, near, far)
            assert sent[up] >= TOTAL / MTU_BYTES
            far.memory[:] = pattern(TOTAL, 3)


async def firing(peer, side: Side, token: str, timeout_s: float) -> None:
    """Write again and again, until it fails."""
    while True:
        await peer.write(side.region, WHOLE, token, WHOLE, timeout_s=timeout_s)


async def test_a_link_that_goes_down_ends_the_call_in_time_and_comes_back(links_restored: None) -> None:
    timeout_s = 8.0
    loop = asyncio.get_running_loop()
    async with (
        no_leaks(),
        side("near", pattern(TOTAL)) as near,
        side("far", np.zeros(TOTAL, np.uint8)) as far,
    ):
        grant = far.grant(WHOLE, "near")
        peer = await near.connect(far)
        writing = asyncio.create_task(firing(peer, near, grant.token, timeout_s))
        await eventually(lambda: far.endpoint.written_bytes(grant) > 8 * MIB)
        for device in DEVICES:
            set_link(device, "down")
        begin_s = loop.time()
        with pytest.raises(RetryableTransferError) as raised:
            await writing
        assert loop.time() - begin_s < timeout_s + 2
        assert raised.value.retryable
        # The call is over: no device reads its memory any more, whatever comes.
        near.memory[:] = 255
        landed = far.memory.copy()
        for device in DEVICES:
            set_link(device, "up")
        fresh = far.grant([(0, MIB)], "near")
        part = [(0, MIB)]
        async with asyncio.timeout(TIMEOUT_S):
            while True:
                try:
                    await peer.write(near.region, part, fresh.token, part, timeout_s=timeout_s)
                    break
                except RetryableTransferError:
                    continue
        assert (far.memory[:MIB] == 255).all()
        assert np.array_equal(far.memory[MIB:], landed[MIB:])


async def test_a_revoke_in_use_costs_other_calls_a_retry_and_no_more() -> None:
    async with (
        no_leaks(),
        side("near", pattern(TOTAL)) as near,
        side("far", np.zeros(TOTAL, np.uint8)) as far,
    ):
        half = [(0, TOTAL // 2)]
        other = [(TOTAL // 2, TOTAL // 2)]
        doomed = far.grant(half, "near")
        good = far.grant(other, "near")
        peer = await near.connect(far)
        revoked = asyncio.create_task(peer.write(near.region, half, doomed.token, half, timeout_s=TIMEOUT_S))
        await eventually(lambda: far.memory[0] != 0)
        beside = asyncio.create_task(peer.write(near.region, other, good.token, other, timeout_s=TIMEOUT_S))
        await asyncio.sleep(0)
        await far.endpoint.revoke(doomed)
        far.memory[: TOTAL // 2] = 255
        with pytest.raises(GrantError):
            await revoked
        try:
            await beside
        except RetryableTransferError:
            await peer.write(near.region, other, good.token, other, timeout_s=TIMEOUT_S)
        assert np.array_equal(far.memory[TOTAL // 2 :], near.memory[TOTAL // 2 :])
        assert (far.memory[: TOTAL // 2] == 255).all()


async def test_rdma_is_taken_before_tcp_and_is_called_by_its_name() -> None:
    both = (TransportKind.RDMA, TransportKind.TCP)
    async with (
        side("near", pattern(TOTAL), transports=both) as near,
        side("far", pattern(TOTAL, 2), transports=both) as far,
    ):
        before = packets()
        sent = await moved("write", near, far)
        assert sum(sent.values()) > TOTAL / MTU_BYTES
        counted = near.endpoint.statistics()["far"].by_transport
        assert counted[TransportKind.RDMA].written_bytes == TOTAL
        assert TransportKind.TCP not in counted
        assert packets() != before
    async with (
        side("near", pattern(TOTAL), transports=both) as near,
        side("far", pattern(TOTAL, 2), transports=(TransportKind.TCP,)) as far,
    ):
        grant = far.grant(WHOLE, "near")
        peer = await near.connect(far)
        done = await peer.write(near.region, WHOLE, grant.token, WHOLE, timeout_s=TIMEOUT_S)
        assert done.transport is TransportKind.TCP
