"""Whether an answer met its targets, as the gateway counts it."""

from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.answers.outcomes import BUCKET_GROWTH, AnswerTimes, OutcomeCounts
from kvindex.core import InstanceId
from policy.core import Placement, RequestId
from simulator.results import tail_mean_s

pytestmark = pytest.mark.unit


def placement(ttft_ms_max: float | None = None, tbt_ms_max: float | None = None) -> Placement:
    return Placement(
        RequestId("r"), 0, InstanceId("p"), InstanceId("d"), tbt_ms_max=tbt_ms_max, ttft_ms_max=ttft_ms_max
    )


def answer(placed: Placement, waited_s: float, *gaps_s: float) -> AnswerTimes:
    times = AnswerTimes()
    times.first(placed, waited_s)
    for gap_s in gaps_s:
        times.next(gap_s, 1)
    return times


def test_both_targets_count():
    both = placement(ttft_ms_max=500, tbt_ms_max=50)
    assert answer(both, 0.5, *[0.04] * 20).in_targets
    assert not answer(both, 0.51, *[0.04] * 20).in_targets
    assert not answer(both, 0.5, *[0.04] * 18, 0.07, 0.07).in_targets
    assert answer(both, 0.5).in_targets
    assert answer(placement(), 100.0, 100.0).in_targets


def test_what_is_counted():
    counts = OutcomeCounts()
    counts.ended(answer(placement(ttft_ms_max=500), 0.1))
    counts.ended(answer(placement(ttft_ms_max=500), 0.6))
    counts.failed(AnswerTimes())
    counts.failed(answer(placement(), 0.1))
    assert counts == OutcomeCounts(answered=4, in_targets=1, rejected=1)


def test_tokens_that_come_together_have_no_gap_between_them():
    times = answer(placement(), 0.1)
    for _ in range(10):
        times.next(1.0, 10)
    assert times.tbt_s == pytest.approx(1.0)
    times = answer(placement(), 0.1)
    times.next(1.0, 20)
    assert times.tbt_s == pytest.approx(0.5)


@given(st.lists(st.floats(2e-4, 1000.0), min_size=1, max_size=400))
def test_the_longest_tenth_within_a_bucket(gaps_s: list[float]):
    found, exact = answer(placement(), 0.1, *gaps_s).tbt_s, tail_mean_s(gaps_s)
    assert found is not None
    assert exact is not None
    assert exact / BUCKET_GROWTH <= found * (1 + 1e-9)
    assert found <= exact * (1 + 1e-9)
    assert answer(placement(), 0.1, *[fmean(gaps_s)] * 5).tbt_s == pytest.approx(fmean(gaps_s))
