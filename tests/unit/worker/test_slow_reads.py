"""A disk that has become slow is not waited for again and again, and is tried again later."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policy.cost import ASSUMED_COST, ssd_read_s
from worker.fetch_plan import FetchPlan, worthwhile
from worker.slow_reads import FACTOR_MAX, HALF_LIFE_S, NOTICEABLE_S, SlowReads

pytestmark = pytest.mark.unit

COST = replace(ASSUMED_COST, prefill_per_token_s=1e-4, ssd_fixed_s=1e-4, ssd_bytes_per_s=1e9)
PLAN = FetchPlan(0, 10, 0)
BLOCK_BYTES = 100_000
EXPECTED_S = ssd_read_s(COST, 10 * BLOCK_BYTES)


def rises(reads: SlowReads, now_s: float) -> bool:
    return worthwhile(PLAN, 10, reads.corrected(COST, now_s), BLOCK_BYTES).brings


def test_one_slow_read_is_enough_and_a_while_later_it_is_tried_again() -> None:
    reads = SlowReads()
    assert rises(reads, 0.0)
    reads.took(EXPECTED_S, 2.0, 100.0)
    assert reads.factor(100.0) == pytest.approx(2.0 / EXPECTED_S)
    assert ssd_read_s(reads.corrected(COST, 100.0), 10 * BLOCK_BYTES) == pytest.approx(2.0)
    assert not rises(reads, 100.0)
    assert rises(reads, 100.0 + 20 * HALF_LIFE_S)


def test_what_nobody_notices_teaches_nothing() -> None:
    reads = SlowReads()
    reads.took(1e-6, NOTICEABLE_S * 0.99, 0.0)
    assert reads.corrected(COST, 0.0) is COST


def test_a_milder_case_does_not_hide_a_worse_one() -> None:
    reads = SlowReads()
    reads.took(0.01, 5.0, 0.0)
    reads.took(0.01, 1.0, 0.0)
    assert reads.factor(0.0) == pytest.approx(500.0)


@given(
    st.lists(st.tuples(st.floats(0.0, 100.0), st.floats(0.0, 1e4), st.floats(0.0, 1e6)), max_size=20),
    st.floats(0.0, 1e7),
)
def test_the_factor_is_bounded(reads_seen: list[tuple[float, float, float]], later_s: float) -> None:
    reads = SlowReads()
    now_s = 0.0
    for expected_s, elapsed_s, after_s in reads_seen:
        now_s += after_s
        reads.took(expected_s, elapsed_s, now_s)
        assert 1.0 <= reads.factor(now_s) <= FACTOR_MAX * 1.0001
    assert 1.0 <= reads.factor(now_s + later_s) <= reads.factor(now_s)
