"""The search for the best split: the highest rate is found, bounds hold, the best is the best there is."""

from dataclasses import replace
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.simulated_clusters import ROUND_NODE, ROUND_SETUP

from simulator.parallelism import (
    GPUS_AN_INSTANCE,
    NODE_GPUS,
    all_reduce_fixed_s,
    all_reduce_per_token_s,
    instance_of,
    kv_tokens_max,
    parallel_cost,
)
from simulator.planning import (
    SPEEDUP_MIN,
    Planned,
    Planner,
    SearchLimits,
    Split,
    best_of,
    bracketed,
    splits_of,
)
from simulator.reference_hardware import KV_TOKENS_MAX, REFERENCE_COST
from simulator.setup import SPEEDUP_MAX, NodeShape, SetupError
from simulator.trace import TracedRequest

pytestmark = pytest.mark.unit

GPUS = 3
NODE = replace(ROUND_NODE, card_bytes_per_s=1e12)
REQUESTS = [TracedRequest(100 * number, 256, 40, (number,)) for number in range(60)]
"""A quarter of a second to prefill, and half a second to decode alone."""
SETUP = replace(ROUND_SETUP, ttft_s_max=1.5, tbt_s_max=0.02)
LIMITS = SearchLimits()


def nothing(split: Split, speedup: float) -> None:
    pass


def planner(limits: SearchLimits = LIMITS, on_trial=nothing) -> Planner:
    return Planner(REQUESTS, SETUP, lambda gpus: NODE, limits, on_trial)


@pytest.fixture(scope="module")
def planned() -> list[Planned]:
    one = planner()
    return [one.highest(split, 0.1) for split in splits_of(GPUS, 1)]


def test_the_splits_are_all_there_are() -> None:
    assert [split.name for split in splits_of(64, 16)] == ["1P+3D", "2P+2D", "3P+1D", "4 coupled"]
    assert {split.gpus for split in splits_of(64, 16)} == {64}
    # What makes no whole instance stays idle.
    assert {split.gpus for split in splits_of(65, 16)} == {64}
    assert [split.name for split in splits_of(8, 8)] == ["1 coupled"]
    assert not list(splits_of(4, 8))


def test_the_highest_rate_passes_and_one_above_the_tolerance_does_not(planned) -> None:
    for one in planned:
        assert one.best is not None
        assert one.exact
        assert one.best.attainment >= LIMITS.attainment
        assert one.simulations <= LIMITS.simulations_max
        above = planner().trial(one.split, one.best.speedup * (1 + 2 * LIMITS.tolerance))
        assert above.attainment < LIMITS.attainment


def test_the_best_split_is_that_of_a_search_through_all_rates(planned) -> None:
    rates = [0.1 * 1.1**step for step in range(22)]

    def highest(split: Split) -> float:
        one = planner()
        goodput = 0.0
        for rate in rates:
            trial = one.trial(split, rate)
            if trial.attainment >= LIMITS.attainment:
                goodput = max(goodput, trial.goodput_per_s)
        return goodput / split.gpus

    by_hand = {split: highest(split) for split in splits_of(GPUS, 1)}
    best = best_of(planned)
    assert best is not None
    assert best.split == max(by_hand, key=lambda split: by_hand[split])
    for one in planned:
        assert one.goodput_per_gpu_s == pytest.approx(by_hand[one.split], rel=0.15)


def test_attainment_falls_as_the_rate_grows() -> None:
    split = Split(1, prefill=2, decode=2)
    found = [planner().trial(split, speedup).attainment for speedup in (0.3, 0.6, 1.2, 2.4, 4.8)]
    assert found == sorted(found, reverse=True)
    assert found[0] == 1.0
    assert found[-1] < 0.5


def test_looser_targets_and_more_instances_serve_more(planned) -> None:
    split = Split(1, prefill=1, decode=2)
    loose = Planner(REQUESTS, replace(SETUP, ttft_s_max=3.0), lambda gpus: NODE, LIMITS, nothing).highest(
        split, 1.0
    )
    (strict,) = [one for one in planned if one.split == split]
    more = planner().highest(Split(1, prefill=2, decode=4), 1.0)
    assert loose.best is not None
    assert strict.best is not None
    assert more.best is not None
    assert loose.best.speedup > strict.best.speedup
    assert more.best.speedup > strict.best.speedup


def test_the_goodput_of_a_fixed_rate_counts_those_within_targets() -> None:
    told = []
    one = planner(on_trial=lambda split, speedup: told.append((split.name, speedup)))
    split = Split(1, prefill=1, decode=1)
    found = one.fixed(split, 2.0)
    assert found.best is not None
    assert found.simulations == 1
    assert told == [("1P+1D", 2.0)]
    # Ten a second, twice as fast.
    assert found.best.offered_per_s == pytest.approx(20.0)
    assert found.best.goodput_per_s == pytest.approx(20.0 * found.best.told.in_targets / len(REQUESTS))
    assert found.goodput_per_gpu_s == found.best.goodput_per_s / 2


def test_a_split_that_meets_no_target_serves_nothing() -> None:
    hopeless = Planner(REQUESTS, replace(SETUP, ttft_s_max=0.01), lambda gpus: NODE, LIMITS, nothing).highest(
        Split(1, coupled=2), 1.0
    )
    assert hopeless.best is None
    assert hopeless.goodput_per_gpu_s == 0.0
    assert best_of([hopeless]) is None


@given(
    st.floats(SPEEDUP_MIN / 4, SPEEDUP_MAX * 4),
    st.floats(1e-4, 1e4),
    st.floats(0.001, 1.0),
    st.integers(1, 60),
)
def test_a_threshold_is_found_or_the_search_says_that_it_is_not(
    threshold, first, tolerance, asked_max
) -> None:
    asked: list[float] = []

    def passes(speedup: float) -> bool:
        asked.append(speedup)
        return speedup <= threshold

    exact = bracketed(passes, first, SearchLimits(0.9, tolerance, asked_max))
    assert len(asked) <= asked_max
    assert all(SPEEDUP_MIN <= speedup <= SPEEDUP_MAX for speedup in asked)
    passed = [speedup for speedup in asked if speedup <= threshold]
    if exact and passed:
        assert threshold <= max(passed) * (1 + tolerance) * (1 + 1e-9)
    elif exact:
        assert threshold < SPEEDUP_MIN
    else:
        assert len(asked) == asked_max or threshold >= SPEEDUP_MAX


def test_eight_gpus_are_the_reference_but_for_the_all_reduces() -> None:
    cost = parallel_cost(NODE_GPUS, 1.0)
    assert cost.step_fixed_s - REFERENCE_COST.step_fixed_s == pytest.approx(160 * all_reduce_fixed_s(8))
    added_s = cost.prefill_per_token_s - REFERENCE_COST.prefill_per_token_s
    # Two a layer of 16 KiB a token, 7/8 of it twice over 200 GB/s.
    assert added_s == pytest.approx(160 * 16384 * 2 * 7 / 8 / 200e9)
    assert kv_tokens_max(NODE_GPUS) == KV_TOKENS_MAX
    assert cost.step_per_kv_token_s == REFERENCE_COST.step_per_kv_token_s


def test_more_gpus_compute_faster_and_wait_longer_for_each_other() -> None:
    costs = [parallel_cost(gpus, 0.6) for gpus in GPUS_AN_INSTANCE]
    pairs = [cost.prefill_per_token_pair_s for cost in costs]
    assert pairs == sorted(pairs, reverse=True)
    waits = [all_reduce_per_token_s(gpus) for gpus in GPUS_AN_INSTANCE]
    assert waits[0] == 0.0
    assert waits == sorted(waits)
    room = [kv_tokens_max(gpus) for gpus in GPUS_AN_INSTANCE]
    assert room == sorted(room)
    # Eight heads: beyond eight GPUs their KV is held, and read, by several.
    assert costs[4].step_per_kv_token_s == costs[3].step_per_kv_token_s
    for gpus in GPUS_AN_INSTANCE:
        assert 0.0 <= all_reduce_per_token_s(gpus) < inf


def test_weights_must_fit() -> None:
    with pytest.raises(SetupError, match="must be at least 2 to hold 138 GB"):
        instance_of(1, NodeShape(), 1.0)
    with pytest.raises(SetupError, match="3, must be one of"):
        instance_of(3, NodeShape(), 1.0)
    half = instance_of(4, NodeShape(), 1.0)
    assert (half.pool_blocks, half.card_bytes_per_s) == (NodeShape().pool_blocks // 2, 50e9)
    assert half.device_blocks < NodeShape().device_blocks / 2
