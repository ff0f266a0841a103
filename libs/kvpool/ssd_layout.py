"""Where an SsdStore's slots lie: which file, which offset, how many fit. Pure."""

from dataclasses import dataclass
from typing import Self

from kvpool.ssd_format import RECORD_BYTES, SUPERBLOCK_BYTES

PAGE_BYTES = 4096
"""Slots begin at multiples of it, and files take whole ones."""

SEGMENT_BYTES = 16 << 30
"""Of one segment, its records included."""
SEGMENTS_MAX = 256
"""Each keeps two files open; many systems allow a process 1024."""


class SsdLayoutError(ValueError):
    """The numbers make no store; the message names the field and its limit."""


@dataclass(frozen=True, slots=True)
class SsdLayout:
    """Slots in whole blocks, as many as fit into `capacity_bytes` with their records and the superblock.

    All segments but the last have `segment_slots` slots, so that slot numbers outlive another capacity.
    """

    block_bytes: int
    segment_bytes: int
    segment_slots: int
    slots: int

    @classmethod
    def planned(cls, capacity_bytes: int, block_bytes: int, segment_bytes: int) -> Self:
        """Raises SsdLayoutError."""
        if block_bytes < 1:
            raise SsdLayoutError(f"block_bytes: {block_bytes}, at least 1")
        segment_slots = _slots_within(segment_bytes, block_bytes)
        smallest = file_bytes(1, block_bytes)
        if segment_slots < 1:
            raise SsdLayoutError(
                f"segment_bytes: {segment_bytes}, at least {smallest}: one block, its record"
            )
        segments, rest = divmod(capacity_bytes - SUPERBLOCK_BYTES, file_bytes(segment_slots, block_bytes))
        slots = segments * segment_slots + _slots_within(rest, block_bytes)
        if capacity_bytes < SUPERBLOCK_BYTES + smallest:
            raise SsdLayoutError(
                f"capacity_bytes: {capacity_bytes}, at least {SUPERBLOCK_BYTES + smallest}: one block of "
                f"{block_bytes} bytes, its record and the superblock"
            )
        if slots > SEGMENTS_MAX * segment_slots:
            raise SsdLayoutError(
                f"capacity_bytes: {capacity_bytes}, more than {SEGMENTS_MAX} segments; "
                f"segment_bytes is {segment_bytes}"
            )
        return cls(block_bytes, segment_bytes, segment_slots, slots)

    @property
    def slot_bytes(self) -> int:
        """From one slot to the next."""
        return _paged(self.block_bytes)

    def slots_of_segments(self) -> list[int]:
        """How many slots each segment has, first to last."""
        return [
            min(self.segment_slots, self.slots - first) for first in range(0, self.slots, self.segment_slots)
        ]

    def place(self, slot: int) -> tuple[int, int]:
        """(segment, number of the slot within it)."""
        return divmod(slot, self.segment_slots)


def file_bytes(slots: int, block_bytes: int) -> int:
    """What the two files of a segment of so many slots take."""
    return slots * _paged(block_bytes) + _paged(slots * RECORD_BYTES)


def _slots_within(available_bytes: int, block_bytes: int) -> int:
    """The most slots whose files take no more."""
    slots = max(0, available_bytes // (_paged(block_bytes) + RECORD_BYTES))
    while slots and file_bytes(slots, block_bytes) > available_bytes:
        slots -= 1
    return slots


def _paged(size_bytes: int) -> int:
    return -(-size_bytes // PAGE_BYTES) * PAGE_BYTES
