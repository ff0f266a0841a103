"""What is copied down ahead changes nothing about what goes next."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.prompt_tree import chain

from kvindex.core import Tier
from kvpool import BlockPool

pytestmark = pytest.mark.unit

BLOCKS = 9
prompts = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=5).map(tuple), max_size=40)


def serve(pool: BlockPool, hashes, pinned: list[int]) -> list[int]:
    """One request that goes on using its blocks until the next is done; every block's id."""
    block_ids = pool.acquire(hashes)
    for place in range(len(block_ids), min(len(hashes), len(block_ids) + pool.available())):
        block_ids += pool.allocate(1)
        assert pool.store(block_ids[-1], hashes[place], hashes[place - 1] if place else None)
    pool.release(pinned)
    return block_ids


@given(prompts, st.integers(1, BLOCKS))
def test_a_pool_that_sinks_in_time_evicts_what_one_without_tiers_evicts(asked, ahead):
    """One copy at a time: of several under way, what is clean already comes before what is not yet."""
    plain = BlockPool(BLOCKS)
    tiered = BlockPool(BLOCKS, lower=[(Tier.SSD, 400)], sink_ahead_blocks=ahead)
    pinned: list[int] = []
    for path in asked:
        hashes = chain(path)
        block_ids = serve(plain, hashes, pinned)
        assert serve(tiered, hashes, pinned) == block_ids
        pinned = block_ids
        while sinks := tiered.take_sinks(1):
            assert all(tiered.sunk(sink) for sink in sinks)
        stats = tiered.stats()
        assert stats.free + stats.cached == plain.available()
        for held in asked:
            assert tiered.match(chain(held)) == plain.match(chain(held))


@given(prompts)
def test_a_pool_that_sinks_in_time_loses_nothing(asked):
    pool = BlockPool(BLOCKS, lower=[(Tier.SSD, 400)], sink_ahead_blocks=BLOCKS)
    for place, path in enumerate(asked):
        pool.release(serve(pool, chain(path), []))
        while sinks := pool.take_sinks(4):
            assert all(pool.sunk(sink) for sink in sinks)
        assert all(pool.match_held(chain(held)) == len(held) for held in asked[: place + 1])
    assert pool.stats().dropped_total == 0
