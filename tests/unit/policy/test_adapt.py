"""Limits that tune themselves: bounded, still when nothing presses, back when it ceases to."""

from dataclasses import replace
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.views import decode, prefill, queued, request, view_of

from policy.adapt import (
    CLIMB_ANSWERED_MIN,
    CLIMB_FACTOR,
    CLIMB_SETTLE_S,
    CLIMB_STEPS_MAX,
    COMPUTE_WEIGHT_ADDED_MAX,
    HELD_BACK_MAX,
    MISSED_SHARE,
    NO_PRICE,
    PRESSURE_HIGH,
    PRESSURE_LOW,
    WORK_PRICE_MAX,
    Adaptation,
    Outcomes,
    asked,
    observed,
    pressed,
    pressure,
    tuned,
)
from policy.admit import WORK_FREE_SHARE
from policy.choice import AdmissionMode, PlacementLimits
from policy.core import Placement, Rejection, RejectReason
from policy.place import place
from policy.view import ClusterView

pytestmark = pytest.mark.unit

LIMITS = PlacementLimits(adaptive=True, ttft_ms_default=10_000.0)
TARGET_S = 10.0
SENSELESS_MS = (5e-324, 1e-12, 1e308)
"""The first is no time at all in seconds; of the last and it there is no quotient."""


def waiting(queue_s: float, *more_s: float, heard_at_s: float = 0.0) -> ClusterView:
    """Prefills with so much queued each, a thousand tokens taking a second."""
    prefills = [
        prefill(f"p{n}", *([queued(f"q{n}", int(1000 * s))] if s else []), heard_at_s=heard_at_s)
        for n, s in enumerate((queue_s, *more_s))
    ]
    return view_of(*prefills, decode("d1", heard_at_s=heard_at_s))


def after(adaptation: Adaptation, queue_s: float, seconds: float, from_s: float) -> Adaptation:
    """The same queue for so long, looked at once a second."""
    for tick in range(1 + round(seconds)):
        now_s = from_s + tick
        adaptation = pressed(adaptation, waiting(queue_s, heard_at_s=now_s), now_s)
    return adaptation


START = asked(Adaptation(), None, LIMITS)
PRICED = replace(START, work_price=50.0)


class TestPressure:
    def test_the_mean_queue_of_those_that_prefill(self):
        assert pressure(waiting(0.0), TARGET_S, 0.0) == 0.0
        assert pressure(waiting(4.0, 0.0), TARGET_S, 0.0) == pytest.approx(0.2, rel=0.1)
        assert pressure(waiting(4.0, 0.0), TARGET_S, 2.0) == pytest.approx(0.1, rel=0.1)
        assert pressure(view_of(decode("d1")), TARGET_S, 0.0) == 0.0

    def test_long_queues_raise_the_price_and_short_ones_lower_it(self):
        high = after(START, 1.2 * PRESSURE_HIGH * TARGET_S, 60.0, 0.0)
        assert high.work_price > 2.0
        assert after(high, 0.5 * (PRESSURE_HIGH + PRESSURE_LOW) * TARGET_S, 60.0, 60.0) == replace(
            high, pressed_at_s=120.0
        )
        assert after(high, 0.0, 600.0, 60.0).work_price == NO_PRICE

    def test_nothing_before_a_target_is_known(self):
        without = replace(LIMITS, ttft_ms_default=None)
        for ttft_ms in (None, inf, 0.0, -5.0, *SENSELESS_MS):
            unknown = asked(Adaptation(), ttft_ms, without)
            assert after(unknown, 1000.0, 60.0, 0.0) == Adaptation()

    def test_the_cluster_s_target_goes_before_a_client_s(self):
        assert asked(START, 1.0, LIMITS) == START
        without = replace(LIMITS, ttft_ms_default=None)
        learned = asked(Adaptation(), 10_000.0, without)
        assert learned.target_s == 10.0
        one_more = asked(learned, 1.0, without).target_s
        assert one_more is not None
        assert 8.0 < one_more < 10.0

    @pytest.mark.parametrize("ttft_ms", SENSELESS_MS)
    def test_a_target_that_makes_no_sense_spoils_nobody_s(self, ttft_ms: float):
        """All others are divided by it: so they never could be asked for again."""
        without = replace(LIMITS, ttft_ms_default=None)
        learned = asked(Adaptation(), 10_000.0, without)
        assert asked(learned, ttft_ms, without) == learned

    def test_a_long_silence_is_no_long_pressure(self):
        seen = pressed(replace(START, pressed_at_s=0.0), waiting(100.0, heard_at_s=5000.0), 5000.0)
        assert 1.0 < seen.work_price < 2.0

    def test_a_silence_with_short_queues_behind_it_ends_the_pressure(self):
        """Nobody asks in it, as everybody was refused: what comes next must not pay for the burst."""
        burst = replace(START, work_price=WORK_PRICE_MAX, held_back=HELD_BACK_MAX, pressed_at_s=0.0)
        seen = pressed(burst, waiting(0.0, heard_at_s=300.0), 300.0)
        assert seen.work_price == NO_PRICE
        assert seen.held_back < HELD_BACK_MAX / 100


class TestMargin:
    def test_about_the_tolerated_share_keeps_it_where_it_is(self):
        adaptation = replace(START, held_back=0.05)
        for number in range(1000):
            late = number % round(1 / MISSED_SHARE) == 0
            adaptation = observed(adaptation, Outcomes(in_targets=not late, missed=late), 0.0)
        assert adaptation.held_back == pytest.approx(0.05, abs=0.005)

    def test_more_misses_hold_back_and_none_gives_back(self):
        missing = START
        for _ in range(1000):
            missing = observed(missing, Outcomes(in_targets=9, missed=1), 0.0)
        assert missing.held_back == HELD_BACK_MAX
        assert observed(missing, Outcomes(rejected=1000), 0.0).held_back == HELD_BACK_MAX
        assert observed(missing, Outcomes(in_targets=10_000), 0.0).held_back == 0.0


class Hill:
    """A cluster that serves best at one threshold."""

    def __init__(self, best_steps: int, loss_a_step: float) -> None:
        self.best_steps, self.loss_a_step = best_steps, loss_a_step
        self.adaptation, self.now_s = START, 0.0

    def run(self, slots: int) -> list[int]:
        stood = []
        for _ in range(slots):
            stood.append(self.adaptation.balancing.steps)
            self.now_s += CLIMB_SETTLE_S
            steps_off = abs(stood[-1] - self.best_steps)
            met = round(CLIMB_ANSWERED_MIN * (0.9 - self.loss_a_step * steps_off))
            outcomes = Outcomes(in_targets=met, rejected=CLIMB_ANSWERED_MIN - met)
            self.adaptation = observed(self.adaptation, outcomes, self.now_s)
        return stood


class TestThreshold:
    @pytest.mark.parametrize("best_steps", [-3, -1, 0, 2, 3])
    def test_climbs_to_where_most_is_served_and_stays_about_there(self, best_steps: int):
        stood = Hill(best_steps, 0.1).run(90)[30:]
        assert max(abs(steps - best_steps) for steps in stood) <= 1
        assert stood.count(best_steps) >= 0.8 * len(stood)

    def test_no_difference_leads_nowhere(self):
        stood = Hill(0, 0.0).run(100)
        assert set(stood) == {-1, 0, 1}
        assert stood[40:].count(0) >= 50

    def test_nothing_is_tried_while_all_is_well(self):
        adaptation = START
        for number in range(100):
            adaptation = observed(adaptation, Outcomes(in_targets=400, rejected=2), number * 40.0)
        assert adaptation.balancing.steps == 0


def test_what_is_fixed_stays():
    fixed = replace(LIMITS, adaptive=False)
    pressing = replace(PRICED, held_back=0.1)
    assert tuned(fixed, pressing) == fixed
    assert tuned(LIMITS, pressing) != LIMITS
    assert tuned(LIMITS, START) == LIMITS


EVENTS = st.one_of(
    st.tuples(st.just("press"), st.floats(0, 1e4), st.floats(0, 100)),
    st.tuples(st.just("answer"), st.tuples(*[st.integers(0, 500)] * 3), st.floats(0, 100)),
    st.tuples(st.just("ask"), st.one_of(st.none(), st.floats(0, 1e9)), st.floats(0, 100)),
)


@settings(max_examples=30, deadline=None)
@given(st.lists(EVENTS, max_size=60), st.booleans())
def test_whatever_happens_limits_stay_within_bounds(events, named: bool):
    base = replace(LIMITS, ttft_ms_default=10_000.0 if named else None)
    adaptation, now_s = Adaptation(), 0.0
    for kind, value, passed_s in events:
        now_s += passed_s
        match kind:
            case "press":
                adaptation = pressed(adaptation, waiting(value, heard_at_s=now_s), now_s)
            case "answer":
                adaptation = observed(adaptation, Outcomes(*value), now_s)
            case _:
                adaptation = asked(adaptation, value, base)
    found = tuned(base, adaptation)
    assert 1.0 <= found.work_price <= WORK_PRICE_MAX
    assert 1.0 <= found.compute_weight <= 1.0 + COMPUTE_WEIGHT_ADDED_MAX
    assert base.target_share - HELD_BACK_MAX <= found.target_share <= base.target_share
    assert abs(adaptation.balancing.steps) <= CLIMB_STEPS_MAX
    most = base.kvcache_balancing_threshold * CLIMB_FACTOR**CLIMB_STEPS_MAX
    assert 1.0 <= found.kvcache_balancing_threshold <= most
    # When it ceases, all comes back to what is configured.
    for _ in range(300):
        now_s += 40.0
        adaptation = observed(adaptation, Outcomes(in_targets=400), now_s)
    calm = after(replace(adaptation, target_s=TARGET_S), 0.0, 150.0, now_s)
    assert (calm.work_price, calm.held_back) == (NO_PRICE, 0.0)


class TestPriceOfWork:
    """A thousand tokens take a second; five seconds wait."""

    PRICE = 10.0

    def decide(self, name: str, prompt_tokens: int, queue_s: float = 5.0, **fields: object):
        limits = PlacementLimits(ttft_ms_default=10_000.0, work_price=self.PRICE, **fields)
        return place(waiting(queue_s), request(name, prompt_tokens=prompt_tokens), (), limits, 0.0)

    def served(self, prompt_tokens: int, **fields: object) -> float:
        decisions = [self.decide(f"r{n}", prompt_tokens, **fields) for n in range(400)]
        return sum(isinstance(decision, Placement) for decision in decisions) / 400

    def test_what_brings_much_work_may_wait_less(self):
        assert self.served(500) == 1.0
        assert self.served(3000) == pytest.approx(WORK_FREE_SHARE, abs=0.03)
        refused = next(r for n in range(400) if isinstance(r := self.decide(f"r{n}", 3000), Rejection))
        assert refused.reason is RejectReason.TTFT
        assert "of computing" in refused.detail
        assert refused.retry_after_s == pytest.approx(5.0 - 7.0 / 3, rel=0.1)

    def test_it_is_served_where_nothing_waits_whatever_it_brings(self):
        assert self.served(9000, queue_s=0.0) == 1.0

    def test_no_price_where_nothing_is_asked(self):
        assert self.served(3000, admission=AdmissionMode.NONE) == 1.0

    def test_who_is_drawn_free_is_still_held_to_the_target(self):
        assert self.served(6000, queue_s=5.0) == 0.0

    @settings(max_examples=60, deadline=None)
    @given(
        st.integers(1, 9000),
        st.floats(0, PRESSURE_LOW * TARGET_S * 0.9),
        st.integers(0, 10_000),
        st.integers(0),
    )
    def test_short_queues_change_no_decision(self, prompt_tokens: int, queue_s: float, name: int, seed: int):
        """However long they lasted, and whatever was done with answers in time."""
        adaptation = after(START, queue_s, 5.0, 0.0)
        adaptation = observed(adaptation, Outcomes(in_targets=seed % 1000), 5.0)
        view, ask = waiting(queue_s), request(f"r{name}", prompt_tokens=prompt_tokens)
        fixed = replace(LIMITS, adaptive=False)
        found = place(view, ask, (), replace(tuned(LIMITS, adaptation), adaptive=False), 0.0)
        assert found == place(view, ask, (), fixed, 0.0)
