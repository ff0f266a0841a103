"""Granted memory of a device over tcp; the device is a fake here, CUDA's in tests/gpu."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import numpy as np
import pytest
from tests.support.device_contract import DEVICE_BYTES, LIMITS, MIB, WHOLE, FakeDevice
from tests.support.device_owner_contract import DeviceOwnerContract, OwnedDevice, owned_device
from tests.support.eventually import eventually
from tests.support.transfer import pattern
from tests.support.transfer_peer import SECRET

from kvtransfer import (
    Access,
    BusyError,
    ChecksumError,
    GrantError,
    Limits,
    PeerLostError,
    TransferError,
    TransportKind,
)
from kvtransfer import descriptor as descriptors
from kvtransfer.grants import GrantTable
from kvtransfer.memory import no_ranges
from kvtransfer.statistics import Statistics
from kvtransfer.stream import frames, sockets
from kvtransfer.stream.frames import Kind, TransferRequest
from kvtransfer.tcp.frames import GO
from kvtransfer.transport import TransportContext

pytestmark = pytest.mark.contract

SLOT_BYTES = LIMITS.bounce_slot_bytes
PIECE = [(0, SLOT_BYTES)]


@pytest.fixture
def device() -> FakeDevice:
    return FakeDevice()


@pytest.fixture
async def owned(device: FakeDevice) -> AsyncIterator[OwnedDevice]:
    async with owned_device(device) as made:
        yield made
    assert device.fake.pinned == 0


@pytest.fixture
async def tight(device: FakeDevice) -> AsyncIterator[OwnedDevice]:
    """With one slot, for which one request may wait."""
    limits = replace(LIMITS, bounce_bytes=SLOT_BYTES, bounce_waiting_max=1)
    async with owned_device(device, limits) as made:
        yield made


class TestFakeDeviceOwner(DeviceOwnerContract):
    async def test_a_call_goes_in_pieces_of_a_slot(self, owned: OwnedDevice, device: FakeDevice) -> None:
        await owned.write(owned.grant().token, WHOLE, WHOLE)
        assert device.fake.copies == DEVICE_BYTES // SLOT_BYTES
        assert device.fake.pinned == 1

    async def test_bytes_that_are_not_what_was_sent_do_not_land(
        self, owned: OwnedDevice, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async def wrong(*memory: object) -> bytes:
            return bytes(16)

        monkeypatch.setattr("kvtransfer.tcp.caller.digest", wrong)
        owned.near.memory[:] = 1
        with pytest.raises(ChecksumError):
            await owned.write(owned.grant().token, PIECE, PIECE, verify=True)
        assert not owned.device.get().any()

    async def test_a_revoke_waits_for_a_copy_that_runs_and_stops_the_next(
        self, owned: OwnedDevice, device: FakeDevice
    ) -> None:
        device.fake.hold()
        owned.near.memory[:] = 1
        grant = owned.grant()
        writing = asyncio.create_task(owned.write(grant.token, WHOLE, WHOLE))
        await eventually(lambda: device.fake.running == 2)
        await eventually(lambda: owned.slots.lent == 4)
        revoking = asyncio.create_task(owned.far.revoke(grant))
        await eventually(lambda: grant.revoked)
        await asyncio.sleep(0.02)  # nothing happens
        assert not revoking.done()
        device.fake.let_go()
        await revoking
        landed = device.get()
        assert device.fake.running == 0
        assert device.fake.copies == 2
        assert np.count_nonzero(landed) == 2 * SLOT_BYTES
        with pytest.raises(GrantError, match="revoked"):
            await writing
        assert np.array_equal(device.get(), landed)

    async def test_requests_wait_for_a_slot_and_too_many_are_busy(
        self, tight: OwnedDevice, device: FakeDevice
    ) -> None:
        token = tight.grant().token
        await tight.write(token, PIECE, PIECE)
        device.fake.hold()
        first = asyncio.create_task(tight.write(token, PIECE, PIECE))
        await eventually(lambda: device.fake.running)
        second = asyncio.create_task(tight.write(token, PIECE, PIECE))
        await eventually(lambda: tight.slots.waiting == 1)
        with pytest.raises(BusyError, match="bounce_waiting_max of 1 is reached"):
            await tight.write(token, PIECE, PIECE)
        device.fake.let_go()
        await asyncio.gather(first, second)

    async def test_a_request_withdrawn_while_it_waits_takes_no_slot(
        self, tight: OwnedDevice, device: FakeDevice
    ) -> None:
        token = tight.grant().token
        await tight.write(token, PIECE, PIECE)
        device.fake.hold()
        first = asyncio.create_task(tight.write(token, PIECE, PIECE))
        await eventually(lambda: device.fake.running)
        second = asyncio.create_task(tight.write(token, PIECE, PIECE))
        await eventually(lambda: tight.slots.waiting == 1)
        second.cancel()
        await eventually(lambda: tight.slots.waiting == 0)
        device.fake.let_go()
        await first
        await eventually(lambda: tight.slots.lent == 0)

    @pytest.mark.parametrize("access", list(Access))
    async def test_a_session_that_closes_while_a_copy_runs_gives_its_slots_back_afterwards(
        self, owned: OwnedDevice, device: FakeDevice, access: Access
    ) -> None:
        device.fake.hold()
        grant = owned.grant(access)
        call = owned.write if access is Access.WRITE else owned.read
        moving = asyncio.create_task(call(grant.token, WHOLE, WHOLE))
        await eventually(lambda: device.fake.running == 2)
        await eventually(lambda: owned.slots.lent == 4)
        owned.near.endpoint.disconnect(owned.peer)
        with pytest.raises(TransferError):
            await moving
        revoking = asyncio.create_task(owned.far.revoke(grant))
        await asyncio.sleep(0.02)  # nothing happens
        assert not revoking.done()
        assert owned.slots.lent >= 2  # of the copies that run
        device.fake.let_go()
        await revoking
        assert owned.slots.lent == 0
        assert device.fake.running == 0

    async def test_the_peer_connected_anew_waits_for_what_its_older_link_still_copies(
        self, owned: OwnedDevice, device: FakeDevice
    ) -> None:
        device.fake.hold()
        grant = owned.grant()
        owned.near.memory[:] = 1
        writing = asyncio.create_task(owned.write(grant.token, PIECE, PIECE))
        await eventually(lambda: device.fake.running == 1)
        owned.near.endpoint.disconnect(owned.peer)
        with pytest.raises(TransferError):
            await writing
        owned.near.memory[:] = 2
        connecting = asyncio.create_task(owned.near.endpoint.connect(owned.far.descriptor(), timeout_s=5))
        await asyncio.sleep(0.02)  # nothing happens
        assert device.fake.running == device.fake.copies == 1
        assert not connecting.done()
        device.fake.let_go()
        owned.peer = await connecting
        await owned.write(grant.token, PIECE, PIECE)
        assert (device.get()[:SLOT_BYTES] == 2).all()

    async def test_a_link_lost_in_the_middle_leaves_nothing_to_land_after_the_retry(
        self, owned: OwnedDevice, device: FakeDevice
    ) -> None:
        device.fake.hold()
        grant = owned.grant()
        owned.near.memory[:] = 1
        writing = asyncio.create_task(owned.write(grant.token, PIECE, PIECE))
        await eventually(lambda: device.fake.running == 1)
        transport = owned.far._started.transports[TransportKind.TCP]
        for session in list(transport._links["near"].sessions):
            session.close("lost")
        with pytest.raises(PeerLostError):
            await writing
        owned.near.memory[:] = 2
        again = asyncio.create_task(owned.write(grant.token, PIECE, PIECE))
        await eventually(lambda: owned.slots.lent == 2)  # the same era: only the copies wait for each other
        await asyncio.sleep(0.02)  # nothing happens
        assert device.fake.running == device.fake.copies == 1
        device.fake.let_go()
        await again
        assert (device.get()[:SLOT_BYTES] == 2).all()

    async def test_a_device_that_fails_fails_the_call(self, owned: OwnedDevice, device: FakeDevice) -> None:
        token = owned.grant().token
        device.fake.fails_at = 5
        with pytest.raises(TransferError, match="the device is broken"):
            await owned.write(token, WHOLE, WHOLE)
        device.fake.fails_at = None
        owned.near.memory[:] = pattern(DEVICE_BYTES)
        await owned.write(token, WHOLE, WHOLE)
        assert np.array_equal(device.get(), owned.near.memory)


@pytest.mark.parametrize("streams", [1, 2])
async def test_a_newer_write_waits_for_what_a_cancelled_one_still_copies(streams: int) -> None:
    device = FakeDevice()
    async with owned_device(device, near_limits=Limits(tcp_streams=streams)) as owned:
        token = owned.grant().token
        owned.near.memory[:] = 1
        device.fake.hold()
        older = asyncio.create_task(owned.write(token, PIECE, PIECE))
        await eventually(lambda: device.fake.running)
        older.cancel()
        with pytest.raises(asyncio.CancelledError):
            await older
        owned.near.memory[:] = 2
        newer = asyncio.create_task(owned.write(token, PIECE, PIECE))
        await asyncio.sleep(0.02)  # nothing happens
        assert owned.slots.lent == 1
        device.fake.let_go()
        await newer
        assert (device.get()[:SLOT_BYTES] == 2).all()


async def test_shm_leaves_the_device_to_tcp_and_keeps_the_rest() -> None:
    device = FakeDevice()
    async with owned_device(device, transports=("shm", "tcp")) as owned:
        owned.near.memory[:] = pattern(DEVICE_BYTES)
        done = await owned.write(owned.grant().token, WHOLE, WHOLE, verify=True)
        assert done.transport is TransportKind.TCP
        assert np.array_equal(device.get(), owned.near.memory)
        owned.near.memory[:] = 0
        assert (await owned.read(owned.grant(Access.READ).token, WHOLE, WHOLE)).transport is TransportKind.TCP
        assert np.array_equal(device.get(), owned.near.memory)
        await owned.write(owned.grant().token, WHOLE, WHOLE, verify=True)
        other = owned.near.endpoint.register(FakeDevice().registered)
        await owned.peer.write(other, WHOLE, owned.grant().token, WHOLE, timeout_s=10)
        assert not device.get().any()
        host = owned.far.register(bytearray(100))
        grant = owned.far.grant(host, [(0, 100)], peer="near", generation=1)
        done = await owned.write(grant.token, [(0, 100)], [(0, 100)])
        assert done.transport is TransportKind.SHM


async def test_two_devices_write_to_each_other_through_few_slots() -> None:
    """A call holds a slot while it waits for one of the peer: the two must not be of the same ones."""
    limits = replace(LIMITS, bounce_bytes=2 * SLOT_BYTES)
    one, other = FakeDevice(), FakeDevice()
    async with owned_device(one, limits) as owned:
        near = owned.near.endpoint.register(other.registered)
        back = owned.near.endpoint.grant(near, [(10 * MIB, 10 * MIB)], peer="far", generation=1)
        peer = await owned.far.connect(owned.near.endpoint.descriptor(), timeout_s=5)
        one.fake.cells[: 10 * MIB] = 1
        other.fake.cells[: 10 * MIB] = 2
        first, last = [(0, 10 * MIB)], [(10 * MIB, 10 * MIB)]
        await asyncio.gather(
            peer.write(owned.region, first, back.token, last, timeout_s=10),
            owned.peer.write(near, first, owned.grant().token, last, timeout_s=10),
        )
        assert (one.get()[10 * MIB :] == 2).all()
        assert (other.get()[10 * MIB :] == 1).all()


async def test_a_peer_that_asks_for_a_slot_and_falls_silent_loses_it(device: FakeDevice) -> None:
    limits = replace(LIMITS, bounce_bytes=SLOT_BYTES, stall_s_max=0.1)
    async with owned_device(device, limits) as owned:
        token = owned.far.grant(owned.region, WHOLE, peer="mute", generation=1).token
        context = TransportContext("mute", SECRET, Limits(), GrantTable(1), Statistics())
        address = descriptors.decode(owned.far.descriptor()).address(TransportKind.TCP)
        sock = await sockets.authenticated(context, address, "far", context.eras.link_id("far"))
        try:
            wanted = TransferRequest(token, np.array([(0, 10)]), 10, awaits_go=True)
            request = frames.pack_request(Kind.WRITE, 1, wanted)
            await asyncio.get_running_loop().sock_sendall(sock, request)
            await eventually(lambda: owned.slots.lent == 1)
            owned.near.memory[:] = 3
            await owned.write(owned.grant().token, PIECE, PIECE)  # waits for the slot
            received = await asyncio.get_running_loop().sock_recv(sock, 4096)
            while len(received) <= frames.HEADER_BYTES:
                received += await asyncio.get_running_loop().sock_recv(sock, 4096)
        finally:
            sock.close()
        assert received[0] == GO
        error = frames.parse_error(bytearray(received[2 * frames.HEADER_BYTES :]))
        assert isinstance(error, BusyError)
        assert (device.get()[:SLOT_BYTES] == 3).all()


async def test_a_call_without_ranges_needs_no_slot(owned: OwnedDevice) -> None:
    await owned.read(owned.grant(Access.READ).token, no_ranges(), no_ranges(), verify=True)
    assert owned.slots.region is None
