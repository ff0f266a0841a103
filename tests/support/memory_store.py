"""A BlockStore in a dict, whose reads and writes a test can hold up and let fail."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from kvhash import BlockHash
from kvpool import CorruptBlock, StoreError
from kvpool.tiers import Copy

HELD_S_MAX = 10.0


class Gate:
    """Calls of one kind: open unless `shut`; counts who is held up."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._open = True
        self.waiting = 0
        self.waiting_max = 0
        self.passed = 0

    def shut(self) -> None:
        with self._changed:
            self._open = False

    def open(self) -> None:
        with self._changed:
            self._open = True
            self._changed.notify_all()

    def pass_through(self) -> None:
        with self._changed:
            self.waiting += 1
            self.waiting_max = max(self.waiting_max, self.waiting)
            opened = self._changed.wait_for(lambda: self._open, HELD_S_MAX)
            self.waiting -= 1
            self.passed += 1
        assert opened, "a test left the gate shut"


@dataclass
class Disk:
    """What outlives a store."""

    held: dict[int, tuple[BlockHash, BlockHash | None, bytes]] = field(default_factory=dict)
    """By slot, in the order of the last write."""


class MemoryStore:
    def __init__(self, slots: int, block_bytes: int, disk: Disk | None = None) -> None:
        self.slots = slots
        self.block_bytes = block_bytes
        self.disk = disk or Disk()
        self.reads = Gate()
        self.writes = Gate()
        self.fails_read: Callable[[int], bool] = lambda slot: False
        self.fails_write: Callable[[int], bool] = lambda slot: False
        self.fails_erase: Callable[[int], bool] = lambda slot: False
        self.closed = False

    def write(self, slot: int, block_hash: BlockHash, parent: BlockHash | None, data: memoryview) -> None:
        self._check(slot, data)
        self.disk.held.pop(slot, None)
        self.writes.pass_through()
        if self.fails_write(slot):
            raise StoreError(f"slot {slot}: no space left")
        self.disk.held[slot] = (block_hash, parent, bytes(data))

    def read(self, slot: int, block_hash: BlockHash, into: memoryview) -> None:
        self._check(slot, into)
        self.reads.pass_through()
        if self.fails_read(slot):
            raise StoreError(f"slot {slot}: input/output error")
        held = self.disk.held.get(slot)
        if held is None or held[0] != block_hash:
            raise CorruptBlock(f"slot {slot} does not hold {block_hash.hex()}")
        into[:] = held[2]

    def view(self, slot: int) -> memoryview | None:
        return None

    def erase(self, slot: int) -> None:
        if not 0 <= slot < self.slots:
            raise IndexError(f"slot: {slot}, the store has {self.slots} slots")
        if self.fails_erase(slot):
            raise StoreError(f"slot {slot}: input/output error")
        self.disk.held.pop(slot, None)

    def recover(self) -> list[Copy]:
        newest = {block_hash: slot for slot, (block_hash, _, _) in self.disk.held.items()}
        return [
            Copy(slot, block_hash, parent)
            for slot, (block_hash, parent, _) in self.disk.held.items()
            if newest[block_hash] == slot
        ]

    def corrupt(self, slot: int) -> None:
        self.disk.held.pop(slot)

    def close(self) -> None:
        self.closed = True

    def _check(self, slot: int, data: memoryview) -> None:
        assert not self.closed, "a store was used after it was closed"
        if not 0 <= slot < self.slots:
            raise IndexError(f"slot: {slot}, the store has {self.slots} slots")
        if len(data) != self.block_bytes:
            raise ValueError(f"{len(data)} bytes of data, a block has {self.block_bytes}")
