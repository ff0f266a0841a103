"""Eviction orders."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policy.cost import ASSUMED_COST, prefill_s
from policy.evict import (
    CREDIT_SHARE_MAX,
    NEVER_DOUBLES,
    BlockUse,
    EvictionCandidate,
    EvictionOrder,
    EvictionScale,
    SloClass,
    cost_doubles_at_blocks,
    evict,
    key_function,
    slo_class,
)

pytestmark = pytest.mark.unit

OLD_OFTEN = EvictionCandidate(block_id=2, used_at=1, uses=9)
MIDDLE_SELDOM = EvictionCandidate(block_id=3, used_at=2, uses=1)
NEW_SELDOM = EvictionCandidate(block_id=1, used_at=3, uses=1)
ALL = (NEW_SELDOM, OLD_OFTEN, MIDDLE_SELDOM)
SCALE = EvictionScale(turnover=1000, cost_doubles_at_blocks=100)


def test_lru_takes_what_was_used_longest_ago():
    assert evict(EvictionOrder.LRU, ALL, 3) == (2, 3, 1)


def test_lfu_takes_what_was_used_least_often_and_the_older_among_equals():
    assert evict(EvictionOrder.LFU, ALL, 3) == (3, 1, 2)


def test_no_more_than_asked_for_and_no_more_than_there_are():
    assert evict(EvictionOrder.LRU, ALL, 1) == (2,)
    assert evict(EvictionOrder.LRU, ALL, 0) == ()
    assert evict(EvictionOrder.LRU, ALL, 9) == (2, 3, 1)


uses = st.builds(BlockUse, st.integers(), st.sampled_from(SloClass), st.none() | st.integers(0, 10**6))
candidates_of_any_age = st.builds(
    EvictionCandidate, st.integers(0, 99), st.integers(0, 9), st.integers(0, 5), st.integers(0, 10**6), uses
)
candidate_lists = st.lists(candidates_of_any_age, unique_by=lambda candidate: candidate.block_id)


@given(st.sampled_from(EvictionOrder), candidate_lists, st.randoms(use_true_random=False))
def test_victims_do_not_depend_on_the_order_in_which_candidates_come(order, candidates, random):
    shuffled = random.sample(candidates, len(candidates))
    assert evict(order, shuffled, 5) == evict(order, candidates, 5)
    assert len({key_function(order)(candidate) for candidate in candidates}) == len(candidates)


@given(
    st.sampled_from([EvictionOrder.LRU, EvictionOrder.LENGTH_AWARE, EvictionOrder.REQUEST_AWARE]),
    candidates_of_any_age,
    candidates_of_any_age,
)
def test_nothing_is_kept_much_longer_than_under_lru_whatever_it_is_worth(order, worthless, precious):
    """So a high class cannot fill the pool for ever, and a low one is not shut out."""
    newer = replace(
        worthless, block_id=1, used_at=precious.used_at + int(CREDIT_SHARE_MAX * SCALE.turnover) + 1
    )
    assert evict(order, [newer, replace(precious, block_id=2)], 1, SCALE) == (2,)


@given(st.sampled_from(EvictionOrder), candidates_of_any_age, st.integers(1, 10**6))
def test_a_block_used_later_and_otherwise_alike_goes_later(order, candidate, ticks):
    key = key_function(order, SCALE)
    later = replace(candidate, block_id=100, used_at=candidate.used_at + ticks)
    assert key(candidate) < key(later)


class TestLengthAware:
    def test_of_equally_old_blocks_the_one_that_costs_less_to_compute_again_goes_first(self):
        shallow, deep = (EvictionCandidate(block_id, 5, 1, depth) for block_id, depth in ((2, 0), (1, 300)))
        assert evict(EvictionOrder.LENGTH_AWARE, [deep, shallow], 2, SCALE) == (2, 1)

    @pytest.mark.parametrize(("depth", "ticks"), [(0, 0), (100, 250), (200, 500), (10**9, 500)])
    def test_each_doubling_of_the_first_block_s_cost_counts_as_a_quarter_of_a_turnover_up_to_a_half(
        self, depth, ticks
    ):
        deep = EvictionCandidate(1, 0, 1, depth)
        older, newer = (
            EvictionCandidate(block_id, used_at, 1) for block_id, used_at in ((2, ticks - 1), (3, ticks + 1))
        )
        assert evict(EvictionOrder.LENGTH_AWARE, [newer, deep, older], 3, SCALE) == (2, 1, 3)

    def test_where_the_cost_doubles_is_where_the_cost_model_says(self):
        depth = cost_doubles_at_blocks(ASSUMED_COST, 16)
        cost = replace(ASSUMED_COST, prefill_fixed_s=0)
        first, deep = prefill_s(cost, 16, 0), prefill_s(cost, 16, depth * 16)
        assert deep / first == pytest.approx(2, rel=1e-3)

    def test_where_attention_costs_nothing_it_never_doubles(self):
        flat = replace(ASSUMED_COST, prefill_per_token_pair_s=0)
        assert cost_doubles_at_blocks(flat, 16) == NEVER_DOUBLES
        steep = replace(ASSUMED_COST, prefill_per_token_s=0)
        assert cost_doubles_at_blocks(steep, 16) == 1
        scale = EvictionScale(1000, NEVER_DOUBLES)
        assert key_function(EvictionOrder.LENGTH_AWARE, scale)(EvictionCandidate(1, 7, 1, 10**6))[0] == 7


class TestRequestAware:
    @pytest.mark.parametrize(
        ("less", "more"),
        [
            (BlockUse(priority=0), BlockUse(priority=1)),
            (BlockUse(priority=-1), BlockUse(priority=0)),
            (BlockUse(priority=5), BlockUse(priority=6)),
            (BlockUse(slo=SloClass.NONE), BlockUse(slo=SloClass.RELAXED)),
            (BlockUse(slo=SloClass.RELAXED), BlockUse(slo=SloClass.TIGHT)),
            (BlockUse(remaining_tokens=500), BlockUse(remaining_tokens=100)),
            (BlockUse(remaining_tokens=None), BlockUse(remaining_tokens=10_000)),
            (BlockUse(slo=SloClass.TIGHT, priority=-9), BlockUse(priority=9)),
        ],
    )
    def test_of_equally_old_blocks_the_one_of_the_lesser_request_goes_first(self, less, more):
        candidates = [EvictionCandidate(1, 5, 1, use=more), EvictionCandidate(2, 5, 1, use=less)]
        assert evict(EvictionOrder.REQUEST_AWARE, candidates, 2, SCALE) == (2, 1)

    def test_within_a_class_the_older_goes_first(self):
        use = BlockUse(3, SloClass.TIGHT, 17)
        candidates = [EvictionCandidate(1, 6, 1, use=use), EvictionCandidate(2, 5, 1, use=use)]
        assert evict(EvictionOrder.REQUEST_AWARE, candidates, 2, SCALE) == (2, 1)


@pytest.mark.parametrize(
    ("ttft_ms_max", "tbt_ms_max", "expected"),
    [
        (None, None, SloClass.NONE),
        (2_000.0, None, SloClass.TIGHT),
        (30_000.0, 50.0, SloClass.TIGHT),
        (30_000.0, 100.0, SloClass.RELAXED),
        (None, 100.0, SloClass.RELAXED),
        (2_001.0, None, SloClass.RELAXED),
    ],
)
def test_the_tighter_of_both_targets_makes_the_class(ttft_ms_max, tbt_ms_max, expected):
    assert slo_class(ttft_ms_max, tbt_ms_max) is expected
