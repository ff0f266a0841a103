"""What `DeviceMemory` promises, and the whole path of calls on it: for the fake and for CUDA.

A test module subclasses `DeviceContract` and brings the fixtures `device` and `pair`.
"""

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from threading import Event, Lock, get_ident

import numpy as np
import numpy.typing as npt
import pytest
from tests.support.eventually import eventually
from tests.support.transfer import Side, firing, landing, make_endpoint, no_leaks, pattern, side

from kvtransfer import (
    Access,
    DeviceMemory,
    Endpoint,
    GrantError,
    Limits,
    Peer,
    RangeError,
    Region,
    TransferError,
)
from kvtransfer.memory import Ranges

MIB = 1 << 20
DEVICE_BYTES = 20 * MIB
LIMITS = Limits(bounce_bytes=2 * MIB, bounce_slot_bytes=256 << 10)
"""A ring far smaller than a call."""
TIMEOUT_S = 20.0

Bytes = npt.NDArray[np.uint8]


class Device(ABC):
    """Memory of a device as a test sees it from outside."""

    @property
    @abstractmethod
    def registered(self) -> object:
        """What goes into `Endpoint.register`."""

    @property
    @abstractmethod
    def memory(self) -> DeviceMemory: ...

    @abstractmethod
    def get(self) -> Bytes:
        """All its bytes now."""

    @abstractmethod
    def set(self, values: Bytes) -> None: ...


class FakeDeviceError(TransferError):
    pass


class FakeDeviceMemory(DeviceMemory):
    """Cells that only the two copies reach, from threads; a copy takes its time if the test says so."""

    def __init__(self, size_bytes: int) -> None:
        self.cells = np.zeros(size_bytes, np.uint8)
        self.pinned = 0
        self.copy_s = 0.0
        self.copies = 0
        self.running = 0
        self.fails_at: int | None = None
        self._loop_thread = get_ident()
        self._counting = Lock()
        self._may_end = Event()
        self._may_end.set()

    @property
    def size_bytes(self) -> int:
        return len(self.cells)

    def hold(self) -> None:
        """Copies that begin from now on end after `let_go`."""
        self._may_end.clear()

    def let_go(self) -> None:
        self._may_end.set()

    def pin(self, host: memoryview) -> Callable[[], None]:
        assert host.nbytes > 0
        self.pinned += 1
        return self._unpin

    def copy_out(self, ranges: Ranges, host: memoryview) -> None:
        self._begin(ranges, host)
        target = np.frombuffer(host, np.uint8)
        target[:] = np.concatenate([self.cells[start : start + count] for start, count in ranges.tolist()])

    def copy_in(self, host: memoryview, ranges: Ranges) -> None:
        self._begin(ranges, host)
        source, at = np.frombuffer(host, np.uint8), 0
        for start, count in ranges.tolist():
            self.cells[start : start + count] = source[at : at + count]
            at += count

    def _begin(self, ranges: Ranges, host: memoryview) -> None:
        assert get_ident() != self._loop_thread
        assert self.pinned
        assert host.nbytes == ranges[:, 1].sum() > 0
        with self._counting:
            self.copies += 1
            self.running += 1
            fails = self.copies == self.fails_at
        try:
            time.sleep(self.copy_s)
            assert self._may_end.wait(TIMEOUT_S)
            if fails:
                raise FakeDeviceError("the device is broken")
        finally:
            with self._counting:
                self.running -= 1

    def _unpin(self) -> None:
        self.pinned -= 1


class FakeDevice(Device):
    def __init__(self) -> None:
        self.fake = FakeDeviceMemory(DEVICE_BYTES)

    @property
    def registered(self) -> object:
        return self.fake

    @property
    def memory(self) -> DeviceMemory:
        return self.fake

    def get(self) -> Bytes:
        return self.fake.cells.copy()

    def set(self, values: Bytes) -> None:
        self.fake.cells[:] = values


@dataclass(slots=True)
class DevicePair:
    """`near` has the device's memory registered, `far` has as many bytes of host memory, zeros."""

    near: Endpoint
    region: Region
    device: Device
    far: Side
    peer: Peer

    async def write(self, token: str, local: object, remote: object, **more: object) -> None:
        await self.peer.write(self.region, local, token, remote, timeout_s=TIMEOUT_S, **more)

    async def read(self, token: str, local: object, remote: object, **more: object) -> None:
        await self.peer.read(self.region, local, token, remote, timeout_s=TIMEOUT_S, **more)


@asynccontextmanager
async def device_pair(transport: str, device: Device, limits: Limits = LIMITS) -> AsyncIterator[DevicePair]:
    near = make_endpoint(transport, "near", limits=limits)
    async with no_leaks(), side(transport, "far", np.zeros(DEVICE_BYTES, np.uint8)) as far:
        await near.start()
        try:
            region = near.register(device.registered)
            peer = await near.connect(far.endpoint.descriptor(), timeout_s=5)
            yield DevicePair(near, region, device, far, peer)
        finally:
            await near.close()


WHOLE = [(0, DEVICE_BYTES)]


def scattered(count: int, length: int, stride: int, seed: int) -> Ranges:
    places = np.random.default_rng(seed).permutation(count)
    return np.stack((places * stride, np.full(count, length)), axis=1)


class DeviceContract:
    def test_copies_go_exactly_where_they_are_told(self, device: Device) -> None:
        values = pattern(DEVICE_BYTES, seed=4)
        device.set(values)
        memory = device.memory
        assert memory.size_bytes == DEVICE_BYTES
        host = bytearray(1_000_003)
        unpin = memory.pin(memoryview(host))
        in_a_thread = np.array([(5_000_001, 3), (7, 999_000), (DEVICE_BYTES - 1000, 1000)])
        asyncio.run(asyncio.to_thread(memory.copy_out, in_a_thread, memoryview(host)))
        expected = np.concatenate([values[start : start + count] for start, count in in_a_thread])
        assert np.array_equal(np.frombuffer(host, np.uint8), expected)
        back = np.array([(0, 1), (9_000_000, 1_000_002)])
        asyncio.run(asyncio.to_thread(memory.copy_in, memoryview(host), back))
        values[0] = expected[0]
        values[9_000_000 : 9_000_000 + 1_000_002] = expected[1:]
        assert np.array_equal(device.get(), values)
        unpin()

    @pytest.mark.parametrize("size", [0, 1, 4096, 16 * MIB + 1])
    @pytest.mark.parametrize("verify", [False, True])
    async def test_write_and_read(self, pair: DevicePair, size: int, verify: bool) -> None:
        values = pattern(DEVICE_BYTES, seed=size)
        pair.device.set(values)
        token = pair.far.grant(WHOLE, "near").token
        await pair.write(token, [(7, size)], [(100, size)], verify=verify)
        expected = np.zeros(DEVICE_BYTES, np.uint8)
        expected[100 : 100 + size] = values[7 : 7 + size]
        assert np.array_equal(pair.far.memory, expected)
        pair.far.memory[:] = pattern(DEVICE_BYTES, seed=2)
        token = pair.far.grant(WHOLE, "near", access=Access.READ).token
        await pair.read(token, [(MIB, size)], [(3, size)], verify=verify)
        values[MIB : MIB + size] = pair.far.memory[3 : 3 + size]
        assert np.array_equal(pair.device.get(), values)

    async def test_many_ranges_cut_differently_on_both_sides(self, pair: DevicePair) -> None:
        values = pattern(DEVICE_BYTES)
        pair.device.set(values)
        local = scattered(2000, 1500, 2000, 1)
        remote = scattered(3000, 1000, 1500, 2)
        await pair.write(pair.far.grant(WHOLE, "near").token, local, remote)
        moved = np.concatenate([values[start : start + count] for start, count in local.tolist()])
        there = [pair.far.memory[start : start + count] for start, count in remote.tolist()]
        assert np.array_equal(np.concatenate(there), moved)
        pair.device.set(np.zeros(DEVICE_BYTES, np.uint8))
        await pair.read(pair.far.grant(WHOLE, "near", access=Access.READ).token, local, remote)
        found = pair.device.get()
        assert np.array_equal(np.concatenate([found[s : s + n] for s, n in local.tolist()]), moved)
        assert np.count_nonzero(found) == len(moved)

    async def test_a_tag_comes_once_after_all_bytes_and_counts_them(self, pair: DevicePair) -> None:
        values = pattern(DEVICE_BYTES, seed=9)
        pair.device.set(values)
        seen: list[tuple[bytes, int, bool]] = []
        grant = pair.far.grant(
            WHOLE,
            "near",
            on_arrival=lambda arrival: seen.append(
                (arrival.tag, arrival.payload_bytes, np.array_equal(pair.far.memory, values))
            ),
        )
        await pair.write(grant.token, WHOLE, WHOLE, tag=b"all")
        assert seen == [(b"all", DEVICE_BYTES, True)]
        await pair.write(grant.token, [(0, 10)], [(0, 10)], tag=b"few")
        await pair.write(grant.token, [], [], tag=b"none")
        assert seen[1:] == [(b"few", 10, True), (b"none", 0, True)]

    async def test_many_calls_share_the_ring(self, pair: DevicePair) -> None:
        values = pattern(DEVICE_BYTES, seed=3)
        pair.device.set(values)
        token = pair.far.grant(WHOLE, "near").token
        part = DEVICE_BYTES // 40
        parts = [[(number * part, part)] for number in range(40)]
        await asyncio.gather(*(pair.write(token, ranges, ranges) for ranges in parts))
        assert np.array_equal(pair.far.memory, values)

    async def test_revoke_under_fire(self, pair: DevicePair) -> None:
        values = pattern(DEVICE_BYTES)
        pair.device.set(values)
        grant = pair.far.grant(WHOLE, "near")
        ranges = [(start, MIB) for start in range(0, DEVICE_BYTES, 2 * MIB)]
        writing = asyncio.create_task(firing(lambda: pair.write(grant.token, ranges, ranges)))
        await landing(pair.far, grant, MIB)
        await pair.far.endpoint.revoke(grant)
        before = pair.far.memory.copy()
        with pytest.raises(GrantError) as raised:
            await writing
        assert np.array_equal(pair.far.memory, before)
        for landed, (start, count) in zip(raised.value.landed_ranges, ranges, strict=True):
            assert not landed or np.array_equal(before[start : start + count], values[start : start + count])
        await pair.write(pair.far.grant(WHOLE, "near").token, WHOLE, WHOLE)
        assert np.array_equal(pair.far.memory, values)

    @pytest.mark.parametrize("direction", ["write", "read"])
    async def test_a_cancelled_call_touches_no_memory_afterwards(
        self, pair: DevicePair, direction: str
    ) -> None:
        access = Access(direction)
        grant = pair.far.grant(WHOLE, "near", access=access)
        source = pattern(DEVICE_BYTES)
        if access is Access.WRITE:
            pair.device.set(source)
            call = lambda: pair.write(grant.token, WHOLE, WHOLE)  # noqa: E731
            moved = lambda: pair.far.memory.any()  # noqa: E731
        else:
            pair.far.memory[:] = source
            call = lambda: pair.read(grant.token, WHOLE, WHOLE)  # noqa: E731
            moved = lambda: pair.device.get().any()  # noqa: E731
        task = asyncio.create_task(firing(call))
        await eventually(moved)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        if access is Access.WRITE:
            pair.device.set(np.full(DEVICE_BYTES, 255, np.uint8))
            await pair.write(grant.token, [(0, 1)], [(0, 1)])
            assert not (pair.far.memory[1:] == 255).any()
        else:
            pair.device.set(np.zeros(DEVICE_BYTES, np.uint8))
            await pair.read(grant.token, [(0, 1)], [(0, 1)])
            assert not pair.device.get()[1:].any()

    async def test_it_has_no_view_and_no_use_once_unregistered(self, pair: DevicePair) -> None:
        with pytest.raises(RangeError, match="no view"):
            pair.region.view  # noqa: B018
        with pytest.raises(RangeError, match="local"):
            await pair.write("token", [(DEVICE_BYTES, 1)], [(0, 1)])
        await pair.near.unregister(pair.region)
        with pytest.raises(RangeError, match="not registered"):
            await pair.write("token", [(0, 1)], [(0, 1)])
