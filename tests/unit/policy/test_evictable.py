"""EvictableBlocks gives up exactly what policy.evict says, and its heap stays bounded."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policy.evict import (
    CREDIT_SHARE_MAX,
    BlockUse,
    EvictionCandidate,
    EvictionOrder,
    EvictionScale,
    SloClass,
    evict,
)
from policy.evictable import SLACK_ENTRIES, EvictableBlocks

pytestmark = pytest.mark.unit

SCALE = EvictionScale(turnover=20, cost_doubles_at_blocks=3)

uses = st.builds(BlockUse, st.integers(-3, 3), st.sampled_from(SloClass), st.none() | st.integers(0, 500))
candidates = st.builds(
    EvictionCandidate, st.integers(0, 20), st.integers(0, 5), st.integers(0, 3), st.integers(0, 9), uses
)
changes = st.lists(st.one_of(candidates, st.integers(0, 20), st.none()), max_size=60)


@given(st.sampled_from(EvictionOrder), changes)
def test_the_victim_is_the_one_of_the_policy(order, operations):
    """A candidate is added, a block id discarded, None takes out a victim."""
    evictable, model = EvictableBlocks(order, SCALE), {}
    for operation in operations:
        if isinstance(operation, EvictionCandidate):
            evictable.add(operation)
            model[operation.block_id] = operation
        elif operation is not None:
            evictable.discard(operation)
            model.pop(operation, None)
        elif model:
            (victim,) = evict(order, model.values(), 1, SCALE)
            assert evictable.first() == victim == evictable.pop()
            del model[victim]
        assert len(evictable) == len(model)
        assert all(block_id in evictable for block_id in model)
        evictable.check_integrity()
    assert (evictable.first() is None) == (not model)


def test_entries_of_blocks_that_are_added_again_do_not_pile_up():
    evictable = EvictableBlocks(EvictionOrder.LRU)
    for used_at in range(10 * SLACK_ENTRIES):
        evictable.add(EvictionCandidate(1, used_at, 1))
        evictable.check_integrity()
    assert (evictable.pop(), evictable.first()) == (1, None)
    evictable.check_integrity()


def test_blocks_that_come_and_go_do_not_pile_up():
    evictable = EvictableBlocks(EvictionOrder.LRU)
    for used_at in range(10_000):
        evictable.discard(used_at % 10)
        evictable.add(EvictionCandidate(used_at % 10, used_at, 1))
    assert len(evictable) == 10
    assert len(evictable._heap) <= 2 * 10 + SLACK_ENTRIES + 1
    assert [evictable.pop() for _ in range(10)] == list(range(10))


@pytest.mark.parametrize("precious_of_ten", [1, 5, 9])
def test_what_is_worth_least_is_kept_for_a_while_and_what_is_worth_most_not_for_ever(precious_of_ten):
    """Blocks that nobody uses again stream through a pool, some worth all credits and the others none."""
    pool_blocks, streamed = 400, 4000
    precious, worthless = BlockUse(10**6, SloClass.TIGHT, 0), BlockUse(-(10**6), SloClass.NONE, None)
    blocks = EvictableBlocks(EvictionOrder.REQUEST_AWARE, EvictionScale(turnover=pool_blocks))
    ages: dict[bool, list[int]] = {True: [], False: []}
    for now in range(streamed):
        if len(blocks) == pool_blocks:
            victim = blocks.pop()
            if now > streamed / 2:  # The pool has filled up and its first blocks have gone.
                ages[victim % 10 < precious_of_ten].append(now - victim)
        blocks.add(EvictionCandidate(now, now, 1, use=precious if now % 10 < precious_of_ten else worthless))
    kept_longer = CREDIT_SHARE_MAX * pool_blocks
    lesser = pool_blocks - precious_of_ten / 10 * kept_longer
    assert ages[False] == pytest.approx([lesser] * len(ages[False]), abs=12)
    assert ages[True] == pytest.approx([lesser + kept_longer] * len(ages[True]), abs=12)
    assert min(len(ages[False]), len(ages[True])) > 100
