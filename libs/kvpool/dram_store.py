"""The lower tier in memory: blocks of the arena that the engine does not compute on.

Owns which hash was written to which slot. The bytes never leave memory that only this process writes, so
they carry no checksum: as in the compute tier, nothing stands between the writer and the reader.
"""

import numpy as np

from kvhash import BlockHash
from kvpool.arena import Arena
from kvpool.block_store import CorruptBlock
from kvpool.tiers import Copy


class DramStore:
    """Slot s is block `first_block` + s of the arena. A BlockStore that is empty at every start."""

    def __init__(self, arena: Arena, first_block: int, slots: int) -> None:
        """ValueError where the arena has no such blocks. The arena must outlive the store."""
        if slots < 1:
            raise ValueError(f"slots: {slots}, at least 1")
        if not 0 <= first_block <= arena.blocks - slots:
            raise ValueError(f"first_block: {first_block}, from 0 to {arena.blocks - slots}")
        self.slots = slots
        self.block_bytes = arena.block_bytes
        self._arena = arena
        self._first_block = first_block
        self._hashes: list[BlockHash | None] = [None] * slots

    def write(self, slot: int, block_hash: BlockHash, parent: BlockHash | None, data: memoryview) -> None:
        place = self.view(slot)
        self._check(data)
        self._hashes[slot] = None
        _copy(data, place)
        self._hashes[slot] = block_hash

    def read(self, slot: int, block_hash: BlockHash, into: memoryview) -> None:
        place = self.view(slot)
        self._check(into)
        held = self._hashes[slot]
        if held != block_hash:
            described = "nothing" if held is None else held.hex()
            raise CorruptBlock(f"DRAM slot {slot} holds {described}, not {block_hash.hex()}")
        _copy(place, into)

    def view(self, slot: int) -> memoryview:
        if not 0 <= slot < self.slots:
            raise IndexError(f"slot: {slot}, the store has {self.slots} slots")
        return self._arena.block(self._first_block + slot)

    def erase(self, slot: int) -> None:
        self.view(slot)
        self._hashes[slot] = None

    def recover(self) -> list[Copy]:
        return []

    def close(self) -> None:
        self._hashes = [None] * self.slots

    def _check(self, data: memoryview) -> None:
        if len(data) != self.block_bytes:
            raise ValueError(f"{len(data)} bytes of data, a block has {self.block_bytes}")


def _copy(source: memoryview, target: memoryview) -> None:
    """As numpy arrays: a copy between memoryviews would keep the interpreter's lock."""
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))
