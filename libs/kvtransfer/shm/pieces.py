"""Turns two lists of ranges that hold the same bytes into pieces to copy. Pure.

Owns the walk over two differently cut lists, and cutting the pieces into chunks. A call of one range on
each side, which is the one that is short, goes without arrays.
"""

from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvtransfer.memory import Ranges, offsets_at

Piece = Sequence[int]
"""Address to copy to, address to copy from, count in bytes (> 0)."""

Chunk = tuple[int, int, int]
"""First piece, end, and bytes of it."""

_Table = npt.NDArray[np.int64]


class Pieces(Protocol):
    """In the order of the bytes; none is larger than the `piece_max` that they were made with."""

    def __len__(self) -> int: ...

    @property
    def mean_bytes(self) -> float: ...

    def chunks(self, chunk_bytes: int, pieces_max: int) -> Iterator[Chunk]:
        """At most `chunk_bytes` and `pieces_max` pieces in each, at least one."""
        ...

    def listed(self, first: int, end: int) -> list[Piece]: ...

    def iovecs(self) -> tuple[_Table, _Table]:
        """Where to and where from, as arrays of struct iovec: address and length."""
        ...


def merged(target: Ranges, target_base: int, source: Ranges, source_base: int, piece_max: int) -> Pieces:
    """Both lists have the same total and no empty range; the bases are the addresses of their offset 0."""
    if len(target) == 1 and len(source) == 1:
        to, count = target[0].tolist()
        return _OnePiece(target_base + to, source_base + int(source[0, 0]), count, piece_max)
    if len(target) == len(source) and bool((target[:, 1] == source[:, 1]).all()):
        table = np.stack((target[:, 0] + target_base, source[:, 0] + source_base, target[:, 1]), axis=1)
    else:
        table = _walked(target, target_base, source, source_base)
    if len(table) and int(table[:, 2].max()) > piece_max:
        table = _split(table, piece_max)
    return _ManyPieces(table)


class _OnePiece:
    """One stretch, cut into pieces of `piece_max`."""

    __slots__ = ("_count", "_piece_max", "_source", "_to")

    def __init__(self, to: int, source: int, count: int, piece_max: int) -> None:
        self._to, self._source, self._count, self._piece_max = to, source, count, piece_max

    def __len__(self) -> int:
        return -(-self._count // self._piece_max)

    @property
    def mean_bytes(self) -> float:
        return self._count / len(self)

    def chunks(self, chunk_bytes: int, pieces_max: int) -> Iterator[Chunk]:
        for number in range(len(self)):
            yield number, number + 1, min(self._piece_max, self._count - number * self._piece_max)

    def listed(self, first: int, end: int) -> list[Piece]:
        at, stop = first * self._piece_max, min(end * self._piece_max, self._count)
        # Pieces that follow each other are one here.
        return [(self._to + at, self._source + at, stop - at)]

    def iovecs(self) -> tuple[_Table, _Table]:
        pieces = [piece for number in range(len(self)) for piece in self.listed(number, number + 1)]
        table = np.array(pieces, np.int64).reshape(-1, 3)
        return _iovecs(table)


class _ManyPieces:
    __slots__ = ("_table",)

    def __init__(self, table: _Table) -> None:
        self._table = table

    def __len__(self) -> int:
        return len(self._table)

    @property
    def mean_bytes(self) -> float:
        return float(self._table[:, 2].mean())

    def chunks(self, chunk_bytes: int, pieces_max: int) -> Iterator[Chunk]:
        ends = np.cumsum(self._table[:, 2])
        first = done = 0
        while first < len(ends):
            fits = int(np.searchsorted(ends, done + chunk_bytes, side="right"))
            end = min(max(fits, first + 1), first + pieces_max)
            reached = int(ends[end - 1])
            yield first, end, reached - done
            first, done = end, reached

    def listed(self, first: int, end: int) -> list[Piece]:
        pieces: list[Piece] = self._table[first:end].tolist()
        return pieces

    def iovecs(self) -> tuple[_Table, _Table]:
        return _iovecs(self._table)


def _iovecs(table: _Table) -> tuple[_Table, _Table]:
    return np.ascontiguousarray(table[:, (0, 2)]), np.ascontiguousarray(table[:, (1, 2)])


def _walked(target: Ranges, target_base: int, source: Ranges, source_base: int) -> _Table:
    """Cut wherever either list has a border."""
    target_ends, source_ends = np.cumsum(target[:, 1]), np.cumsum(source[:, 1])
    ends = np.union1d(target_ends, source_ends)
    begins = np.concatenate((np.zeros(1, np.int64), ends[:-1]))
    return np.stack(
        (
            offsets_at(target, target_ends, begins) + target_base,
            offsets_at(source, source_ends, begins) + source_base,
            ends - begins,
        ),
        axis=1,
    )


def _split(table: _Table, piece_max: int) -> _Table:
    """Cut pieces that are larger than `piece_max`."""
    counts = -(-table[:, 2] // piece_max)
    owner = np.repeat(np.arange(len(table)), counts)
    number = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
    skipped = number * piece_max
    left = np.minimum(table[owner, 2] - skipped, piece_max)
    return np.stack((table[owner, 0] + skipped, table[owner, 1] + skipped, left), axis=1)
