"""The lower tier on an SSD: preallocated segment files, found again after a restart.

A segment is a file of data, one block a slot, and a file of records that say what each slot holds. A block
is written before its record, and a read verifies both: whatever a crash, a full or a failing disk did, a
block is lost at worst and never a wrong one. So nothing on the way of a block waits for fsync, and a slot
that was given up for another block needs no erasure.

The page cache serves these files: reading and writing around it (O_DIRECT) was measured at a third of
the speed for writing and at half of it for reading.
"""

import itertools
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Self

from kvhash import BlockHash
from kvpool.block_store import CorruptBlock, StoreError
from kvpool.ssd_files import (
    SUPERBLOCK_FILE,
    Segment,
    SuperblockFile,
    missing_segments,
    remove_segments,
)
from kvpool.ssd_format import (
    EPOCH_MAX,
    EPOCH_SHIFT,
    IDENTITY_BYTES_MAX,
    RECORD_BYTES,
    Record,
    Superblock,
    checksum_of,
    decode_record,
    decode_records,
    encode_record,
)
from kvpool.ssd_layout import SEGMENT_BYTES, SsdLayout, SsdLayoutError
from kvpool.tiers import Copy


class Opened(StrEnum):
    """What a folder was when its store was opened."""

    NEW = "new"
    FOUND = "found"
    REPLACED = "replaced"
    """It held the blocks of another identity, block size or segment size, which are gone."""


@dataclass(frozen=True, slots=True)
class Opening:
    """What `SsdStore.open` found and did; `slots` less than `slots_asked` where the disk is too full."""

    folder: Opened
    slots: int
    slots_asked: int
    damaged: tuple[str, ...] = ()
    """Files that were missing, too short or no good: what they held is lost, with the superblock all."""


class SsdStore:
    """A BlockStore in a folder of its own."""

    def __init__(
        self,
        superblock: SuperblockFile,
        segments: Sequence[Segment],
        layout: SsdLayout,
        opening: Opening,
        epoch: int,
    ) -> None:
        """Use `open`."""
        self.slots = layout.slots
        self.block_bytes = layout.block_bytes
        self.opening = opening
        self._superblock = superblock
        self._segments = tuple(segments)
        self._layout = layout
        self._sequence = itertools.count(epoch << EPOCH_SHIFT)

    @classmethod
    def open(
        cls,
        folder: Path,
        capacity_bytes: int,
        block_bytes: int,
        identity: bytes,
        segment_bytes: int = SEGMENT_BYTES,
    ) -> Self:
        """The store in `folder`, whose files take no more than `capacity_bytes` together.

        `identity` says whose blocks they are (namespace, layout): a store of another one is emptied, and
        `opening` says so. Where the disk has less room it becomes a smaller store; StoreError where not
        even one block fits, where the folder is in use by another process or cannot be written to.
        SsdLayoutError where the numbers make no store. Blocks: it allocates, for a thread.
        """
        if not 1 <= len(identity) <= IDENTITY_BYTES_MAX:
            raise SsdLayoutError(f"identity: {len(identity)} bytes, from 1 to {IDENTITY_BYTES_MAX}")
        layout = SsdLayout.planned(capacity_bytes, block_bytes, segment_bytes)
        with ExitStack() as opened:
            superblock = SuperblockFile(folder)
            opened.callback(superblock.close)
            before = superblock.read()
            wanted = Superblock(identity.hex(), block_bytes, segment_bytes, layout.slots, 1)
            found = _found(before, wanted)
            damaged: list[str] = []
            if found is Opened.FOUND and before is not None:
                damaged = missing_segments(folder, replace(layout, slots=min(layout.slots, before.slots)))
                wanted = replace(wanted, epoch=before.epoch + 1)
                remove_segments(folder, first=len(layout.slots_of_segments()))
            else:
                superblock.erase()
                if remove_segments(folder, first=0) and before is None:
                    damaged = [SUPERBLOCK_FILE]
            segments = _open_segments(folder, layout, opened)
            slots = sum(segment.slots for segment in segments)
            if not slots:
                raise StoreError(f"{folder}: no space left on the disk for one block of {block_bytes} bytes")
            superblock.write(replace(wanted, slots=slots))
            opened.pop_all()
        opening = Opening(found, slots, layout.slots, tuple(damaged))
        return cls(superblock, segments, replace(layout, slots=slots), opening, wanted.epoch)

    def write(self, slot: int, block_hash: BlockHash, parent: BlockHash | None, data: memoryview) -> None:
        segment, number = self._place(slot, data)
        checksum = checksum_of(block_hash, data)
        segment.data.write(number * self._layout.slot_bytes, data)
        record = Record(block_hash, parent, checksum, next(self._sequence))
        segment.records.write(number * RECORD_BYTES, memoryview(encode_record(record)))

    def read(self, slot: int, block_hash: BlockHash, into: memoryview) -> None:
        segment, number = self._place(slot, into)
        raw = bytearray(RECORD_BYTES)
        segment.records.read(number * RECORD_BYTES, memoryview(raw))
        record = decode_record(bytes(raw))
        if record is None:
            raise CorruptBlock(f"{segment.records.path}: no good record of slot {slot}")
        if record.block_hash != block_hash:
            raise CorruptBlock(
                f"{segment.records.path}: slot {slot} holds {record.block_hash.hex()}, not {block_hash.hex()}"
            )
        segment.data.read(number * self._layout.slot_bytes, into)
        if checksum_of(block_hash, into) != record.checksum:
            raise CorruptBlock(f"{segment.data.path}: slot {slot} does not hold what was written")

    def view(self, slot: int) -> None:
        return None

    def recover(self) -> list[Copy]:
        found: list[tuple[int, int, Record]] = []
        for place, segment in enumerate(self._segments):
            raw = memoryview(bytearray(segment.slots * RECORD_BYTES))
            segment.records.read(0, raw)
            first = place * self._layout.segment_slots
            found += ((record.sequence, first + number, record) for number, record in decode_records(raw))
        found.sort(key=lambda item: item[0])
        newest = {record.block_hash: slot for _, slot, record in found}
        return [
            Copy(slot, record.block_hash, record.parent)
            for _, slot, record in found
            if newest[record.block_hash] == slot
        ]

    def erase(self, slot: int) -> None:
        segment, number = self._place(slot, None)
        segment.records.write(number * RECORD_BYTES, memoryview(bytes(RECORD_BYTES)))

    def drop_cached(self, slot: int) -> None:
        """Have the next read of the slot's data come from the disk: for measuring. Raises StoreError."""
        segment, number = self._place(slot, None)
        segment.data.drop_cached(number * self._layout.slot_bytes, self._layout.slot_bytes)

    def close(self) -> None:
        for segment in self._segments:
            segment.close()
        self._superblock.close()

    def _place(self, slot: int, data: memoryview | None) -> tuple[Segment, int]:
        """(its segment, its number there); refuses what fits no slot."""
        if not 0 <= slot < self.slots:
            raise IndexError(f"slot: {slot}, the store has {self.slots} slots")
        if data is not None and len(data) != self.block_bytes:
            raise ValueError(f"{len(data)} bytes of data, a block has {self.block_bytes}")
        segment, number = self._layout.place(slot)
        return self._segments[segment], number


def _found(before: Superblock | None, wanted: Superblock) -> Opened:
    if before is None:
        return Opened.NEW
    shape = (before.identity, before.block_bytes, before.segment_bytes)
    same = shape == (wanted.identity, wanted.block_bytes, wanted.segment_bytes)
    return Opened.FOUND if same and before.epoch < EPOCH_MAX else Opened.REPLACED


def _open_segments(folder: Path, layout: SsdLayout, opened: ExitStack) -> list[Segment]:
    """As many as the disk has room for; `opened` closes them."""
    segments: list[Segment] = []
    for number, slots in enumerate(layout.slots_of_segments()):
        segment = Segment.open(folder, number, slots, layout)
        if segment is None:
            break
        opened.callback(segment.close)
        segments.append(segment)
        if segment.slots < slots:
            remove_segments(folder, first=number + 1)
            break
    return segments
