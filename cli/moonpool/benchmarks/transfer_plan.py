"""What a benchmark of transfers moves: rows of the table, and the walk over both sides' memory.

Shared by every system that is compared, inside its own environment too: needs the standard library and
numpy. A row is one form of a call: so many ranges of so many bytes. Successive calls of a row walk over
the whole memory in shuffled order, another order on each side, so that no call finds its bytes in a cache
because of the call before, and no two ranges are neighbours that could be moved as one.
"""

import math
import random
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
import numpy.typing as npt

MEMORY_BYTES = 256 << 20
"""Of each side: eight times the last cache of the machine we tried."""
SAMPLE_BYTES = 64 << 20
"""Timed in one sample at least, unless the calls are small."""
CALLS_MAX = 400
"""Timed in one sample at most."""
DEPTH = 4
"""Calls in flight where more than one is: as a handover has them."""
WARM_SHARE = 8
"""One call in so many goes before the timed ones and is not counted."""
CALL_S_MAX = 30.0
"""A call that takes longer has failed."""
WALK_SEED = 4
PATTERN_SEED = 7
PATTERN_BYTES = 1_000_003
PATTERN_STRIDE = 4099
"""Primes: what a range holds follows from where it begins, and no two near each other hold the same."""

Memory = npt.NDArray[np.uint8]
Offsets = npt.NDArray[np.int64]


class Direction(StrEnum):
    """Seen from the caller."""

    WRITE = "write"
    READ = "read"


class Side(StrEnum):
    """The caller makes the calls, the owner's memory is touched by them."""

    CALLER = "caller"
    OWNER = "owner"


def sides(direction: Direction) -> tuple[Side, Side]:
    """From which side the bytes come, and to which they go."""
    return (Side.CALLER, Side.OWNER) if direction is Direction.WRITE else (Side.OWNER, Side.CALLER)


@dataclass(frozen=True, slots=True)
class Row:
    """One form of a call: `ranges` ranges of `range_bytes` bytes each."""

    ranges: int
    range_bytes: int

    @property
    def name(self) -> str:
        size = _short_bytes(self.range_bytes)
        return size if self.ranges == 1 else f"{self.ranges}x{size}"

    @property
    def call_bytes(self) -> int:
        return self.ranges * self.range_bytes

    @property
    def calls(self) -> int:
        """Timed in one sample; always enough to fill the depth."""
        return min(CALLS_MAX, max(DEPTH, SAMPLE_BYTES // self.call_bytes))

    @property
    def warm_calls(self) -> int:
        """Made before the timed ones."""
        return max(1, self.calls // WARM_SHARE)

    @property
    def verified_calls(self) -> int:
        """Made once before all samples, to see that the bytes arrive."""
        return max(DEPTH, self.warm_calls)


SMOLLM2_F16_BLOCK_BYTES = 368_640
ROWS = (
    Row(1, 4 << 10),
    Row(1, 64 << 10),
    Row(1, 1 << 20),
    Row(1, 16 << 20),
    Row(64, 64 << 10),
    Row(1024, 64 << 10),
    Row(64, 1 << 20),
    Row(256, SMOLLM2_F16_BLOCK_BYTES),
)


@dataclass(frozen=True, slots=True)
class Sample:
    """One timing: of all calls together, and of each by itself."""

    seconds: float
    call_s: tuple[float, ...]


class Walk:
    """Where each call of a row finds its bytes: the same range of the caller always meets the same of the
    owner, so what lies there after any number of calls is known."""

    def __init__(self, row: Row, memory_bytes: int = MEMORY_BYTES) -> None:
        """ValueError where the memory does not hold one call."""
        slots = memory_bytes // row.range_bytes
        if slots < row.ranges:
            raise ValueError(f"{memory_bytes} bytes do not hold {row.name}")
        self.row = row
        numbers = random.Random(WALK_SEED)
        self._offsets = {side: _shuffled(slots, numbers) * row.range_bytes for side in Side}
        self._slots = slots

    def offsets(self, side: Side, call: int) -> Offsets:
        """Where the ranges of the call number `call` begin on one side, in the order of the bytes."""
        places = np.arange(call * self.row.ranges, (call + 1) * self.row.ranges) % self._slots
        return self._offsets[side][places]

    def stretch(self, side: Side, first: int, calls: int) -> Offsets:
        """The offsets of `calls` calls from number `first` on, one after the other."""
        return np.concatenate([self.offsets(side, call) for call in range(first, first + calls)])


def touched_memory(memory_bytes: int = MEMORY_BYTES) -> Memory:
    """Memory whose pages are all there, so that no timed call is the first to meet one."""
    return np.ones(memory_bytes, np.uint8)


def answer(memory: Memory, question: dict[str, Any]) -> dict[str, Any]:
    """What a side is asked of its memory, always about the ranges of some calls: to fill or clear them, or
    for a digest of what they hold."""
    match question:
        case {"do": do, "row": [ranges, range_bytes], "side": side, "first": first, "calls": calls}:
            offsets = Walk(Row(ranges, range_bytes), len(memory)).stretch(Side(side), first, calls)
            match do:
                case "fill":
                    fill(memory, offsets, range_bytes)
                    return {}
                case "clear":
                    for offset in offsets.tolist():
                        memory[offset : offset + range_bytes] = 0
                    return {}
                case "digest":
                    return {"digest": digest(memory, offsets, range_bytes)}
    raise ValueError(f"unknown question {question}")


def fill(memory: Memory, offsets: Offsets, range_bytes: int) -> None:
    """Bytes that are never zero, others in each range."""
    period = np.random.default_rng(PATTERN_SEED).integers(1, 256, PATTERN_BYTES, dtype=np.uint8)
    source = np.resize(period, PATTERN_BYTES + range_bytes)
    for offset in offsets.tolist():
        start = offset * PATTERN_STRIDE % PATTERN_BYTES
        memory[offset : offset + range_bytes] = source[start : start + range_bytes]


def digest(memory: Memory, offsets: Offsets, range_bytes: int) -> int:
    """CRC-32 over the ranges in their order."""
    crc = 0
    for offset in offsets.tolist():
        crc = zlib.crc32(memory[offset : offset + range_bytes].data, crc)
    return crc


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of all values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def _shuffled(slots: int, numbers: random.Random) -> Offsets:
    """Every slot once. First the even ones, then the odd ones: no slot comes right after its neighbour."""
    even, odd = list(range(0, slots, 2)), list(range(1, slots, 2))
    numbers.shuffle(even)
    numbers.shuffle(odd)
    while len(odd) > 2 and (abs(odd[0] - even[-1]) == 1 or abs(odd[-1] - even[0]) == 1):
        numbers.shuffle(odd)
    return np.asarray(even + odd, np.int64)


def _short_bytes(count: int) -> str:
    if count % (1 << 20) == 0:
        return f"{count >> 20}MiB"
    return f"{count >> 10}KiB" if count % (1 << 10) == 0 else f"{count}B"
