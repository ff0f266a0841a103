"""Slots of host memory through which the bytes of devices pass, and the threads that copy them there.

Owns the memory, its pinning and who has which slot. Knows no transport and no call.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np

from kvtransfer.device import DeviceMemory
from kvtransfer.errors import EndpointClosedError
from kvtransfer.limits import Limits
from kvtransfer.memory import Ranges, Region
from kvtransfer.outlasting import outlast
from kvtransfer.shared_buffer import SharedBuffer

COPY_THREADS = 2
RING_REGION_ID = 0
"""Regions that are registered count from 1."""

_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class Slot:
    """`region` is all slots as transports know them; this one begins at `offset`."""

    region: Region
    offset: int

    def ranges(self, count: int) -> Ranges:
        """Its first `count` bytes, at least one."""
        return np.array([(self.offset, count)], np.int64)


class _Ring:
    """First come, first served."""

    def __init__(self, slots: int, slot_bytes: int) -> None:
        self._buffer = SharedBuffer.create(slots * slot_bytes)
        self.region = Region(RING_REGION_ID, self._buffer)
        self._free = deque(range(0, slots * slot_bytes, slot_bytes))
        self._waiting: deque[asyncio.Future[int]] = deque()
        self.unpin: dict[type[DeviceMemory], Callable[[], None]] = {}

    @property
    def free(self) -> int:
        return len(self._free)

    async def take(self) -> int:
        """The offset of a slot; `give` gives it back."""
        if self._free:
            return self._free.popleft()
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():
                self.give(future.result())
            raise

    def give(self, offset: int) -> None:
        while self._waiting:
            future = self._waiting.popleft()
            if not future.done():
                future.set_result(offset)
                return
        self._free.append(offset)

    def close(self) -> None:
        self.region.drop()
        self._buffer.close()


class HostSlots:
    """`bounce_bytes` in slots of `bounce_slot_bytes`, made when first used. For the event loop's thread."""

    def __init__(self, limits: Limits) -> None:
        self.slot_bytes = limits.bounce_slot_bytes
        self.slots = limits.bounce_bytes // limits.bounce_slot_bytes
        self.waiting = 0
        """So many wait for one."""
        self._ring: _Ring | None = None
        self._making = asyncio.Lock()
        self._threads: ThreadPoolExecutor | None = None
        self._closed = False
        self._unused: asyncio.Future[None] | None = None

    @property
    def region(self) -> Region | None:
        """All slots as the transports know them, if they are made."""
        return self._ring.region if self._ring is not None else None

    @property
    def lent(self) -> int:
        """So many are in use."""
        return self.slots - self._ring.free if self._ring is not None else 0

    @contextlib.asynccontextmanager
    async def slot(self, device: DeviceMemory) -> AsyncIterator[Slot]:
        """One that is pinned for this kind of device, once one is free. Raises EndpointClosedError."""
        self._check_open()
        self.waiting += 1
        try:
            ring = await self._ready_ring(device)
            offset = await ring.take()
        finally:
            self.waiting -= 1
            self._tell_if_unused()
        try:
            self._check_open()
            yield Slot(ring.region, offset)
        finally:
            ring.give(offset)
            self._tell_if_unused()

    async def copy(self, slot: Slot, count: int, copies: Callable[[memoryview], _Result]) -> _Result:
        """Have `copies` work in a thread on the slot's first `count` bytes. Returns when it ended, also if
        this is cancelled: memory is touched until then."""
        return await self._in_thread(partial(_lend, slot, count, copies))

    async def close(self) -> None:
        """Give the memory back, once nobody uses a slot any more; no more are lent."""
        self._closed = True
        if self._in_use:
            self._unused = asyncio.get_running_loop().create_future()
            await self._unused
        ring, self._ring = self._ring, None
        if ring is not None:
            for unpin in ring.unpin.values():
                await self._in_thread(unpin)
            ring.close()
        if self._threads is not None:
            self._threads.shutdown()

    @property
    def _in_use(self) -> bool:
        return bool(self.waiting or self.lent)

    def _check_open(self) -> None:
        if self._closed:
            raise EndpointClosedError("the endpoint is closed")

    def _tell_if_unused(self) -> None:
        if self._unused is not None and not self._unused.done() and not self._in_use:
            self._unused.set_result(None)

    async def _ready_ring(self, device: DeviceMemory) -> _Ring:
        """Pinned for this kind of device."""
        ring = self._ring
        if ring is not None and type(device) in ring.unpin:
            return ring
        async with self._making:
            if self._ring is None:
                self._threads = ThreadPoolExecutor(COPY_THREADS, "kvtransfer-device")
                self._ring = _Ring(self.slots, self.slot_bytes)
            ring = self._ring
            if type(device) not in ring.unpin:
                ring.unpin[type(device)] = await self._in_thread(partial(device.pin, ring.region.view))
        return ring

    async def _in_thread(self, work: Callable[[], _Result]) -> _Result:
        running = asyncio.get_running_loop().run_in_executor(self._threads, work)
        await outlast(running)
        return running.result()


def _lend(slot: Slot, count: int, copies: Callable[[memoryview], _Result]) -> _Result:
    """The view ends here: an error's traceback must not keep a ring that is closed."""
    host = slot.region.view[slot.offset : slot.offset + count]
    try:
        return copies(host)
    finally:
        with contextlib.suppress(BufferError):  # a copy that raised has arrays over it
            host.release()
