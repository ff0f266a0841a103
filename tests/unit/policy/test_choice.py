from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.views import D1, P1

from policy.choice import DECISION_LAG_S, UNHEARD_MAX, turn_of
from policy.columns import Floats, Ints
from policy.core import RequestId
from policy.nearest import in_turn
from policy.view import Booking, ClusterView

pytestmark = pytest.mark.unit


def heard(count: int, *, elsewhere: bool = True, at_s: float = 1.0) -> ClusterView:
    bookings = (
        Booking(RequestId(f"b{i}"), 1, P1, D1, 100, 0, at_s, 8, elsewhere=elsewhere) for i in range(count)
    )
    return ClusterView({}, {booking.request_id: booking for booking in bookings})


class TestTurn:
    def test_of_as_many_as_were_heard_of_lately(self):
        turns = {turn_of(RequestId(f"r{i}"), heard(3), 1.0) for i in range(100)}
        assert turns == {0, 1, 2, 3}
        assert turn_of(RequestId("r"), heard(3), 1.0) == turn_of(RequestId("r"), heard(3), 1.0)

    @pytest.mark.parametrize(
        "view",
        [ClusterView(), heard(9, elsewhere=False), heard(9, at_s=1.0 - 1.01 * DECISION_LAG_S)],
    )
    def test_none_where_nobody_else_decides(self, view):
        assert {turn_of(RequestId(f"r{i}"), view, 1.0) for i in range(50)} == {0}

    def test_bounded(self):
        assert max(turn_of(RequestId(f"r{i}"), heard(500), 1.0) for i in range(500)) == UNHEARD_MAX


@dataclass(frozen=True)
class Queues:
    """Candidates that are nothing but a length."""

    names: Sequence[str]
    lengths: Floats

    def take(self, places: Ints) -> "Queues":
        return Queues([self.names[place] for place in places], self.lengths[places])

    def taken(self, place: int) -> "Queues":
        lengths = self.lengths.copy()
        lengths[place] += 1
        return Queues(self.names, lengths)


def least(turn: int, queues: Sequence[tuple[str, int]], target_s: float = inf) -> str:
    candidates = Queues([name for name, _ in queues], np.array([length for _, length in queues], np.float64))
    place = in_turn(
        candidates, turn, lambda left: int(left.lengths.argmin()), lambda left: left.lengths, target_s
    )
    return candidates.names[place]


class TestInTurn:
    def test_each_turn_gets_the_next_place(self):
        queues = [("a", 0), ("b", 2), ("c", 1)]
        won = [least(turn, queues) for turn in range(6)]
        assert won == ["a", "a", "c", "a", "b", "c"]

    def test_nobody_is_sent_where_the_target_is_missed_for_others_that_may_not_be_there(self):
        queues = [("a", 0), ("b", 2), ("c", 1)]
        assert {least(turn, queues, target_s=1.0) for turn in range(6)} == {"a", "c"}

    @given(st.lists(st.integers(0, 6), min_size=1, max_size=60), st.integers(0, UNHEARD_MAX))
    def test_all_turns_together_fill_what_is_low_to_one_level(self, lengths, turns):
        queues = [(f"q{i}", length) for i, length in enumerate(lengths)]
        got = Counter(least(turn, queues) for turn in range(turns))
        levels = {name: length + got[name] for name, length in queues}
        for name, length in queues:
            assert not got[name] or levels[name] <= min(levels.values()) + 1
            assert levels[name] >= length


def test_a_booking_is_the_same_wherever_it_was_decided():
    (booking,) = heard(1).bookings.values()
    assert booking == replace(booking, elsewhere=False)
