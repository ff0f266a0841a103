"""Calls on the memory of a device: piece by piece through a ring of host memory, over any link.

Owns the ring and the order of copies: while a piece is on the wire the next is copied. Knows no transport.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np

from kvtransfer.device import DeviceMemory, DeviceRegion
from kvtransfer.errors import TransferError
from kvtransfer.limits import Limits
from kvtransfer.memory import Region, no_ranges
from kvtransfer.outlasting import outlast
from kvtransfer.parts import sliced
from kvtransfer.shared_buffer import SharedBuffer
from kvtransfer.transport import Call, Link, LocalMemory

PIECES_AT_ONCE = 4
"""Of one call: one that is copied, one on the wire, and two between so that neither waits for the other."""
COPY_THREADS = 2
RING_REGION_ID = 0
"""Regions that are registered count from 1."""


_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class _Piece:
    """A stretch of a call's bytes."""

    start: int
    count: int


class _Ring:
    """Slots of host memory that transports know as one region. First come, first served."""

    def __init__(self, slots: int, slot_bytes: int) -> None:
        self._buffer = SharedBuffer.create(slots * slot_bytes)
        self.region = Region(RING_REGION_ID, self._buffer)
        self._free = deque(range(0, slots * slot_bytes, slot_bytes))
        self._waiting: deque[asyncio.Future[int]] = deque()
        self.unpin: dict[type[DeviceMemory], Callable[[], None]] = {}

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


class Bounce:
    """The ring of one endpoint, made when it is first used. For the event loop's thread."""

    def __init__(self, limits: Limits) -> None:
        self._slot_bytes = limits.bounce_slot_bytes
        self._slots = limits.bounce_bytes // limits.bounce_slot_bytes
        self._ring: _Ring | None = None
        self._making = asyncio.Lock()
        self._threads: ThreadPoolExecutor | None = None

    async def write(self, link: Link, call: Call) -> None:
        """As `link.write`, of memory of a device. A tag goes with the last piece, after all others."""
        device = _device_of(call)
        pieces = self._pieces(call)
        last = [pieces.pop()] if call.tag else []
        await self._all(pieces, partial(self._write_piece, link, call, device, b""))
        await self._all(last, partial(self._write_piece, link, call, device, call.tag), pieces)

    async def read(self, link: Link, call: Call) -> None:
        """As `link.read`, to memory of a device."""
        await self._all(self._pieces(call), partial(self._read_piece, link, call, _device_of(call)))

    @property
    def region(self) -> Region | None:
        """The ring as the transports know it, if there is one."""
        return self._ring.region if self._ring is not None else None

    async def close(self) -> None:
        """No call uses it any more: give the ring back."""
        ring, self._ring = self._ring, None
        if ring is not None:
            for unpin in ring.unpin.values():
                await self._in_thread(unpin)
            ring.close()
        if self._threads is not None:
            self._threads.shutdown()

    async def _write_piece(
        self, link: Link, call: Call, device: DeviceMemory, tag: bytes, piece: _Piece
    ) -> None:
        local = sliced(call.memory.ranges, piece.start, piece.count)
        async with self._slot(device) as (ring, offset):
            if piece.count:
                await self._in_thread(lambda: _lent(ring, offset, piece, partial(device.copy_out, local)))
            earlier_bytes = piece.start if tag else 0
            await link.write(_piece_call(call, ring, offset, piece, tag, earlier_bytes))

    async def _read_piece(self, link: Link, call: Call, device: DeviceMemory, piece: _Piece) -> None:
        local = sliced(call.memory.ranges, piece.start, piece.count)
        async with self._slot(device) as (ring, offset):
            await link.read(_piece_call(call, ring, offset, piece, b"", 0))
            if piece.count:
                await self._in_thread(
                    lambda: _lent(ring, offset, piece, lambda host: device.copy_in(host, local))
                )

    def _pieces(self, call: Call) -> list[_Piece]:
        """At least one; a call without bytes has one without."""
        total, step = call.memory.payload_bytes, self._slot_bytes
        return [_Piece(start, min(step, total - start)) for start in range(0, max(total, 1), step)]

    async def _all(
        self,
        pieces: Sequence[_Piece],
        move: Callable[[_Piece], Awaitable[None]],
        landed_before: Sequence[_Piece] = (),
    ) -> None:
        """Some at once. The first error is the call's, with what landed of all pieces."""
        landed = [(piece.start, piece.count) for piece in landed_before]
        waiting = iter(pieces)

        async def some() -> None:
            for piece in waiting:
                try:
                    await move(piece)
                except TransferError as error:
                    landed.extend((piece.start + start, count) for start, count in error.landed)
                    raise
                landed.append((piece.start, piece.count))

        try:
            async with asyncio.TaskGroup() as tasks:
                for _ in range(min(PIECES_AT_ONCE, len(pieces))):
                    tasks.create_task(some())
        except ExceptionGroup as group:
            error = copy(group.exceptions[0])  # calls that fail with one link share its error
            if isinstance(error, TransferError):
                error.landed = tuple(sorted(landed))
                error.settled = error.settled and len(pieces) == 1
            raise error from None

    @contextlib.asynccontextmanager
    async def _slot(self, device: DeviceMemory) -> AsyncIterator[tuple[_Ring, int]]:
        ring = await self._ready_ring(device)
        offset = await ring.take()
        try:
            yield ring, offset
        finally:
            ring.give(offset)

    async def _ready_ring(self, device: DeviceMemory) -> _Ring:
        """Pinned for this kind of device."""
        ring = self._ring
        if ring is not None and type(device) in ring.unpin:
            return ring
        async with self._making:
            if self._ring is None:
                self._threads = ThreadPoolExecutor(COPY_THREADS, "kvtransfer-device")
                self._ring = _Ring(self._slots, self._slot_bytes)
            ring = self._ring
            if type(device) not in ring.unpin:
                ring.unpin[type(device)] = await self._in_thread(partial(device.pin, ring.region.view))
        return ring

    async def _in_thread(self, work: Callable[[], _Result]) -> _Result:
        """Returns when it ended, also if it is cancelled: memory is touched until then."""
        running = asyncio.get_running_loop().run_in_executor(self._threads, work)
        await outlast(running)
        return running.result()


def _lent(ring: _Ring, offset: int, piece: _Piece, copies: Callable[[memoryview], None]) -> None:
    """Have a slot copied. Its view ends here: an error's traceback must not keep a ring that is closed."""
    host = ring.region.view[offset : offset + piece.count]
    try:
        copies(host)
    finally:
        with contextlib.suppress(BufferError):  # a copy that raised has arrays over it
            host.release()


def _device_of(call: Call) -> DeviceMemory:
    region = call.memory.region
    assert isinstance(region, DeviceRegion)
    return region.device


def _piece_call(call: Call, ring: _Ring, offset: int, piece: _Piece, tag: bytes, earlier_bytes: int) -> Call:
    """The call that moves one piece, from or to its slot."""
    local = np.array([(offset, piece.count)], np.int64) if piece.count else no_ranges()
    memory = LocalMemory(ring.region, local, piece.count)
    remote = sliced(call.remote, piece.start, piece.count)
    return Call(memory, call.token, remote, tag, call.verify, earlier_bytes)
