"""What a deep block's credit is measured by, under the order that weighs what computing it again costs."""

import pytest
from tests.support.prompt_tree import chain

from kvindex.core import Tier
from kvpool import BlockPool, Copy
from policy.evict import NEVER_DOUBLES

pytestmark = pytest.mark.unit

LONG, SHORT = chain((0,) * 5), [chain((number,))[0] for number in range(1, 6)]


def cache(pool: BlockPool, hashes, parent=None) -> None:
    for block_hash in hashes:
        (block_id,) = pool.allocate(1)
        assert pool.store(block_id, block_hash, parent)
        pool.release([block_id])
        parent = block_hash


def pool_of(doubles_at_blocks: int | None, **lower: object) -> BlockPool:
    pool = BlockPool(10, eviction="length_aware", **lower)
    if doubles_at_blocks is not None:
        pool.set_cost_doubles_at_blocks(doubles_at_blocks)
    return pool


@pytest.mark.parametrize(("doubles_at_blocks", "long_stays"), [(None, 4), (NEVER_DOUBLES, 4), (2, 5)])
def test_a_deep_block_stays_as_long_as_its_measured_cost_is_worth(doubles_at_blocks, long_stays):
    pool = pool_of(doubles_at_blocks)
    cache(pool, LONG)
    for block_hash in SHORT:
        cache(pool, [block_hash])
    pool.allocate(1)
    assert pool.match(LONG) == long_stays


def test_it_holds_for_what_a_restart_found_too():
    pool = pool_of(2, lower=[(Tier.SSD, 10)])
    copies = [Copy(place, LONG[place], LONG[place - 1] if place else None) for place in range(len(LONG))]
    copies += [Copy(5 + place, block_hash, None) for place, block_hash in enumerate(SHORT)]
    assert pool.restore(Tier.SSD, copies) == 10
    victim = pool._lower[Tier.SSD].tree.victim()
    assert victim is not None
    assert victim.facts.block_hash == SHORT[0]


def test_the_scale_is_not_changed_while_blocks_are_in_line_by_another():
    pool = pool_of(None)
    cache(pool, LONG)
    with pytest.raises(AssertionError, match="by another scale"):
        pool.set_cost_doubles_at_blocks(2)
