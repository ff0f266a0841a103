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

RegisterableBuffer = memoryview | mmap.mmap | bytearray | npt.NDArray[np.generic]


class Region:
    """A writable, contiguous buffer that transfers may touch. Made by `Endpoint.register`."""

    __slots__ = ("_view", "region_bytes", "region_id")

    def __init__(self, region_id: int, buffer: RegisterableBuffer) -> None:
        view = buffer.data if isinstance(buffer, np.ndarray) else memoryview(buffer)
        if view.readonly or not view.c_contiguous or view.nbytes == 0:
            raise RangeError("a region must be a writable, contiguous buffer that is not empty")
        if view.nbytes > REGION_BYTES_MAX:
            raise RangeError(f"a region has at most {REGION_BYTES_MAX} bytes, not {view.nbytes}")
        self.region_id = region_id
        self.region_bytes = view.nbytes
        self._view: memoryview | None = view.cast("B")

    @property
    def view(self) -> memoryview:
        """The whole region as bytes. Raises RangeError once it is unregistered."""
        if self._view is None:
            raise RangeError(f"region {self.region_id} is not registered any more")
        return self._view

    def drop(self) -> None:
        """Let go of the buffer, so that its owner can close it."""
        self._view = None


def checked_ranges(ranges: npt.ArrayLike, region_bytes: int, field: str) -> Ranges:
    """A copy of `ranges` without empty ones and with neighbours joined.

    Raises RangeError if a range does not lie within `region_bytes` or there are over RANGES_MAX.
    """
    array = np.asarray(ranges)
    if array.size == 0:
        return np.empty((0, 2), dtype=np.int64)
    if array.ndim != 2 or array.shape[1] != 2 or array.dtype.kind not in "iu":
        raise RangeError(f"{field} must be integers of shape [n, 2], not {array.dtype} {array.shape}")
    if array.dtype.kind == "u" and array.dtype.itemsize == 8 and array.max() > REGION_BYTES_MAX:
        raise RangeError(f"{field} leave the {region_bytes} bytes of the region")
    packed = array.astype(np.int64)
    offsets, lengths = packed[:, 0], packed[:, 1]
    # `region_bytes - offsets` cannot overflow once the offsets are known to lie inside.
    if offsets.min() < 0 or lengths.min() < 0 or offsets.max() > region_bytes:
        raise RangeError(f"{field} leave the {region_bytes} bytes of the region")
    if bool((lengths > region_bytes - offsets).any()):
        raise RangeError(f"{field} leave the {region_bytes} bytes of the region")
    joined = _joined(packed[lengths > 0])
    if len(joined) > RANGES_MAX:
        raise RangeError(f"{field} has {len(joined)} separate ranges, at most {RANGES_MAX} in one call")
    return joined


def total_bytes(ranges: Ranges) -> int:
    """Sum of the lengths."""
    return int(ranges[:, 1].sum())


def _joined(ranges: Ranges) -> Ranges:
    """Join each range that starts where the one before it ends."""
    if len(ranges) < 2:
        return ranges
    starts = ranges[:, 0]
    ends = starts + ranges[:, 1]
    firsts = np.concatenate(([True], starts[1:] != ends[:-1]))
    lasts = np.concatenate((firsts[1:], [True]))
    return np.stack((starts[firsts], ends[lasts] - starts[firsts]), axis=1)


class Cursor:
    """A position in the bytes of some ranges of a region, handed out as views without a copy."""

    __slots__ = ("_index", "_lengths", "_offsets", "_skip", "_view", "remaining")

    def __init__(self, view: memoryview, ranges: Ranges) -> None:
        self._view = view
        self._offsets: list[int] = ranges[:, 0].tolist()
        self._lengths: list[int] = ranges[:, 1].tolist()
        self._index = 0
        self._skip = 0
        self.remaining = total_bytes(ranges)

    def peek(self, bytes_max: int, views_max: int) -> list[memoryview]:
        """The next bytes, at most `bytes_max` of them in at most `views_max` views."""
        views: list[memoryview] = []
        left = min(bytes_max, self.remaining)
        index, skip = self._index, self._skip
        while left > 0 and len(views) < views_max:
            start = self._offsets[index] + skip
            length = min(self._lengths[index] - skip, left)
            views.append(self._view[start : start + length])
            left -= length
            index, skip = index + 1, 0
        return views

    def advance(self, count: int) -> None:
        """Step over `count` bytes, at most those that remain."""
        assert 0 <= count <= self.remaining
        self.remaining -= count
        index, skip = self._index, self._skip + count
        while index < len(self._lengths) and skip >= self._lengths[index]:
            skip -= self._lengths[index]
            index += 1
        self._index, self._skip = index, skip


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
