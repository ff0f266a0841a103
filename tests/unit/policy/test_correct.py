"""Corrections of the cost model find a constant bias, stay within bounds, and outliers do not lead them."""

from collections.abc import Iterable
from dataclasses import astuple, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policy.core import CostCoefficients
from policy.correct import (
    FACTOR_MAX,
    FIRST_TOKEN_FIXED_S_MAX,
    GAIN,
    HALF_LIFE_S,
    RATIO_MAX,
    REMEMBERED_S,
    SAMPLES_MIN,
    Corrections,
    corrected,
    first_token_observed,
    step_observed,
    transfer_observed,
)
from policy.cost import StepWork, prefill_s, step_s, transfer_s, work_s

pytestmark = pytest.mark.unit

COST = CostCoefficients(2e-3, 1e-3, 1e-7, 5e-3, 1e-3, 1e-6, 1e-3, 1e9)
LEARNT = int(20 / GAIN)
"""Observations after which what is still missing is nothing."""

work = st.builds(
    lambda decodes, kv_tokens, tokens, prefix: StepWork(
        decodes, kv_tokens if decodes else 0, tokens, tokens * (prefix + tokens / 2)
    ),
    st.integers(0, 64),
    st.integers(1, 100_000),
    st.integers(0, 512),
    st.integers(0, 8192),
).filter(lambda one: one.decodes or one.chunk_tokens)
bias_of_all = st.floats(FACTOR_MAX**-0.5, FACTOR_MAX**0.5)
"""So far that no single term has to leave its bounds: large ones take more of it than small ones."""


def seen(works: Iterable[tuple[StepWork, float]], corrections: Corrections | None = None) -> Corrections:
    """After these steps with what each took, all at time 0."""
    corrections = Corrections() if corrections is None else corrections
    for one, elapsed_s in works:
        corrections = step_observed(corrections, COST, one, elapsed_s, 0.0)
    return corrections


def scaled(cost: CostCoefficients, prefill: float, step: float) -> CostCoefficients:
    return replace(
        cost,
        prefill_fixed_s=cost.prefill_fixed_s * prefill,
        prefill_per_token_s=cost.prefill_per_token_s * prefill,
        prefill_per_token_pair_s=cost.prefill_per_token_pair_s * prefill,
        step_fixed_s=cost.step_fixed_s * step,
        step_per_request_s=cost.step_per_request_s * step,
        step_per_kv_token_s=cost.step_per_kv_token_s * step,
    )


def test_one_chunk_alone_is_a_prefill_and_decodes_alone_are_a_step() -> None:
    assert work_s(COST, StepWork(chunk_tokens=40, chunk_pairs=40 * (100 + 20))) == prefill_s(COST, 40, 100)
    assert work_s(COST, StepWork(7, 900)) == step_s(COST, 7, 900)


def test_a_step_that_does_both_goes_through_the_model_once() -> None:
    both = StepWork(7, 900, 40, 4800.0)
    apart_s = prefill_s(COST, 40, 100) + step_s(COST, 7, 900)
    assert work_s(COST, both) == pytest.approx(apart_s - COST.prefill_fixed_s)


@given(work, bias_of_all)
def test_a_constant_bias_is_found(one: StepWork, bias: float) -> None:
    found = corrected(COST, seen([(one, bias * work_s(COST, one))] * LEARNT), 0.0)
    assert work_s(found, one) == pytest.approx(bias * work_s(COST, one), rel=0.05)


def test_different_biases_of_prefill_and_decode_are_told_apart_in_steps_that_do_both() -> None:
    truth = scaled(COST, 3.0, 0.5)
    works = [StepWork(d, 100 * d, c, 50.0 * c) for d in (1, 8, 32) for c in (0, 64, 400)]
    found = corrected(COST, seen([(one, work_s(truth, one)) for one in works * LEARNT]), 0.0)
    for one in works:
        assert work_s(found, one) == pytest.approx(work_s(truth, one), rel=0.1)
    assert prefill_s(found, 300, 0) == pytest.approx(prefill_s(truth, 300, 0), rel=0.1)


def test_what_is_fixed_is_told_from_what_grows_with_the_tokens() -> None:
    """One factor for both would be right for one length of prompt only."""
    truth = replace(COST, prefill_fixed_s=COST.prefill_fixed_s * 10)
    works = [StepWork(chunk_tokens=n, chunk_pairs=n * n / 2) for n in (4, 16, 64, 512)]
    found = corrected(COST, seen([(one, work_s(truth, one)) for one in works * LEARNT]), 0.0)
    for one in works:
        assert work_s(found, one) == pytest.approx(work_s(truth, one), rel=0.1)


@given(st.lists(st.tuples(work, st.floats(0, 1e9)), max_size=60))
def test_whatever_is_seen_the_factors_stay_within_bounds(works: list[tuple[StepWork, float]]) -> None:
    found = corrected(COST, seen(works), 0.0)
    for value, profile in zip(astuple(found)[:6], astuple(COST)[:6], strict=True):
        assert profile / FACTOR_MAX * 0.999 <= value <= profile * FACTOR_MAX * 1.001


@given(work, st.sampled_from([0.0, 1e-9, 1e3, 1e12]))
def test_one_outlier_moves_little_however_far_out_it_is(one: StepWork, elapsed_s: float) -> None:
    settled = seen([(one, work_s(COST, one))] * LEARNT)
    found = corrected(COST, seen([(one, elapsed_s)], settled), 0.0)
    ratio = work_s(found, one) / work_s(COST, one)
    # Terms move in proportion to their shares, the largest one more than the whole has to.
    assert RATIO_MAX ** (-2 * GAIN) <= ratio <= RATIO_MAX ** (2 * GAIN)


@given(work, st.floats(20, 1e6), st.integers(3, 10))
def test_stalls_now_and_then_do_not_lead(one: StepWork, stall: float, every: int) -> None:
    took_s = [work_s(COST, one) * (stall if n % every == 0 else 1.0) for n in range(1, 300)]
    found = corrected(COST, seen([(one, elapsed_s) for elapsed_s in took_s]), 0.0)
    assert work_s(found, one) / work_s(COST, one) < RATIO_MAX


def test_few_observations_change_nothing() -> None:
    one = StepWork(4, 400)
    few = seen([(one, 3 * work_s(COST, one))] * (SAMPLES_MIN - 1))
    assert corrected(COST, few, 0.0) == COST
    assert corrected(COST, seen([(one, 3 * work_s(COST, one))], few), 0.0) != COST


def test_what_is_not_seen_keeps_its_factors() -> None:
    decodes = StepWork(4, 400)
    found = corrected(COST, seen([(decodes, 3 * work_s(COST, decodes))] * LEARNT), 0.0)
    assert prefill_s(found, 100, 50) == prefill_s(COST, 100, 50)
    assert transfer_s(found, 10**6) == transfer_s(COST, 10**6)


def test_it_is_forgotten_by_and_by() -> None:
    one = StepWork(4, 400)
    slow = seen([(one, 4 * work_s(COST, one))] * LEARNT)
    then_s = [
        work_s(corrected(COST, slow, at_s), one) / work_s(COST, one)
        for at_s in (0.0, REMEMBERED_S, REMEMBERED_S + HALF_LIFE_S, REMEMBERED_S + 20 * HALF_LIFE_S)
    ]
    assert then_s == pytest.approx([4, 4, 2, 1], rel=0.02)
    # And one observation more does not bring back what was forgotten.
    now_s = REMEMBERED_S + 20 * HALF_LIFE_S
    again = step_observed(slow, COST, one, work_s(COST, one), now_s)
    assert work_s(corrected(COST, again, now_s), one) == pytest.approx(work_s(COST, one), rel=0.02)


def test_a_minute_after_a_burst_its_first_tokens_are_forgotten() -> None:
    """As a cluster that refuses everything for them observes none."""
    slow = Corrections()
    for number in range(40):
        slow = first_token_observed(slow, 0.4, number / 20)
    assert corrected(COST, slow, 2.0).first_token_fixed_s > 0.2
    assert (
        corrected(COST, slow, 62.0).first_token_fixed_s < 0.1 * corrected(COST, slow, 2.0).first_token_fixed_s
    )


def test_a_cost_of_nothing_cannot_be_corrected() -> None:
    nothing = CostCoefficients(*(0.0,) * 7, 1e9)
    assert step_observed(Corrections(), nothing, StepWork(4, 400), 1.0, 0.0) == Corrections()


def test_latency_and_bandwidth_of_transfers_are_found() -> None:
    truth = replace(COST, transfer_fixed_s=3e-3, transfer_bytes_per_s=2.5e8)
    corrections = Corrections()
    for transfer_bytes in (1_000, 100_000, 4_000_000) * LEARNT:
        elapsed_s = transfer_s(truth, transfer_bytes)
        corrections = transfer_observed(corrections, COST, transfer_bytes, elapsed_s, 0.0)
    found = corrected(COST, corrections, 0.0)
    for transfer_bytes in (1_000, 100_000, 4_000_000):
        assert transfer_s(found, transfer_bytes) == pytest.approx(transfer_s(truth, transfer_bytes), rel=0.05)


@given(st.floats(0, FIRST_TOKEN_FIXED_S_MAX))
def test_what_first_tokens_take_beside_is_found(beside_s: float) -> None:
    corrections = Corrections()
    for _ in range(LEARNT):
        corrections = first_token_observed(corrections, beside_s, 0.0)
    assert corrected(COST, corrections, 0.0).first_token_fixed_s == pytest.approx(
        beside_s, abs=1e-3, rel=0.02
    )


@given(st.lists(st.floats(-1e6, 1e6), max_size=60))
def test_it_is_bounded_and_never_negative(beside_s: list[float]) -> None:
    corrections = Corrections()
    for one_s in beside_s:
        corrections = first_token_observed(corrections, one_s, 0.0)
    assert 0 <= corrections.first_token_fixed_s <= FIRST_TOKEN_FIXED_S_MAX
