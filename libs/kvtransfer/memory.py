"""Registered memory: regions, ranges within them, and a cursor that walks ranges as buffers.

Owns every computation on ranges. Knows nothing of peers, grants or sockets.
"""

import mmap
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import xxhash

from kvtransfer.errors import RangeError
from kvtransfer.limits import RANGES_MAX, REGION_BYTES_MAX

Ranges = npt.NDArray[np.int64]
"""[n, 2]: (offset, length) in bytes within one region. Their order is the order of the bytes."""

Offsets = npt.NDArray[np.int64]

FEW_RANGES = 16
"""Up to so many are worked on as Python's integers: a call of numpy costs more than a few of them."""

SMALL_RANGE_BYTES = 32 << 10
"""Ranges that are many and on average smaller than this are handed to the kernel as a table. Larger ones
are few for one system call, and views are as quick."""

RegisterableBuffer = memoryview | mmap.mmap | bytearray | npt.NDArray[np.generic]


class Region:
    """A writable, contiguous buffer that transfers may touch. Made by `Endpoint.register`."""

    __slots__ = ("_view", "address", "region_bytes", "region_id")

    def __init__(self, region_id: int, buffer: RegisterableBuffer) -> None:
        view = _view_of(buffer)
        if view.readonly or not view.c_contiguous or view.nbytes == 0:
            wrong = "read-only" if view.readonly else "empty" if view.nbytes == 0 else "not contiguous"
            raise RangeError(f"a region must be writable, contiguous and not empty; this buffer is {wrong}")
        if view.nbytes > REGION_BYTES_MAX:
            raise RangeError(f"a region has at most {REGION_BYTES_MAX} bytes, not {view.nbytes}")
        self.region_id = region_id
        self.region_bytes = view.nbytes
        self._view: memoryview | None = view.cast("B")
        self.address = address_of(self._view)
        """Of the first byte, in this process; good while a view is held."""

    @property
    def view(self) -> memoryview:
        """The whole region as bytes. Raises RangeError once it is unregistered."""
        if self._view is None:
            raise RangeError(f"region {self.region_id} is not registered any more")
        return self._view

    def drop(self) -> None:
        """Let go of the buffer, so that its owner can close it."""
        self._view = None


def _view_of(buffer: RegisterableBuffer) -> memoryview:
    try:
        return buffer.data if isinstance(buffer, np.ndarray) else memoryview(buffer)
    except TypeError as error:
        raise RangeError(f"a region must be a buffer: {error}") from error


def address_of(view: memoryview) -> int:
    """Of the first byte; good while the view is held."""
    return int(np.frombuffer(view, np.uint8).ctypes.data)


def checked_ranges(ranges: npt.ArrayLike, region_bytes: int, field: str) -> Ranges:
    """A copy of `ranges` without empty ones and with neighbours joined.

    Raises RangeError if a range does not lie within `region_bytes` or there are over RANGES_MAX.
    """
    return checked_and_summed(ranges, region_bytes, field)[0]


def checked_and_summed(ranges: npt.ArrayLike, region_bytes: int, field: str) -> tuple[Ranges, int]:
    """`checked_ranges` and the sum of their lengths."""
    pairs = _few_pairs(ranges)
    if pairs is not None:
        return _checked_few(pairs, region_bytes, field)
    checked = _checked_many(ranges, region_bytes, field)
    return checked, total_bytes(checked)


def _checked_many(ranges: npt.ArrayLike, region_bytes: int, field: str) -> Ranges:
    array = np.asarray(ranges)
    if array.size == 0:
        return no_ranges()
    if array.ndim != 2 or array.shape[1] != 2 or array.dtype.kind not in "iu":
        raise RangeError(f"{field} must be integers of shape [n, 2], not {array.dtype} {array.shape}")
    if array.dtype.kind == "u" and array.dtype.itemsize == 8 and array.max() > REGION_BYTES_MAX:
        raise RangeError(_leaving(field, region_bytes))
    packed = array.astype(np.int64)
    offsets, lengths = packed[:, 0], packed[:, 1]
    # `region_bytes - offsets` cannot overflow once the offsets are known to lie inside.
    if offsets.min() < 0 or lengths.min() < 0 or offsets.max() > region_bytes:
        raise RangeError(_leaving(field, region_bytes))
    if bool((lengths > region_bytes - offsets).any()):
        raise RangeError(_leaving(field, region_bytes))
    joined = _joined(packed if lengths.min() > 0 else packed[lengths > 0])
    if len(joined) > RANGES_MAX:
        raise RangeError(f"{field} has {len(joined)} separate ranges, at most {RANGES_MAX} in one call")
    return joined


def no_ranges() -> Ranges:
    return np.empty((0, 2), np.int64)


def total_bytes(ranges: Ranges) -> int:
    """Sum of the lengths."""
    if len(ranges) <= FEW_RANGES:
        return sum([length for _, length in ranges.tolist()])
    return int(ranges[:, 1].sum())


def _few_pairs(ranges: npt.ArrayLike) -> list[list[int]] | None:
    """An array of a few ranges as Python's integers, which are quicker for so few; None for all else."""
    if not isinstance(ranges, np.ndarray):
        if not isinstance(ranges, list | tuple) or len(ranges) > FEW_RANGES:
            return None
        ranges = np.asarray(ranges)
    shape = ranges.shape
    if len(shape) != 2 or shape[1] != 2 or not 0 < shape[0] <= FEW_RANGES or ranges.dtype.kind not in "iu":
        return None
    pairs: list[list[int]] = ranges.tolist()
    return pairs


def _checked_few(pairs: list[list[int]], region_bytes: int, field: str) -> tuple[Ranges, int]:
    if len(pairs) == 1:
        offset, length = pairs[0]
        if 0 <= offset <= region_bytes - length and length > 0:
            return np.array(pairs, np.int64), length
    kept: list[list[int]] = []
    total, end = 0, -1
    for offset, length in pairs:
        if offset < 0 or length < 0 or offset + length > region_bytes:
            raise RangeError(_leaving(field, region_bytes))
        if not length:
            continue
        if offset == end:
            kept[-1][1] += length
        else:
            kept.append([offset, length])
        total += length
        end = offset + length
    return (np.array(kept, np.int64) if kept else no_ranges()), total


def _leaving(field: str, region_bytes: int) -> str:
    return f"{field}: a range leaves the {region_bytes} bytes of the region"


def _joined(ranges: Ranges) -> Ranges:
    """Join each range that starts where the one before it ends."""
    if len(ranges) < 2:
        return ranges
    starts = ranges[:, 0]
    ends = starts + ranges[:, 1]
    apart = starts[1:] != ends[:-1]
    if apart.all():
        return ranges
    firsts = np.concatenate(([True], apart))
    lasts = np.concatenate((apart, [True]))
    return np.stack((starts[firsts], ends[lasts] - starts[firsts]), axis=1)


def offsets_at(ranges: Ranges, ends: Offsets, numbers: Offsets) -> Offsets:
    """The offsets in the region of the bytes with these `numbers`, counted in the ranges' order; `ends` are
    the running sums of their lengths."""
    at = np.searchsorted(ends, numbers, side="right")
    offsets: Offsets = ranges[at, 0] + numbers - (ends[at] - ranges[at, 1])
    return offsets


class Cursor:
    """A position in the bytes of some ranges of a region, handed out without a copy: as views, or, of many
    small ranges, as rows (address, length) for the kernel, so that no object is made for each."""

    __slots__ = ("_ends", "_index", "_pairs", "_skip", "_table", "_view", "payload_bytes", "remaining")

    def __init__(self, view: memoryview, ranges: Ranges) -> None:
        self._view = view
        self._index = 0
        self._skip = 0
        self._table: npt.NDArray[np.uint64] | None = None
        if len(ranges) <= FEW_RANGES:
            self._pairs: list[list[int]] = ranges.tolist()
            self.payload_bytes = self.remaining = sum([length for _, length in self._pairs])
            return
        self.payload_bytes = self.remaining = total_bytes(ranges)
        if self.remaining < SMALL_RANGE_BYTES * len(ranges):
            self._table = ranges.astype(np.uint64)
            self._table[:, 0] += np.uint64(address_of(view))
            self._ends = np.cumsum(ranges[:, 1])
        else:
            self._pairs = ranges.tolist()

    @property
    def tabled(self) -> bool:
        """Whether `rows` may be asked for: the ranges are many and small."""
        return self._table is not None

    def peek(self, bytes_max: int, views_max: int) -> list[memoryview]:
        """The next bytes, at most `bytes_max` of them in at most `views_max` views."""
        if self._table is not None:
            return self._peek_table(bytes_max, views_max)
        views: list[memoryview] = []
        left = min(bytes_max, self.remaining)
        index, skip = self._index, self._skip
        while left > 0 and len(views) < views_max:
            offset, length = self._pairs[index]
            count = min(length - skip, left)
            views.append(self._view[offset + skip : offset + skip + count])
            left -= count
            index, skip = index + 1, 0
        return views

    def rows(self, bytes_max: int, into: npt.NDArray[np.uint64]) -> tuple[int, int]:
        """Fill the first rows of `into` with (address, length) of the next bytes, at most `bytes_max` of
        them. Returns how many rows and how many bytes; bytes_max, the rest and `into` are not empty."""
        assert self._table is not None
        done = self.payload_bytes - self.remaining
        wanted = min(bytes_max, self.remaining)
        last = min(int(self._ends.searchsorted(done + wanted)), self._index + len(into) - 1)
        count = last - self._index + 1
        into[:count] = self._table[self._index : last + 1]
        into[0, 0] += np.uint64(self._skip)
        into[0, 1] -= np.uint64(self._skip)
        over = max(0, int(self._ends[last]) - done - wanted)
        into[count - 1, 1] -= np.uint64(over)
        return count, int(self._ends[last]) - done - over

    def advance(self, count: int) -> None:
        """Step over `count` bytes, at most those that remain."""
        assert 0 <= count <= self.remaining
        self.remaining -= count
        if self._table is not None:
            done = self.payload_bytes - self.remaining
            self._index = int(self._ends.searchsorted(done, side="right"))
            self._skip = done - (int(self._ends[self._index - 1]) if self._index else 0)
            return
        index, skip = self._index, self._skip + count
        while index < len(self._pairs) and skip >= self._pairs[index][1]:
            skip -= self._pairs[index][1]
            index += 1
        self._index, self._skip = index, skip

    def _peek_table(self, bytes_max: int, views_max: int) -> list[memoryview]:
        if not self.remaining or bytes_max <= 0:
            return []
        assert self._table is not None
        rows = np.empty((min(views_max, len(self._table) - self._index), 2), np.uint64)
        count, _ = self.rows(bytes_max, rows)
        base = address_of(self._view)
        return [
            self._view[address - base : address - base + length] for address, length in rows[:count].tolist()
        ]


def checksum(region: Region, ranges: npt.ArrayLike) -> str:
    """xxh3_128 as hex over the bytes of `ranges` in their order; the two ends of a transfer agree.

    Reads all bytes: call it in a thread if they are many (the hash lets go of the GIL).
    """
    digest = xxhash.xxh3_128()
    cursor = Cursor(region.view, checked_ranges(ranges, region.region_bytes, "ranges"))
    for view in cursor.peek(cursor.remaining, RANGES_MAX):
        digest.update(view)
    return digest.hexdigest()


def copy_into(targets: Sequence[memoryview], source: memoryview) -> int:
    """Fill `targets` in order from `source`; returns how many bytes were copied."""
    done = 0
    for target in targets:
        count = min(len(target), len(source) - done)
        target[:count] = source[done : done + count]
        done += count
    return done
