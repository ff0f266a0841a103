"""Ranges and cursors against the plain reading of what they mean."""

import subprocess
import sys

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtransfer import RangeError, Region, checksum
from kvtransfer.limits import RANGES_MAX
from kvtransfer.memory import FEW_RANGES, Cursor, checked_ranges, copy_into, total_bytes

pytestmark = pytest.mark.unit

SIZE = 300
MEMORY = np.random.default_rng(3).integers(0, 256, SIZE, dtype=np.uint8)

one_range = st.integers(0, SIZE).flatmap(lambda at: st.tuples(st.just(at), st.integers(0, SIZE - at)))
ranges_within = st.one_of(
    st.lists(one_range, max_size=12),
    st.lists(one_range, min_size=FEW_RANGES + 1, max_size=3 * FEW_RANGES),
)


def bytes_of(ranges: list[tuple[int, int]]) -> bytes:
    return b"".join(MEMORY[at : at + length].tobytes() for at, length in ranges)


@settings(max_examples=60, deadline=None)
@given(ranges_within)
def test_checked_ranges_keep_the_bytes_and_join_neighbours(ranges: list[tuple[int, int]]) -> None:
    checked = checked_ranges(ranges, SIZE, "field")
    assert bytes_of(checked.tolist()) == bytes_of(ranges)
    assert total_bytes(checked) == len(bytes_of(ranges))
    assert (checked[:, 1] > 0).all()
    assert not (checked[1:, 0] == checked[:-1, 0] + checked[:-1, 1]).any()


@given(st.lists(st.tuples(st.integers(-(2**63), 2**63 - 1), st.integers(-(2**63), 2**63 - 1)), min_size=1))
def test_ranges_are_refused_exactly_if_one_leaves_the_region(ranges: list[tuple[int, int]]) -> None:
    inside = all(at >= 0 and length >= 0 and at + length <= SIZE for at, length in ranges)
    if inside:
        checked_ranges(ranges, SIZE, "field")
    else:
        with pytest.raises(RangeError, match="field"):
            checked_ranges(ranges, SIZE, "field")


@pytest.mark.parametrize(
    "ranges",
    [[1, 2], [(1, 2, 3)], [(0.0, 1.0)], [("a", "b")], np.array([(2**63 + 5, 1)], np.uint64), [(2**64, 1)]],
)
def test_what_is_no_range_is_refused(ranges: object) -> None:
    with pytest.raises(RangeError, match="field"):
        checked_ranges(ranges, SIZE, "field")


def test_the_number_of_ranges_is_bounded_after_joining() -> None:
    size = 4 * RANGES_MAX
    neighbours = np.stack((np.arange(size), np.ones(size, int)), axis=1)
    assert checked_ranges(neighbours, size, "field").tolist() == [[0, size]]
    apart = neighbours[::2][: RANGES_MAX + 1]
    with pytest.raises(RangeError, match=str(RANGES_MAX)):
        checked_ranges(apart, size, "field")


@settings(max_examples=60, deadline=None)
@given(ranges_within, st.lists(st.tuples(st.integers(1, 50), st.integers(1, 4)), min_size=1))
def test_a_cursor_walks_all_bytes_once_in_order(
    ranges: list[tuple[int, int]], steps: list[tuple[int, int]]
) -> None:
    cursor = Cursor(memoryview(MEMORY), checked_ranges(ranges, SIZE, "field"))
    walked = b""
    number = 0
    while cursor.remaining:
        bytes_max, views_max = steps[number % len(steps)]
        number += 1
        views = cursor.peek(bytes_max, views_max)
        assert 1 <= len(views) <= views_max
        got = b"".join(views)
        assert len(got) <= bytes_max
        part = got[: max(1, len(got) // 2)]  # less may be taken than was offered
        walked += part
        cursor.advance(len(part))
    assert walked == bytes_of(ranges)
    assert cursor.peek(10, 10) == []


@settings(max_examples=60, deadline=None)
@given(ranges_within)
def test_checksum_is_xxh3_128_of_the_bytes_in_order(ranges: list[tuple[int, int]]) -> None:
    assert checksum(Region(1, MEMORY), ranges) == xxhash.xxh3_128_hexdigest(bytes_of(ranges))


def test_copy_into_stops_at_the_shorter_side() -> None:
    targets = [memoryview(bytearray(3)), memoryview(bytearray(4))]
    assert copy_into(targets, memoryview(b"abcde")) == 5
    assert [bytes(target) for target in targets] == [b"abc", b"de\0\0"]
    assert copy_into(targets, memoryview(b"123456789")) == 7


@pytest.mark.parametrize("buffer", [memoryview(b"read only"), bytearray(), np.zeros((4, 4))[:, ::2]])
def test_a_region_is_writable_contiguous_and_not_empty(buffer: object) -> None:
    with pytest.raises(RangeError, match="region"):
        Region(1, buffer)


def test_the_library_imports_neither_torch_nor_verbs() -> None:
    program = (
        "import sys, kvtransfer; print([name for name in sys.modules if name.split('.')[0] in "
        "('torch', 'pyverbs', 'cluster', 'kvpool', 'kvindex', 'policy', 'engine')])"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
