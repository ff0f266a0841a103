"""BlockPool by example: what a worker relies on."""

import numpy as np
import pytest

from kvhash import BlockHash, block_hashes, namespace, unpack
from kvindex.core import BlockAction, Tier
from kvpool import BlockPool, NoBlocksError, PoolStats

pytestmark = pytest.mark.unit

SPACE = namespace(b"", "model")


def prompt_chain(prompt: int, blocks: int) -> list[BlockHash]:
    return unpack(block_hashes(SPACE, np.arange(blocks * 16) + prompt * 1_000_000))


def fill(pool: BlockPool, hashes: list[BlockHash]) -> list[int]:
    """Store a whole chain in fresh blocks, which stay pinned."""
    block_ids = pool.allocate(len(hashes))
    for block_id, block_hash, parent in zip(block_ids, hashes, [None, *hashes], strict=False):
        assert pool.store(block_id, block_hash, parent)
    return block_ids


def cache(pool: BlockPool, hashes: list[BlockHash]) -> None:
    pool.release(fill(pool, hashes))


def test_a_released_prefix_stays_and_is_found_again():
    pool = BlockPool(8)
    hashes = prompt_chain(1, 3)
    block_ids = fill(pool, hashes)
    assert pool.stats() == PoolStats(blocks=8, free=5, cached=0, in_use=3)
    pool.release(block_ids)
    assert pool.stats() == PoolStats(blocks=8, free=5, cached=3, in_use=0)
    longer = [*hashes, *prompt_chain(2, 1)]
    assert pool.match(longer) == 3
    assert pool.acquire(longer) == block_ids
    assert pool.stats().in_use == 3


class CountedChain(list[BlockHash]):
    """Counts how many of its hashes were looked at."""

    looked_at = 0

    def __getitem__(self, index):
        self.looked_at += 1
        return super().__getitem__(index)

    def __iter__(self):
        raise AssertionError("the whole chain is walked")


@pytest.mark.parametrize("held", [0, 1, 500, 999, 1000])
def test_a_match_looks_at_few_hashes_however_long_the_prompt(held: int) -> None:
    """It is asked for every queued request at every load snapshot, on the event loop."""
    pool = BlockPool(1000)
    hashes = CountedChain(prompt_chain(1, 1000))
    cache(pool, hashes[:held])
    hashes.looked_at = 0
    assert pool.match(hashes) == held
    assert hashes.looked_at <= 11


def test_a_fresh_block_that_is_released_is_free():
    pool = BlockPool(2)
    pool.release(pool.allocate(2))
    assert pool.stats() == PoolStats(blocks=2, free=2, cached=0, in_use=0)
    assert pool.take_events() == (1, ())


def test_allocating_is_all_or_nothing():
    pool = BlockPool(4)
    cache(pool, prompt_chain(1, 2))
    held = pool.allocate(1)
    before = pool.inventory()
    with pytest.raises(NoBlocksError, match="4 blocks asked for, 3 available"):
        pool.allocate(4)
    assert pool.inventory() == before
    assert pool.stats() == PoolStats(blocks=4, free=1, cached=2, in_use=1)
    pool.release(held)
    assert sorted(pool.allocate(4)) == [0, 1, 2, 3]


def test_free_blocks_are_given_before_cached_ones_are_evicted():
    pool = BlockPool(4)
    hashes = prompt_chain(1, 2)
    cache(pool, hashes)
    pool.allocate(2)
    assert pool.match(hashes) == 2


def test_least_recently_used_goes_first_and_leaves_before_their_parents():
    pool = BlockPool(5, eviction="lru")
    old, new = prompt_chain(1, 3), prompt_chain(2, 2)
    cache(pool, old)
    cache(pool, new)
    pool.allocate(1)
    assert (pool.match(old), pool.match(new)) == (2, 2)
    pool.release(pool.acquire(old))
    pool.allocate(2)
    assert (pool.match(old), pool.match(new)) == (2, 0)


def test_least_often_used_goes_first():
    pool = BlockPool(4, eviction="lfu")
    often, seldom = prompt_chain(1, 2), prompt_chain(2, 2)
    cache(pool, often)
    pool.release(pool.acquire(often))
    cache(pool, seldom)
    pool.allocate(2)
    assert (pool.match(often), pool.match(seldom)) == (2, 0)


def test_uses_are_counted_anew_for_what_a_block_holds_next():
    pool = BlockPool(2, eviction="lfu")
    first, second, third = (prompt_chain(prompt, 1) for prompt in (1, 2, 3))
    (reused_id,) = fill(pool, first)
    pool.release([reused_id])
    for _ in range(5):
        pool.release(pool.acquire(first))
    block_ids = pool.allocate(2)
    (other_id,) = set(block_ids) - {reused_id}
    assert pool.store(reused_id, second[0], None)
    assert pool.store(other_id, third[0], None)
    pool.release(block_ids)
    pool.release(pool.acquire(third))
    assert pool.allocate(1) == [reused_id]
    assert (pool.match(second), pool.match(third)) == (0, 1)


def test_a_shared_prefix_outlives_one_of_its_continuations():
    pool = BlockPool(4)
    shared = prompt_chain(1, 2)
    left, right = prompt_chain(2, 1), prompt_chain(3, 1)
    cache(pool, shared)
    for tail in (left, right):
        (block_id,) = pool.allocate(1)
        assert pool.store(block_id, tail[0], shared[-1])
        pool.release([block_id])
    pool.allocate(1)
    assert pool.match([*shared, *left]) == 2
    assert pool.match([*shared, *right]) == 3


def test_a_pin_on_a_block_pins_its_ancestors():
    pool = BlockPool(4)
    hashes = prompt_chain(1, 3)
    block_ids = fill(pool, hashes)
    pool.release(block_ids[:2])
    assert pool.stats() == PoolStats(blocks=4, free=1, cached=0, in_use=3)
    with pytest.raises(NoBlocksError):
        pool.allocate(2)
    pool.release(block_ids[2:])
    assert pool.stats() == PoolStats(blocks=4, free=1, cached=3, in_use=0)
    assert len(pool.allocate(4)) == 4


def test_a_hash_that_is_held_already_is_not_stored_twice():
    pool = BlockPool(4)
    hashes = prompt_chain(1, 2)
    first = fill(pool, hashes)
    second = pool.allocate(2)
    assert not pool.store(second[0], hashes[0], None)
    assert pool.acquire(hashes[:1]) == first[:1]
    pool.release(second)
    assert pool.stats().free == 2


def test_a_block_whose_parent_is_not_held_is_not_stored():
    pool = BlockPool(2)
    parent, child = prompt_chain(1, 2)
    (block_id,) = pool.allocate(1)
    assert not pool.store(block_id, child, parent)
    assert pool.match([child]) == 0
    assert pool.store(block_id, parent, None)


def test_the_generation_grows_with_every_new_owner_only():
    pool = BlockPool(1)
    (block_id,) = pool.allocate(1)
    first = pool.generation(block_id)
    hashes = prompt_chain(1, 1)
    pool.store(block_id, hashes[0], None)
    pool.release([block_id])
    assert pool.acquire(hashes) == [block_id]
    pool.retain([block_id])
    pool.release([block_id, block_id])
    assert pool.generation(block_id) == first
    assert pool.allocate(1) == [block_id]
    assert pool.generation(block_id) > first


def test_every_pin_must_be_released():
    pool = BlockPool(2)
    block_ids = pool.allocate(1)
    pool.retain(block_ids)
    pool.release(block_ids)
    assert pool.stats().in_use == 1
    pool.release(block_ids)
    assert pool.stats().in_use == 0


@pytest.mark.parametrize("block_id", [0, 1, -1])
def test_breaking_the_contract_is_an_assertion_error(block_id):
    pool = BlockPool(3)
    assert pool.allocate(3) == [0, 1, 2]
    pool.release([0, 1])
    cache(pool, prompt_chain(1, 1))
    with pytest.raises(AssertionError, match="is not pinned"):
        pool.release([block_id])
    with pytest.raises(AssertionError, match="is not pinned"):
        pool.retain([block_id])
    with pytest.raises(AssertionError, match="is not pinned"):
        pool.store(block_id, prompt_chain(2, 1)[0], None)
    pool.check_integrity()


def test_a_stored_block_is_not_stored_again():
    pool = BlockPool(1)
    (block_id,) = fill(pool, prompt_chain(1, 1))
    with pytest.raises(AssertionError, match="stored already"):
        pool.store(block_id, prompt_chain(2, 1)[0], None)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"blocks": 0}, "blocks: 0, at least 1"),
        ({"blocks": 1, "eviction": "fifo"}, "eviction: 'fifo', one of lru, lfu"),
    ],
)
def test_bad_settings_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        BlockPool(**arguments)


def test_a_negative_count_is_refused():
    with pytest.raises(ValueError, match="count: -1, at least 0"):
        BlockPool(1).allocate(-1)


def test_events_tell_chains_stored_and_removed():
    pool = BlockPool(3, tier=Tier.DEVICE)
    hashes = prompt_chain(1, 3)
    cache(pool, hashes)
    pool.allocate(3)
    first_number, (stored, removed) = pool.take_events()
    assert first_number == 1
    assert (stored.action, stored.parent, stored.tier) == (BlockAction.STORED, b"", Tier.DEVICE)
    assert unpack(stored.block_hashes) == hashes
    assert removed.action is BlockAction.REMOVED
    assert unpack(removed.block_hashes) == hashes[::-1]
    assert pool.take_events() == (3, ())


def test_an_inventory_lists_parents_first_and_counts_untaken_events():
    pool = BlockPool(4)
    assert pool.inventory() == (0, [])
    hashes = prompt_chain(1, 2)
    fill(pool, hashes)
    assert pool.inventory() == (1, [(hashes[0], None, Tier.DRAM), (hashes[1], hashes[0], Tier.DRAM)])


def test_what_happens_after_an_inventory_is_not_in_an_event_that_it_covers():
    pool = BlockPool(4)
    hashes = prompt_chain(1, 3)
    block_ids = pool.allocate(3)
    pool.store(block_ids[0], hashes[0], None)
    as_of, _ = pool.inventory()
    pool.store(block_ids[1], hashes[1], hashes[0])
    first_number, events = pool.take_events()
    after = events[as_of + 1 - first_number :]
    assert [(event.block_hashes, event.parent) for event in after] == [(hashes[1], hashes[0])]


def test_what_is_not_to_be_trusted_is_forgotten_children_first() -> None:
    pool = BlockPool(8)
    hashes = prompt_chain(1, 3)
    block_ids = fill(pool, hashes)
    pool.take_events()
    pool.release(block_ids)
    pool.forget(block_ids)
    assert pool.match(hashes) == 0
    assert pool.stats() == PoolStats(blocks=8, free=8, cached=0, in_use=0)
    _, events = pool.take_events()
    removed = b"".join(event.block_hashes for event in events if event.action is BlockAction.REMOVED)
    assert unpack(removed) == hashes[::-1]
    pool.check_integrity()


def test_what_others_use_is_not_forgotten() -> None:
    pool = BlockPool(8)
    hashes = prompt_chain(1, 3)
    block_ids = fill(pool, hashes)
    pool.retain(block_ids[:2])
    pool.release(block_ids)
    pool.forget(block_ids)
    assert pool.match(hashes) == 2
    pool.check_integrity()
