"""The walk over two lists of ranges that are cut differently."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.memory import Ranges
from kvtransfer.shm.pieces import Pieces, merged

pytestmark = pytest.mark.unit

TO, FROM = 1 << 40, 1 << 41


@st.composite
def cut(draw: st.DrawFn, total: int) -> Ranges:
    """Ranges of `total` bytes in any order and with any gaps."""
    borders = sorted(draw(st.sets(st.integers(1, total - 1), max_size=12))) if total > 1 else []
    lengths = np.diff([0, *borders, total])
    offsets = [draw(st.integers(0, 1000)) for _ in lengths]
    return np.array(list(zip(offsets, lengths.tolist(), strict=True)), np.int64)


@st.composite
def two_lists(draw: st.DrawFn) -> tuple[Ranges, Ranges]:
    total = draw(st.integers(1, 300))
    return draw(cut(total)), draw(cut(total))


def bytes_of(ranges: Ranges, base: int) -> list[int]:
    """The address of each byte, one by one."""
    return [base + offset + at for offset, length in ranges.tolist() for at in range(length)]


def moved(pieces: Pieces, chunk_bytes: int, pieces_max: int) -> list[tuple[int, int]]:
    """(to, from) of each byte, as the chunks have them; checks the chunks on the way."""
    found, ended = [], 0
    for first, end, count in pieces.chunks(chunk_bytes, pieces_max):
        assert first == ended < end <= first + pieces_max
        listed = pieces.listed(first, end)
        assert sum(length for _, _, length in listed) == count
        assert count <= chunk_bytes or end == first + 1
        found += [(to + at, source + at) for to, source, length in listed for at in range(length)]
        ended = end
    assert ended == len(pieces)
    return found


@given(two_lists(), st.integers(1, 100), st.integers(1, 200), st.integers(1, 9))
def test_every_byte_goes_where_the_two_lists_say(lists, piece_max, chunk_bytes, pieces_max):
    target, source = lists
    pieces = merged(target, TO, source, FROM, piece_max)
    expected = list(zip(bytes_of(target, TO), bytes_of(source, FROM), strict=True))
    assert moved(pieces, chunk_bytes, pieces_max) == expected


@given(two_lists(), st.integers(1, 100))
def test_iovecs_are_the_same_pieces(lists, piece_max):
    target, source = lists
    pieces = merged(target, TO, source, FROM, piece_max)
    to, origin = pieces.iovecs()
    assert to.flags.c_contiguous
    assert origin.flags.c_contiguous
    one_by_one = [
        tuple(piece) for number in range(len(pieces)) for piece in pieces.listed(number, number + 1)
    ]
    assert [(a, b, n) for (a, n), (b, _) in zip(to.tolist(), origin.tolist(), strict=True)] == one_by_one
    assert to[:, 1].max() <= piece_max
    assert pieces.mean_bytes == pytest.approx(to[:, 1].mean())


def test_lists_cut_alike_are_not_cut_further():
    ranges = np.array([(0, 10), (50, 20)], np.int64)
    pieces = merged(ranges, TO, ranges, FROM, 100)
    assert [tuple(piece) for piece in pieces.listed(0, 2)] == [(TO, FROM, 10), (TO + 50, FROM + 50, 20)]
