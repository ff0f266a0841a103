"""The walk over both sides' memory: every range once, no neighbours, and digests that see a mistake."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonpool.benchmarks.transfer_plan import ROWS, Row, Side, Walk, answer, digest, fill, percentile

pytestmark = pytest.mark.unit

ROW = Row(3, 4096)
MEMORY_BYTES = 16 * 4096


def test_names_tell_how_many_ranges_of_which_size() -> None:
    assert [row.name for row in ROWS] == [
        "4KiB",
        "64KiB",
        "1MiB",
        "16MiB",
        "64x64KiB",
        "1024x64KiB",
        "64x1MiB",
        "256x360KiB",
    ]


@given(slots=st.integers(1, 200), ranges=st.integers(1, 8))
def test_a_walk_meets_every_range_once_on_both_sides(slots: int, ranges: int) -> None:
    if slots < ranges:
        with pytest.raises(ValueError, match="do not hold"):
            Walk(Row(ranges, 512), slots * 512)
        return
    walk = Walk(Row(1, 512), slots * 512)
    for side in Side:
        assert sorted(walk.stretch(side, 0, slots).tolist()) == [512 * slot for slot in range(slots)]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_no_range_follows_its_neighbour(row: Row) -> None:
    """Over two rounds of the whole memory; where there is one range in a call neighbours do not matter."""
    walk = Walk(row)
    for side in Side:
        offsets = walk.stretch(side, 0, 2 * (256 << 20) // row.call_bytes)
        assert row.ranges == 1 or not (np.abs(np.diff(offsets)) == row.range_bytes).any()


def test_the_same_range_of_the_caller_always_meets_the_same_of_the_owner() -> None:
    walk = Walk(ROW, MEMORY_BYTES)
    met: dict[int, int] = {}
    for call in range(40):
        for caller, owner in zip(*(walk.offsets(side, call).tolist() for side in Side), strict=True):
            assert met.setdefault(caller, owner) == owner
    assert len(set(met.values())) == 16


def test_a_digest_sees_ranges_that_are_exchanged_or_missing() -> None:
    memory = np.zeros(MEMORY_BYTES, np.uint8)
    offsets = Walk(ROW, MEMORY_BYTES).stretch(Side.CALLER, 0, 2)
    fill(memory, offsets, ROW.range_bytes)
    whole = digest(memory, offsets, ROW.range_bytes)
    first, second = (memory[offset : offset + ROW.range_bytes] for offset in offsets[:2].tolist())
    assert (first != second).any()
    kept = first.copy()
    first[:], second[:] = second.copy(), kept
    assert digest(memory, offsets, ROW.range_bytes) != whole
    second[:] = 0
    assert digest(memory, offsets, ROW.range_bytes) != whole


def test_a_side_answers_about_the_ranges_of_some_calls() -> None:
    memory = np.zeros(MEMORY_BYTES, np.uint8)
    about = {"row": [3, 4096], "side": "owner", "first": 2, "calls": 1}
    assert answer(memory, {"do": "fill", **about}) == {}
    assert np.count_nonzero(memory) == 3 * 4096
    filled = answer(memory, {"do": "digest", **about})
    answer(memory, {"do": "clear", **about})
    assert not memory.any()
    assert answer(memory, {"do": "digest", **about}) != filled
    with pytest.raises(ValueError, match="unknown question"):
        answer(memory, {"do": "dance", **about})


def test_percentiles_are_values_that_were_seen() -> None:
    values = list(range(100, 0, -1))
    assert (percentile(values, 0.5), percentile(values, 0.99)) == (50, 99)
    assert (percentile([7.0], 0.5), percentile([7.0], 0.99)) == (7.0, 7.0)
    assert percentile([1.0, 2.0, 3.0, 4.0], 0.99) == 4.0
