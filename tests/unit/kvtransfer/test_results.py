"""Which of a caller's ranges landed, from the stretches that a transport knows of."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.results import landed_ranges

pytestmark = pytest.mark.unit


@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(0, 6)), max_size=8),
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 12)), max_size=5),
)
def test_a_range_landed_if_each_of_its_bytes_did(
    ranges: list[tuple[int, int]], landed: list[tuple[int, int]]
) -> None:
    bytes_landed = {at for start, count in landed for at in range(start, start + count)}
    expected, start = [], 0
    for _, length in ranges:
        expected.append(bytes_landed.issuperset(range(start, start + length)))
        start += length
    assert landed_ranges(ranges, landed).tolist() == expected


def test_empty_ranges() -> None:
    assert landed_ranges([], ()).shape == (0,)
    assert landed_ranges(np.array([(5, 0), (5, 1)]), ()).tolist() == [True, False]
