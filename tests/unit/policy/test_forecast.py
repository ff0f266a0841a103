"""The load of a decode over time, against counting it at every instant."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.views import COST, D1, P1, decode, prefill, queued, running, view_of

from policy.core import CostCoefficients, RequestId
from policy.cost import step_s
from policy.forecast import (
    Forecast,
    Stay,
    drains_at_s,
    forecast,
    room_during_blocks,
    stays_of,
    step_peak_s,
)
from policy.predict import Arrival, DecodeLoad, outlook
from policy.view import Booking, with_booking

pytestmark = pytest.mark.unit

PER_SEQUENCE = CostCoefficients(0.0, 1e-3, 0.0, 0.0, 0.01, 0.0, 0.0, 1e9)
"""A step takes 10 ms a sequence: what is predicted counts sequences."""
INSTANCE = decode("d1", free=100, cost=PER_SEQUENCE)


def stay(begins_s: float, ends_s: float, sequences: int = 1, kv_tokens: int = 0, blocks: int = 10) -> Stay:
    return Stay(begins_s, begins_s, ends_s, sequences, kv_tokens, blocks)


def holds(reserves_s: float, ends_s: float, blocks: int = 10) -> Stay:
    return Stay(reserves_s, ends_s, ends_s, 1, 0, blocks)


def seen(present=(), coming=(), pace_s: float = 0.1, instance=INSTANCE) -> Forecast:
    return Forecast(instance, stays_of(present), stays_of(coming), pace_s)


class TestPeak:
    def test_who_ends_before_and_who_comes_after_is_not_met(self):
        known = seen(present=[stay(0, 5), stay(0, 5)], coming=[stay(20, 30)])
        assert step_peak_s(known, stay(6, 15)) == pytest.approx(0.01)
        assert step_peak_s(known, stay(4, 15)) == pytest.approx(0.03)
        assert step_peak_s(known, stay(6, 25)) == pytest.approx(0.02)

    def test_prefills_that_end_together_make_a_surge(self):
        """The note: many prefills done at once; a snapshot of now shows an idle decode."""
        known = seen(coming=[stay(9.5 + i / 10, 60) for i in range(10)])
        assert step_peak_s(known, stay(10, 50)) == pytest.approx(0.11)

    def test_samples_are_sequences(self):
        assert step_peak_s(seen(present=[stay(0, 9, sequences=4)]), stay(1, 5, sequences=2)) == 0.06

    def test_kv_grows_by_a_token_a_step(self):
        per_token = replace(PER_SEQUENCE, step_per_request_s=0.0, step_per_kv_token_s=1e-3)
        known = seen(present=[stay(0, 99, kv_tokens=100)], instance=decode("d1", cost=per_token))
        assert step_peak_s(known, stay(10, 20, kv_tokens=50)) == pytest.approx((100 + 200 + 50 + 100) * 1e-3)


class TestRoom:
    def test_what_ended_by_then_has_given_back_and_what_came_has_taken(self):
        known = seen(present=[stay(0, 5, blocks=30)], coming=[holds(2, 8, 40), holds(3, 4, 7)])
        moments = [holds(at_s, at_s) for at_s in (0, 2, 3, 4, 5, 9)]
        assert [room_during_blocks(known, moment) for moment in moments] == [100, 60, 53, 60, 90, 130]

    def test_what_reserves_meanwhile_was_promised_room(self):
        known = seen(present=[stay(0, 5, blocks=30)], coming=[holds(2, 8, 40), holds(3, 4, 7)])
        ends = [holds(0, ends_s) for ends_s in (2, 3, 3.5, 20)]
        assert [room_during_blocks(known, own) for own in ends] == [100, 60, 53, 53]
        assert room_during_blocks(known, holds(4, 20)) == 60, "until 5; more comes free, nothing is taken"

    def test_blocks_are_taken_before_the_first_token(self):
        """Its prefill takes from 1 to 6, its answer from 6 to 8."""
        known = seen(coming=[Stay(1, 6, 8, 1, 0, 40)])
        assert room_during_blocks(known, holds(0, 5)) == 60
        assert room_during_blocks(known, holds(0, 1)) == 100


class TestDrain:
    def test_the_first_end_after_which_step_and_blocks_fit(self):
        known = seen(present=[stay(0, 5), stay(0, 7), stay(0, 9)])
        joining = stay(1, 2, blocks=110)
        assert drains_at_s(known, joining, tbt_s_max=0.1) == 5, "ten more blocks"
        assert drains_at_s(known, joining, tbt_s_max=0.02) == 7
        assert drains_at_s(known, replace(joining, blocks=125), tbt_s_max=0.1) == 9

    def test_where_it_never_fits_the_last_end(self):
        assert drains_at_s(seen(present=[stay(0, 5)]), stay(0, 1, blocks=1000), 0.1) == 5
        assert drains_at_s(seen(), stay(0, 1), 0.001) == 0.0


class TestOfAnInstance:
    def test_running_ends_when_its_expected_tokens_have_come(self):
        told = replace(running("a"), output_tokens=10, output_tokens_max=64, output_tokens_expected=30)
        known = forecast(decode("d1", told, cost=PER_SEQUENCE), DecodeLoad(2, 100), (), now_s=0.0)
        assert known.pace_s == pytest.approx(0.02)
        assert known.present.ends_s.tolist() == [pytest.approx(20 * 0.02)]

    def test_time_since_the_snapshot_counts(self):
        told = replace(running("a"), output_tokens=10, output_tokens_expected=30)
        instance = decode("d1", told, cost=PER_SEQUENCE, heard_at_s=100.0)
        later = forecast(instance, DecodeLoad(2, 100), (), now_s=100.3)
        assert later.present.ends_s[0] == pytest.approx(0.1)
        assert forecast(instance, DecodeLoad(2, 100), (), now_s=109.0).present.ends_s[0] == 0.0

    def test_arrivals_begin_when_their_prefill_is_done(self):
        known = forecast(INSTANCE, DecodeLoad(1, 0), [Arrival(1.0, 4.0, 160, 2, 100, 12)], now_s=0.0)
        coming = known.coming
        assert coming.reserves_s[0] == 1.0
        assert (coming.begins_s[0], coming.ends_s[0]) == (4.0, pytest.approx(4.0 + 100 * 0.01))
        assert (coming.sequences[0], coming.kv_tokens[0], coming.blocks[0]) == (2, 320, 12)

    def test_who_waits_reserves_when_its_prefill_begins(self):
        """A thousand tokens take 1.015 s; what was booked 3 s from when the snapshot came finds nobody."""
        booking = Booking(RequestId("c"), 1, P1, D1, 1000, 0, booked_at_s=3.0, blocks=64)
        view = view_of(prefill("p1", queued("a", 1000), queued("b", 1000)), decode("d1"))
        arrivals = outlook(with_booking(view, booking), 0.5).arrivals(D1)
        assert [(each.reserves_s, each.at_s) for each in arrivals] == [
            (0.0, pytest.approx(0.515)),
            (pytest.approx(0.515), pytest.approx(1.53)),
            (2.5, pytest.approx(3.515)),
        ]


TIMES = st.integers(0, 20).map(float)


@given(st.lists(st.tuples(TIMES, TIMES, st.integers(1, 3), st.integers(0, 50)), max_size=8), TIMES, TIMES)
def test_the_peak_is_what_counting_every_instant_finds(drawn, begins_s, stays_s):
    others = [stay(at, at + length, n, kv) for at, length, n, kv in drawn]
    own = stay(begins_s, begins_s + stays_s, kv_tokens=5)
    known = seen(present=others, pace_s=0.5, instance=decode("d1", cost=COST))
    peak_s = step_peak_s(known, own)
    grid = [own.begins_s + tick * 0.25 for tick in range(int(stays_s / 0.25) + 1)]
    for at_s in grid:
        there = [own, *(other for other in others if other.begins_s <= at_s < other.ends_s)]
        kv_tokens = sum(other.kv_tokens + other.sequences * (at_s - other.begins_s) / 0.5 for other in there)
        assert step_s(COST, sum(other.sequences for other in there), int(kv_tokens)) <= peak_s + 1e-6
    everybody = [own, *others]
    bound = sum(other.kv_tokens + other.sequences * 80 for other in everybody)
    assert peak_s <= step_s(COST, sum(other.sequences for other in everybody), bound)


SPANS = st.tuples(TIMES, TIMES, st.integers(1, 40)).map(
    lambda drawn: holds(drawn[0], sum(drawn[:2]), drawn[2])
)


@given(st.lists(SPANS, max_size=8), st.lists(SPANS, max_size=8), SPANS)
def test_with_the_room_that_is_found_all_of_them_fit_at_every_instant(running, coming, own):
    """And with one block more they would not."""
    present = [replace(span, reserves_s=0.0) for span in running]
    room_blocks = room_during_blocks(seen(present, coming), own)
    blocks = INSTANCE.free_blocks + sum(span.blocks for span in present)
    instants = range(int(own.reserves_s), max(int(own.reserves_s) + 1, int(own.ends_s)))
    held_blocks = [
        sum(span.blocks for span in (*present, *coming) if span.reserves_s <= at_s < span.ends_s)
        for at_s in instants
    ]
    assert max(held_blocks) + room_blocks == blocks
