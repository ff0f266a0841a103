"""Eviction orders."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policy.evict import EvictionCandidate, EvictionOrder, evict, eviction_key

pytestmark = pytest.mark.unit

OLD_OFTEN = EvictionCandidate(block_id=2, used_at=1, uses=9)
MIDDLE_SELDOM = EvictionCandidate(block_id=3, used_at=2, uses=1)
NEW_SELDOM = EvictionCandidate(block_id=1, used_at=3, uses=1)
ALL = (NEW_SELDOM, OLD_OFTEN, MIDDLE_SELDOM)


def test_lru_takes_what_was_used_longest_ago():
    assert evict(EvictionOrder.LRU, ALL, 3) == (2, 3, 1)


def test_lfu_takes_what_was_used_least_often_and_the_older_among_equals():
    assert evict(EvictionOrder.LFU, ALL, 3) == (3, 1, 2)


def test_no_more_than_asked_for_and_no_more_than_there_are():
    assert evict(EvictionOrder.LRU, ALL, 1) == (2,)
    assert evict(EvictionOrder.LRU, ALL, 0) == ()
    assert evict(EvictionOrder.LRU, ALL, 9) == (2, 3, 1)


candidate_lists = st.lists(
    st.builds(EvictionCandidate, st.integers(0, 99), st.integers(0, 5), st.integers(0, 5)),
    unique_by=lambda candidate: candidate.block_id,
)


@given(st.sampled_from(EvictionOrder), candidate_lists, st.randoms(use_true_random=False))
def test_victims_do_not_depend_on_the_order_in_which_candidates_come(order, candidates, random):
    shuffled = random.sample(candidates, len(candidates))
    assert evict(order, shuffled, 5) == evict(order, candidates, 5)
    assert len({eviction_key(order, candidate) for candidate in candidates}) == len(candidates)
