"""The memories that the two ends of one channel have told each other of.

Owns which of our regions a peer knows, and the mappings of the peer's. Knows nothing of calls or grants.
"""

import os
from dataclasses import dataclass

import numpy as np

from kvtransfer.errors import FrameError
from kvtransfer.memory import Ranges, Region, address_of
from kvtransfer.shared_buffer import SharedBuffer, SharedBufferError
from kvtransfer.shm import frames
from kvtransfer.shm.board import Board, BoardView, Permission
from kvtransfer.shm.channel import Channel
from kvtransfer.shm.frames import RegionFrame
from kvtransfer.shm.system import Mapping, PeerProcess


class Exports:
    """Our side: a region is told of before the first frame that names it."""

    def __init__(self, channel: Channel, board: Board) -> None:
        self._channel = channel
        self._board = board
        self._told: set[int] = set()

    def tell_board(self) -> None:
        """First of all."""
        self._channel.send(frames.pack_board(), self._board.memory.fileno())

    def tell(self, region: Region) -> None:
        if region.region_id in self._told:
            return
        self._told.add(region.region_id)
        descriptor, offset = _shared(region)
        mapped = descriptor is not None
        told = RegionFrame(region.region_id, region.region_bytes, mapped, offset, region.address)
        self._channel.send(frames.pack_region(told), descriptor)

    def drop(self, region: Region) -> None:
        """The region is gone: the peer is to let go of its mapping."""
        if region.region_id in self._told:
            self._told.discard(region.region_id)
            self._channel.send(frames.pack_drop(region.region_id))


def _shared(region: Region) -> tuple[int | None, int]:
    """The descriptor that peers can map, if there is one, and where the region begins in it."""
    buffer = region.view.obj
    if not isinstance(buffer, SharedBuffer):
        return None, 0
    try:
        begin = region.address - address_of(memoryview(buffer))
        return buffer.fileno(), buffer.offset_bytes + begin
    except SharedBufferError:
        return None, 0


@dataclass(frozen=True, slots=True)
class PeerMemory:
    """A region of the peer: mapped at `address` here, or at `address` in the `process` of the peer."""

    address: int
    region_bytes: int
    mapping: Mapping | None
    process: PeerProcess | None

    def covers(self, ranges: Ranges) -> bool:
        """Whether the ranges, which come from the other side, lie in it."""
        if len(ranges) == 1:
            start, count = ranges[0].tolist()
            return bool(start >= 0 and 0 < count <= self.region_bytes - start)
        offsets, lengths = ranges[:, 0], ranges[:, 1]
        if len(ranges) == 0:
            return True
        if int(offsets.min()) < 0 or int(lengths.min()) <= 0 or int(offsets.max()) > self.region_bytes:
            return False
        return bool(np.all(lengths <= self.region_bytes - offsets))


class Imports:
    """The peer's side. FrameError for whatever it must not send."""

    def __init__(self, channel: Channel, process: PeerProcess, regions_max: int) -> None:
        self._channel = channel
        self._process = process
        self._regions_max = regions_max
        self._regions: dict[int, PeerMemory] = {}
        self._board: BoardView | None = None

    def on_board(self) -> None:
        if self._board is not None:
            raise FrameError("a second board")
        self._board = BoardView(self._mapped())

    def on_region(self, body: bytes) -> None:
        told = frames.parse_region(body)
        if told.region_id in self._regions or len(self._regions) >= self._regions_max:
            raise FrameError(f"region {told.region_id} again, or more than {self._regions_max} regions")
        if not told.mapped:
            memory = PeerMemory(told.address, told.region_bytes, None, self._process)
        else:
            mapping = self._mapped()
            if told.region_bytes > mapping.size_bytes - told.offset:
                raise FrameError(f"region of {told.region_bytes} bytes at {told.offset} leaves its memory")
            memory = PeerMemory(mapping.address + told.offset, told.region_bytes, mapping, None)
        self._regions[told.region_id] = memory

    def on_drop(self, body: bytes) -> PeerMemory | None:
        """What was dropped, for others to let go of as well."""
        return self._regions.pop(frames.parse_drop(body), None)

    def region(self, region_id: int) -> PeerMemory:
        memory = self._regions.get(region_id)
        if memory is None:
            raise FrameError(f"region {region_id}, which was never told of")
        return memory

    def permission(self, slot: int, epoch: int) -> Permission:
        if self._board is None:
            raise FrameError("a permission without a board")
        return self._board.permission(slot, epoch)

    def close(self) -> None:
        """Let go of all mappings; a copy that runs keeps its own until it ends."""
        self._regions.clear()
        self._board = None
        self._process.close()

    def _mapped(self) -> Mapping:
        descriptor = self._channel.take_descriptor()
        try:
            return Mapping(descriptor)
        finally:
            os.close(descriptor)
