"""Where slots lie: the capacity is used and never exceeded, and slot numbers outlive another capacity."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kvpool.ssd_format import SUPERBLOCK_BYTES
from kvpool.ssd_layout import SEGMENTS_MAX, SsdLayout, SsdLayoutError, file_bytes

pytestmark = pytest.mark.unit


def taken_bytes(layout: SsdLayout) -> int:
    return SUPERBLOCK_BYTES + sum(
        file_bytes(slots, layout.block_bytes) for slots in layout.slots_of_segments()
    )


@given(st.integers(500_000, 10_000_000), st.integers(1, 400_000), st.integers(410_000, 5_000_000))
def test_it_has_as_many_slots_as_fit(capacity_bytes, block_bytes, segment_bytes):
    smallest = file_bytes(1, block_bytes)
    assume(segment_bytes >= smallest and capacity_bytes >= SUPERBLOCK_BYTES + smallest)
    assume(capacity_bytes < SEGMENTS_MAX * segment_bytes // 2)
    layout = SsdLayout.planned(capacity_bytes, block_bytes, segment_bytes)
    assert sum(layout.slots_of_segments()) == layout.slots >= 1
    assert taken_bytes(layout) <= capacity_bytes
    assert len(layout.slots_of_segments()) <= SEGMENTS_MAX
    for slots in layout.slots_of_segments():
        assert file_bytes(slots, block_bytes) <= segment_bytes
    # One more slot would need a slot, and a page of records at most.
    more = layout.slot_bytes + 4096
    assert capacity_bytes - taken_bytes(layout) < more


@given(
    st.integers(1, 50_000),
    st.integers(100_000, 1_000_000),
    st.integers(0, 3_000_000),
    st.integers(0, 3_000_000),
)
def test_a_slot_lies_at_the_same_place_whatever_the_capacity(block_bytes, segment_bytes, one, other):
    small, large = (
        SsdLayout.planned(200_000 + extra, block_bytes, segment_bytes) for extra in sorted((one, other))
    )
    assert [small.place(slot) for slot in range(small.slots)] == [
        large.place(slot) for slot in range(small.slots)
    ]
    assert small.slots <= large.slots


def test_places_are_all_different_and_within_their_segments():
    layout = SsdLayout.planned(1_000_000, 5000, 100_000)
    places = [layout.place(slot) for slot in range(layout.slots)]
    assert places == [
        (segment, number)
        for segment, slots in enumerate(layout.slots_of_segments())
        for number in range(slots)
    ]
    assert layout.slot_bytes == 8192


@pytest.mark.parametrize(
    ("capacity_bytes", "block_bytes", "segment_bytes", "message"),
    [
        (1 << 20, 0, 1 << 20, "block_bytes: 0, at least 1"),
        (1 << 20, 8192, 12287, "segment_bytes: 12287, at least 12288: one block, its record"),
        (20479, 8192, 1 << 20, "capacity_bytes: 20479, at least 20480: one block of 8192 bytes, its record"),
        (-1, 8192, 1 << 20, "capacity_bytes: -1, at least 20480"),
        (4 << 20, 4096, 8192, "capacity_bytes: 4194304, more than 256 segments; segment_bytes is 8192"),
    ],
)
def test_numbers_that_make_no_store_are_refused(capacity_bytes, block_bytes, segment_bytes, message):
    with pytest.raises(SsdLayoutError, match=message):
        SsdLayout.planned(capacity_bytes, block_bytes, segment_bytes)


def test_the_smallest_store_has_one_slot():
    assert SsdLayout.planned(20480, 8192, 1 << 20).slots == 1
