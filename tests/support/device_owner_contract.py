"""Granted memory of a device, over tcp: what peers may do with it, for the fake and for CUDA.

A test module subclasses `DeviceOwnerContract` and brings the fixture `owned`.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from tests.support.device_contract import (
    DEVICE_BYTES,
    LIMITS,
    MIB,
    TIMEOUT_S,
    WHOLE,
    Device,
    scattered,
)
from tests.support.eventually import eventually
from tests.support.transfer import Side, firing, make_endpoint, no_leaks, pattern, side

from kvtransfer import Access, Endpoint, Grant, GrantError, Limits, Peer, Region, Transferred, TransportKind
from kvtransfer.slots import HostSlots


@dataclass(slots=True)
class OwnedDevice:
    """`far` has the device's memory registered, `near` as many bytes of host memory, zeros."""

    far: Endpoint
    region: Region
    device: Device
    near: Side
    peer: Peer

    @property
    def slots(self) -> HostSlots:
        """Through which `far` serves requests."""
        return self.far._started.transports[TransportKind.TCP]._staging.slots

    def grant(self, access: Access = Access.WRITE, ranges: object = WHOLE, **more: Any) -> Grant:
        return self.far.grant(self.region, ranges, peer="near", generation=1, access=access, **more)

    async def write(self, token: str, local: object, remote: object, **more: Any) -> Transferred:
        return await self.peer.write(
            self.near.region, local, token, remote, **{"timeout_s": TIMEOUT_S} | more
        )

    async def read(self, token: str, local: object, remote: object, **more: Any) -> Transferred:
        return await self.peer.read(self.near.region, local, token, remote, **{"timeout_s": TIMEOUT_S} | more)


@asynccontextmanager
async def owned_device(
    device: Device,
    limits: Limits = LIMITS,
    transports: Sequence[str] = ("tcp",),
    near_limits: Limits | None = None,
) -> AsyncIterator[OwnedDevice]:
    far = make_endpoint(transports, "far", limits=limits)
    async with (
        no_leaks(),
        side(transports, "near", np.zeros(DEVICE_BYTES, np.uint8), limits=near_limits) as near,
    ):
        await far.start()
        try:
            region = far.register(device.registered)
            peer = await near.endpoint.connect(far.descriptor(), timeout_s=5)
            owned = OwnedDevice(far, region, device, near, peer)
            yield owned
            await eventually(lambda: owned.slots.lent == owned.slots.waiting == 0)
        finally:
            await far.close()


class DeviceOwnerContract:
    @pytest.mark.parametrize("size", [0, 1, 4096, 16 * MIB + 1])
    @pytest.mark.parametrize("verify", [False, True])
    async def test_a_peer_writes_and_reads(self, owned: OwnedDevice, size: int, verify: bool) -> None:
        values = pattern(DEVICE_BYTES, seed=size)
        owned.near.memory[:] = values
        token = owned.grant().token
        done = await owned.write(token, [(7, size)], [(100, size)], verify=verify)
        assert done == Transferred(size, TransportKind.TCP)
        expected = np.zeros(DEVICE_BYTES, np.uint8)
        expected[100 : 100 + size] = values[7 : 7 + size]
        assert np.array_equal(owned.device.get(), expected)
        owned.device.set(pattern(DEVICE_BYTES, seed=2))
        token = owned.grant(Access.READ).token
        await owned.read(token, [(MIB, size)], [(3, size)], verify=verify)
        values[MIB : MIB + size] = owned.device.get()[3 : 3 + size]
        assert np.array_equal(owned.near.memory, values)

    async def test_many_ranges_cut_differently_on_both_sides(self, owned: OwnedDevice) -> None:
        values = pattern(DEVICE_BYTES)
        owned.near.memory[:] = values
        local, remote = scattered(2000, 1500, 2000, 1), scattered(3000, 1000, 1500, 2)
        await owned.write(owned.grant(ranges=remote).token, local, remote)
        moved = np.concatenate([values[start : start + count] for start, count in local.tolist()])
        found = owned.device.get()
        assert np.array_equal(np.concatenate([found[s : s + n] for s, n in remote.tolist()]), moved)
        assert np.count_nonzero(found) == len(moved)
        owned.near.memory[:] = 0
        await owned.read(owned.grant(Access.READ, remote).token, local, remote)
        here = [owned.near.memory[start : start + count] for start, count in local.tolist()]
        assert np.array_equal(np.concatenate(here), moved)

    async def test_outside_of_the_grant_nothing_moves(self, owned: OwnedDevice) -> None:
        owned.near.memory[:] = pattern(DEVICE_BYTES)
        token = owned.grant(ranges=[(0, MIB)]).token
        for remote in ([(MIB - 1, 2)], [(0, MIB + 1)], [(0, 10), (2 * MIB, 1)]):
            size = sum(count for _, count in remote)
            for _ in range(2):  # before and after the peer knows that it wants pieces
                with pytest.raises(GrantError):
                    await owned.write(token, [(0, size)], remote)
            with pytest.raises(GrantError):
                await owned.read(token, [(0, size)], remote)
            await owned.write(token, [(0, 1)], [(0, 1)])
        assert not owned.device.get()[MIB:].any()

    async def test_a_tag_comes_once_after_all_bytes_and_counts_them(self, owned: OwnedDevice) -> None:
        values = pattern(DEVICE_BYTES, seed=9)
        owned.near.memory[:] = values
        seen: list[tuple[bytes, int, bool]] = []
        grant = owned.grant(
            on_arrival=lambda arrival: seen.append(
                (arrival.tag, arrival.payload_bytes, np.array_equal(owned.device.get(), values))
            ),
        )
        await owned.write(grant.token, WHOLE, WHOLE, tag=b"all")
        assert seen == [(b"all", DEVICE_BYTES, True)]
        assert owned.far.written_bytes(grant) == DEVICE_BYTES
        await owned.write(grant.token, [(0, 10)], [(0, 10)], tag=b"few", verify=True)
        await owned.write(grant.token, [], [], tag=b"none", verify=True)
        assert seen[1:] == [(b"few", 10, True), (b"none", 0, True)]

    async def test_many_calls_share_the_slots(self, owned: OwnedDevice) -> None:
        values = pattern(DEVICE_BYTES, seed=3)
        owned.near.memory[:] = values
        token = owned.grant().token
        part = DEVICE_BYTES // 40
        parts = [[(number * part, part)] for number in range(40)]
        await asyncio.gather(*(owned.write(token, ranges, ranges) for ranges in parts))
        assert np.array_equal(owned.device.get(), values)
        owned.near.memory[:] = 0
        token = owned.grant(Access.READ).token
        await asyncio.gather(*(owned.read(token, ranges, ranges) for ranges in parts))
        assert np.array_equal(owned.near.memory, values)

    @pytest.mark.parametrize("direction", ["write", "read"])
    async def test_revoke_under_fire(self, owned: OwnedDevice, direction: str) -> None:
        access = Access(direction)
        values = pattern(DEVICE_BYTES)
        grant = owned.grant(access)
        ranges = [(start, MIB) for start in range(0, DEVICE_BYTES, 2 * MIB)]
        if access is Access.WRITE:
            owned.near.memory[:] = values
            moving = asyncio.create_task(firing(lambda: owned.write(grant.token, ranges, ranges)))
            await eventually(lambda: owned.far.written_bytes(grant) > MIB)
        else:
            owned.device.set(values)
            moving = asyncio.create_task(firing(lambda: owned.read(grant.token, ranges, ranges)))
            await eventually(owned.near.memory.any)
        await owned.far.revoke(grant)
        before = owned.device.get()
        with pytest.raises(GrantError) as raised:
            await moving
        assert np.array_equal(owned.device.get(), before)
        there = before if access is Access.WRITE else owned.near.memory
        for landed, (start, count) in zip(raised.value.landed_ranges, ranges, strict=True):
            assert not landed or np.array_equal(there[start : start + count], values[start : start + count])
        again = owned.grant(access).token
        await (owned.write if access is Access.WRITE else owned.read)(again, WHOLE, WHOLE)
        assert np.array_equal(owned.device.get(), owned.near.memory)

    @pytest.mark.parametrize("direction", ["write", "read"])
    async def test_nothing_of_a_cancelled_call_comes_after_a_newer_one(
        self, owned: OwnedDevice, direction: str
    ) -> None:
        access = Access(direction)
        grant = owned.grant(access)
        if access is Access.WRITE:
            owned.near.memory[:] = 255
            moving = asyncio.create_task(firing(lambda: owned.write(grant.token, WHOLE, WHOLE)))
            await eventually(lambda: owned.far.written_bytes(grant))
        else:
            owned.device.set(np.full(DEVICE_BYTES, 255, np.uint8))
            moving = asyncio.create_task(firing(lambda: owned.read(grant.token, WHOLE, WHOLE)))
            await eventually(owned.near.memory.any)
        moving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await moving
        values = pattern(DEVICE_BYTES)
        if access is Access.WRITE:
            owned.near.memory[:] = values
            await owned.write(grant.token, WHOLE, WHOLE)
        else:
            owned.device.set(values)
            await owned.read(grant.token, WHOLE, WHOLE)
        await eventually(lambda: owned.slots.lent == 0)
        assert np.array_equal(owned.device.get(), values)
        assert np.array_equal(owned.near.memory, values)
