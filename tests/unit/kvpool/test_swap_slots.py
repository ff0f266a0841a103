import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool import SwapSlots

pytestmark = pytest.mark.unit


@given(slots=st.integers(0, 8), moves=st.lists(st.tuples(st.booleans(), st.integers(0, 8)), max_size=30))
def test_no_slot_is_given_twice_and_none_is_lost(slots: int, moves: list[tuple[bool, int]]) -> None:
    space = SwapSlots(slots)
    held: list[list[int]] = []
    for takes, number in moves:
        if takes and number <= space.free:
            held.append(space.take(number))
        elif held:
            space.give_back(held.pop(number % len(held)))
        taken = [slot for run in held for slot in run]
        assert len(set(taken)) == len(taken)
        assert space.free == slots - len(taken)
        space.check_integrity()


def test_more_than_there_are_and_what_nobody_took_are_refused() -> None:
    space = SwapSlots(2)
    with pytest.raises(AssertionError, match="3 slots"):
        space.take(3)
    with pytest.raises(AssertionError, match="slot 1"):
        space.give_back([1])
    with pytest.raises(ValueError, match="slots: -1"):
        SwapSlots(-1)
