"""Turns two lists of ranges that hold the same bytes into pieces to copy. Pure.

Owns the walk over two differently cut lists, and cutting the pieces into chunks.
"""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from kvtransfer.memory import Ranges

Pieces = npt.NDArray[np.int64]
"""[n, 3]: address to copy to, address to copy from, count in bytes (> 0)."""


def merged(target: Ranges, target_base: int, source: Ranges, source_base: int, piece_max: int) -> Pieces:
    """The pieces in the order of the bytes, each of at most `piece_max`.

    Both lists have the same total and no empty range.
    """
    if len(target) == 1 and len(source) == 1:
        to, count = target[0].tolist()
        pieces = np.array([(target_base + to, source_base + int(source[0, 0]), count)], np.int64)
    elif len(target) == len(source) and bool((target[:, 1] == source[:, 1]).all()):
        pieces = np.stack((target[:, 0] + target_base, source[:, 0] + source_base, target[:, 1]), axis=1)
    else:
        pieces = _walked(target, target_base, source, source_base)
    return _split(pieces, piece_max) if len(pieces) and int(pieces[:, 2].max()) > piece_max else pieces


def chunk_bounds(pieces: Pieces, chunk_bytes: int, pieces_max: int) -> Iterator[tuple[int, int, int]]:
    """(first, end, bytes) of each chunk: at most `chunk_bytes` and `pieces_max` pieces, at least one."""
    if len(pieces) == 1:
        yield 0, 1, int(pieces[0, 2])
        return
    ends = np.cumsum(pieces[:, 2])
    first = done = 0
    while first < len(pieces):
        fits = int(np.searchsorted(ends, done + chunk_bytes, side="right"))
        end = min(max(fits, first + 1), first + pieces_max)
        reached = int(ends[end - 1])
        yield first, end, reached - done
        first, done = end, reached


def _walked(target: Ranges, target_base: int, source: Ranges, source_base: int) -> Pieces:
    """Cut wherever either list has a border."""
    target_ends, source_ends = np.cumsum(target[:, 1]), np.cumsum(source[:, 1])
    ends = np.union1d(target_ends, source_ends)
    begins = np.concatenate((np.zeros(1, np.int64), ends[:-1]))
    return np.stack(
        (
            _addresses(target, target_ends, begins) + target_base,
            _addresses(source, source_ends, begins) + source_base,
            ends - begins,
        ),
        axis=1,
    )


def _addresses(
    ranges: Ranges, ends: npt.NDArray[np.int64], begins: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """Where in `ranges` the bytes numbered `begins` are; `ends` are the sums of the ranges' lengths."""
    at = np.searchsorted(ends, begins, side="right")
    addresses: npt.NDArray[np.int64] = ranges[at, 0] + (begins - (ends[at] - ranges[at, 1]))
    return addresses


def _split(pieces: Pieces, piece_max: int) -> Pieces:
    """Cut pieces that are larger than `piece_max`."""
    counts = -(-pieces[:, 2] // piece_max)
    owner = np.repeat(np.arange(len(pieces)), counts)
    number = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
    skipped = number * piece_max
    left = pieces[owner, 2] - skipped
    return np.stack(
        (pieces[owner, 0] + skipped, pieces[owner, 1] + skipped, np.minimum(left, piece_max)), axis=1
    )
