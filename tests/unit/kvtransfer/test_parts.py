"""Calls cut into parts: the parts are the call, byte for byte."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer import Region
from kvtransfer.memory import checked_ranges, total_bytes
from kvtransfer.parts import cut, sliced
from kvtransfer.transport import Call, LocalMemory

pytestmark = pytest.mark.unit

SIZE = 400
REGION = Region(1, bytearray(SIZE))
ranges_within = st.lists(
    st.integers(0, SIZE).flatmap(lambda at: st.tuples(st.just(at), st.integers(0, SIZE - at))), max_size=25
).map(lambda ranges: checked_ranges(ranges, SIZE, "ranges"))


def places(ranges: np.ndarray) -> list[int]:
    return [place for at, length in ranges.tolist() for place in range(at, at + length)]


@given(ranges_within, st.data())
def test_a_slice_holds_the_bytes_in_their_order(ranges: np.ndarray, data: st.DataObject) -> None:
    total = total_bytes(ranges)
    start = data.draw(st.integers(0, total))
    count = data.draw(st.integers(0, total - start))
    found = sliced(ranges, start, count)
    assert places(found) == places(ranges)[start : start + count]
    assert (found[:, 1] > 0).all()


@given(ranges_within, st.integers(1, 9), st.booleans())
def test_parts_are_the_call_and_nearly_equal(ranges: np.ndarray, number: int, verify: bool) -> None:
    total = total_bytes(ranges)
    remote = np.array([(0, total)] if total else np.empty((0, 2)), np.int64)
    call = Call(LocalMemory(REGION, ranges, total), "token", remote, tag=b"tag", verify=verify)
    parts = cut(call, number)
    assert len(parts) == (number if total >= number else 1)
    assert places(np.concatenate([part.call.memory.ranges for part in parts])) == places(ranges)
    assert places(np.concatenate([part.call.remote for part in parts])) == list(range(total))
    sizes = [part.call.memory.payload_bytes for part in parts]
    assert [part.start for part in parts] == [sum(sizes[:index]) for index in range(len(sizes))]
    assert max(sizes) - min(sizes) <= 1
    assert all(part.call.verify is verify for part in parts)
    # The tag of a call in several parts follows when all have landed.
    assert [part.call.tag for part in parts] == ([b"tag"] if len(parts) == 1 else [b""] * len(parts))
