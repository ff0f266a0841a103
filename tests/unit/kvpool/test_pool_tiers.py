"""BlockPool over several tiers by example: what sinks, what rises, and what becomes of copies meanwhile."""

import numpy as np
import pytest

from kvhash import BlockHash, block_hashes, namespace, unpack
from kvindex.core import BlockAction, Tier, TierRun
from kvpool import BlockPool, Copy, Sink

pytestmark = pytest.mark.unit

SPACE = namespace(b"", "model")


def prompt_chain(prompt: int, blocks: int) -> list[BlockHash]:
    return unpack(block_hashes(SPACE, np.arange(blocks * 16) + prompt * 1_000_000))


def cache(pool: BlockPool, hashes: list[BlockHash]) -> None:
    """Serve a prompt whose computed blocks are all released."""
    block_ids = pool.acquire(hashes)
    for block_hash in hashes[len(block_ids) :]:
        (block_id,) = pool.allocate(1)
        parent = hashes[len(block_ids) - 1] if block_ids else None
        assert pool.store(block_id, block_hash, parent)
        block_ids.append(block_id)
    pool.release(block_ids)


def erase_all(pool: BlockPool) -> list[int]:
    """Erase what must not be found again."""
    erased: list[int] = []
    for tier in pool.stats().tiers:
        while slots := pool.erasures(tier.tier, 4):
            for slot in slots:
                pool.end_erasure(tier.tier, slot, erased=True)
            erased += slots
    return erased


def sink_all(pool: BlockPool, ahead_blocks: int | None = None) -> list[Sink]:
    """Make every copy that the pool asks for."""
    done: list[Sink] = []
    erase_all(pool)
    while sinks := pool.take_sinks(4, ahead_blocks):
        done += [sink for sink in sinks if pool.sunk(sink)]
    pool.check_integrity()
    return done


def rise_all(pool: BlockPool, hashes: list[BlockHash]) -> list[int]:
    """Bring up what can be, and release it."""
    block_ids = [pool.risen(rise) for rise in pool.begin_rise(hashes)]
    risen = [block_id for block_id in block_ids if block_id is not None]
    pool.release(risen)
    pool.check_integrity()
    return risen


def give_up_all(pool: BlockPool) -> None:
    """Every block is asked for once."""
    pool.release(pool.allocate(pool.available()))


def two_tiers(blocks: int = 4, slots: int = 8, ahead: int = 4, eviction: str = "lru") -> BlockPool:
    return BlockPool(blocks, eviction=eviction, lower=[(Tier.SSD, slots)], sink_ahead_blocks=ahead)


def three_tiers(blocks: int, slots: int, ssd_slots: int, ahead: int) -> BlockPool:
    lower = [(Tier.DRAM, slots), (Tier.SSD, ssd_slots)]
    return BlockPool(blocks, tier=Tier.DEVICE, lower=lower, sink_ahead_blocks=ahead)


def actions(pool: BlockPool) -> list[tuple[BlockAction, Tier, list[BlockHash]]]:
    _, events = pool.take_events()
    return [(event.action, event.tier, unpack(event.block_hashes)) for event in events]


def test_what_was_copied_down_moves_when_it_is_evicted_and_again_when_it_rises():
    pool, hashes = two_tiers(), prompt_chain(1, 3)
    cache(pool, hashes)
    pool.take_events()
    assert [sink.block_hash for sink in sink_all(pool)] == hashes
    assert actions(pool) == []
    assert pool.tier_runs(hashes) == (TierRun(Tier.DRAM, 3),)

    give_up_all(pool)
    assert actions(pool) == [(BlockAction.MOVED, Tier.SSD, hashes[::-1])]
    assert (pool.match(hashes), pool.match_held(hashes)) == (0, 3)
    assert pool.tier_runs(hashes) == (TierRun(Tier.SSD, 3),)

    assert len(rise_all(pool, hashes)) == 3
    assert actions(pool) == [(BlockAction.MOVED, Tier.DRAM, hashes)]
    give_up_all(pool)
    assert pool.match_held(hashes) == 3, "the copies below had stayed"
    assert pool.stats().dropped_total == 0


def test_what_has_to_go_before_it_was_copied_is_dropped():
    pool, hashes = two_tiers(), prompt_chain(1, 4)
    cache(pool, hashes)
    for sink in pool.take_sinks(2):
        assert pool.sunk(sink)
    pool.take_events()
    pool.allocate(3)
    assert actions(pool) == [
        (BlockAction.REMOVED, Tier.DRAM, [hashes[3], hashes[2]]),
        (BlockAction.MOVED, Tier.SSD, [hashes[1]]),
    ]
    assert pool.stats().dropped_total == 2
    assert pool.match_held(hashes) == 2


def test_what_goes_next_is_copied_first_and_its_ancestors_before_it():
    pool = two_tiers(blocks=8, ahead=2)
    old, new = prompt_chain(1, 3), prompt_chain(2, 3)
    cache(pool, old)
    cache(pool, new)
    assert pool.take_sinks(8) == (), "two blocks are free"
    fresh = pool.allocate(2)
    first, second = pool.take_sinks(8)
    assert [first.block_hash, second.block_hash] == old[:2]
    assert [first.parent, second.parent] == [None, old[0]]
    assert pool.take_sinks(8) == (), "as many are on their way as shall be ready"
    assert pool.sunk(first)
    assert pool.sunk(second)
    (third,) = pool.take_sinks(1)
    assert third.block_hash == old[2]
    assert pool.sunk(third)
    pool.release(fresh)


def test_blocks_in_use_are_copied_for_the_sake_of_those_that_go():
    pool, hashes = two_tiers(), prompt_chain(1, 4)
    cache(pool, hashes)
    pool.acquire(hashes[:2])
    assert [sink.block_hash for sink in sink_all(pool)] == hashes


def test_a_hot_prefix_that_is_clean_does_not_keep_cold_blocks_from_being_copied():
    """Counting clean blocks is not enough: what matters is what goes next."""
    pool = two_tiers(blocks=8, slots=32, ahead=3)
    hot = prompt_chain(1, 4)
    cache(pool, hot)
    sink_all(pool, 8)
    cold = [prompt_chain(prompt, 1) for prompt in range(2, 12)]
    for hashes in cold:
        cache(pool, hashes)
        cache(pool, hot)
        sink_all(pool)
    assert pool.stats().dropped_total == 0
    assert all(pool.match_held(hashes) == 1 for hashes in cold)
    assert pool.match(hot) == 4


def test_blocks_on_their_way_down_go_last():
    """Else a pool under pressure throws away each copy that it begins."""
    pool = two_tiers(blocks=4, ahead=2)
    for prompt in range(1, 5):
        cache(pool, prompt_chain(prompt, 1))
    sinks = pool.take_sinks(2)
    assert [sink.block_hash for sink in sinks] == [*prompt_chain(1, 1), *prompt_chain(2, 1)]
    pool.allocate(2)
    assert [pool.match_held(prompt_chain(prompt, 1)) for prompt in range(1, 5)] == [1, 1, 0, 0]
    assert all(pool.sunk(sink) for sink in sinks)
    assert len(pool.allocate(2)) == 2
    assert [pool.match_held(prompt_chain(prompt, 1)) for prompt in range(1, 5)] == [1, 1, 0, 0]


def test_a_copy_of_a_block_that_was_given_to_somebody_else_is_thrown_away():
    pool, (block_hash,) = two_tiers(blocks=1), prompt_chain(1, 1)
    cache(pool, [block_hash])
    (sink,) = pool.take_sinks(4)
    assert sink.generation == pool.generation(0)
    cache(pool, prompt_chain(2, 1))
    assert not pool.sunk(sink)
    assert pool.match_held([block_hash]) == 0
    assert pool.stats().tiers[0].discarded_total == 1
    pool.check_integrity()
    assert erase_all(pool) == [sink.slot], "its record may say that it is the block"
    assert pool.stats().tiers[0].free == 8
    pool.check_integrity()


def test_a_block_that_is_stored_again_while_its_predecessor_is_copied_is_copied_afterwards():
    pool, (block_hash,) = two_tiers(blocks=1), prompt_chain(1, 1)
    cache(pool, [block_hash])
    (sink,) = pool.take_sinks(4)
    cache(pool, prompt_chain(2, 1))
    cache(pool, [block_hash])
    assert pool.take_sinks(4) == ()
    pool.check_integrity()
    assert not pool.sunk(sink), "the bytes may be those of the other block"
    assert [sink.block_hash for sink in sink_all(pool)] == [block_hash]


def test_a_child_that_is_reported_before_its_parent_is_thrown_away_and_copied_again():
    pool, hashes = two_tiers(), prompt_chain(1, 2)
    cache(pool, hashes)
    parent, child = pool.take_sinks(4)
    assert not pool.sunk(child)
    assert pool.sunk(parent)
    assert [sink.block_hash for sink in sink_all(pool)] == hashes[1:]


def test_what_could_not_be_copied_is_tried_again_when_it_is_used_again():
    """A full disk must not be written to over and over for the same blocks."""
    pool, hashes = two_tiers(), prompt_chain(1, 3)
    cache(pool, hashes)
    for sink in pool.take_sinks(4):
        pool.sink_failed(sink)
    pool.check_integrity()
    assert pool.take_sinks(4) == ()
    cache(pool, hashes)
    assert [sink.block_hash for sink in sink_all(pool)] == hashes
    assert pool.match_held(hashes) == 3


def test_a_full_tier_gives_up_what_is_worth_less_and_nothing_goes_round_in_circles():
    pool = two_tiers(blocks=4, slots=2)
    for prompt in range(1, 5):
        cache(pool, prompt_chain(prompt, 1))
    assert [sink.block_hash for sink in sink_all(pool)] == [
        prompt_chain(prompt, 1)[0] for prompt in range(1, 5)
    ]
    assert pool.stats().tiers[0].evicted_total == 2
    assert sink_all(pool) == []
    give_up_all(pool)
    assert [pool.match_held(prompt_chain(prompt, 1)) for prompt in range(1, 5)] == [0, 0, 1, 1]


def test_nothing_makes_room_for_what_is_worth_less_than_it():
    pool = two_tiers(blocks=2, slots=2, eviction="lfu")
    often, seldom = prompt_chain(1, 2), prompt_chain(2, 2)
    for _ in range(3):
        cache(pool, often)
    sink_all(pool)
    cache(pool, seldom)
    assert sink_all(pool) == []
    assert rise_all(pool, often)
    assert (pool.match_held(often), pool.match_held(seldom)) == (2, 0)


def test_a_chain_longer_than_the_tier_below_keeps_its_beginning():
    pool, hashes = two_tiers(blocks=8, slots=3, ahead=8), prompt_chain(1, 8)
    cache(pool, hashes)
    sink_all(pool)
    give_up_all(pool)
    assert pool.match_held(hashes) == 3
    assert pool.stats().dropped_total == 5


def test_a_parent_stays_while_its_child_is_copied_down():
    pool = two_tiers(blocks=3, slots=2)
    hashes, other = prompt_chain(1, 2), prompt_chain(2, 1)
    cache(pool, hashes)
    parent, child = pool.take_sinks(4)
    assert pool.sunk(parent)
    cache(pool, other)
    assert pool.take_sinks(4) == (), "the only slot that could be given up is waited for"
    assert pool.sunk(child)
    assert [sink.block_hash for sink in sink_all(pool)] == other, "the child has gone for it"
    assert pool.stats().tiers[0].copies == 2


def test_a_parent_that_is_worth_less_does_not_make_room_for_its_own_child():
    pool, hashes = two_tiers(slots=1), prompt_chain(1, 2)
    parent_id, child_id = pool.allocate(2)
    pool.store(parent_id, hashes[0], None)
    pool.store(child_id, hashes[1], hashes[0])
    pool.release([parent_id])
    pool.release([child_id])
    assert [sink.block_hash for sink in sink_all(pool)] == hashes[:1]
    give_up_all(pool)
    assert pool.match_held(hashes) == 1


def test_use_of_a_block_keeps_its_copy_below():
    """What lies in memory and is hot is not the first to go from the SSD because nobody reads it there."""
    pool = two_tiers(blocks=3, slots=2)
    hot, cold = prompt_chain(1, 1), prompt_chain(2, 1)
    cache(pool, hot)
    cache(pool, cold)
    sink_all(pool)
    cache(pool, hot)
    cache(pool, prompt_chain(3, 1))
    sink_all(pool)
    give_up_all(pool)
    assert (pool.match_held(hot), pool.match_held(cold)) == (1, 0)


def test_what_is_computed_again_meanwhile_is_shared_with_what_rises():
    pool, hashes = two_tiers(), prompt_chain(1, 1)
    cache(pool, hashes)
    sink_all(pool)
    give_up_all(pool)
    (rise,) = pool.begin_rise(hashes)
    (computed_id,) = pool.allocate(1)
    assert pool.store(computed_id, hashes[0], None)
    assert pool.risen(rise) == computed_id
    pool.release([computed_id])
    assert pool.stats().in_use == 1, "both of them have it"
    pool.release([computed_id])
    assert pool.stats().in_use == 0
    pool.check_integrity()


def test_a_block_that_lies_below_is_taken_up_by_who_computes_it():
    pool, hashes = two_tiers(), prompt_chain(1, 2)
    cache(pool, hashes)
    sink_all(pool)
    give_up_all(pool)
    pool.take_events()
    cache(pool, hashes)
    assert actions(pool) == [(BlockAction.MOVED, Tier.DRAM, hashes)]
    assert pool.take_sinks(4) == (), "it has its copy"


def test_a_copy_that_is_no_good_takes_what_hangs_on_it():
    pool, hashes = two_tiers(blocks=4), prompt_chain(1, 4)
    cache(pool, hashes)
    sink_all(pool)
    give_up_all(pool)
    pool.take_events()
    first, second, *others = pool.begin_rise(hashes, blocks_max=3)
    assert pool.risen(first) is not None
    pool.rise_failed(second, lost=True)
    assert actions(pool) == [
        (BlockAction.MOVED, Tier.DRAM, hashes[:1]),
        (BlockAction.REMOVED, Tier.SSD, [hashes[3], hashes[2], hashes[1]]),
    ]
    assert pool.stats().tiers[0].lost_total == 3
    assert [pool.risen(rise) for rise in others] == [None]
    pool.check_integrity()


def test_the_slot_of_a_lost_copy_is_not_given_away_before_its_last_reader_is_done():
    pool, (block_hash,) = two_tiers(blocks=4, slots=1), prompt_chain(1, 1)
    cache(pool, [block_hash])
    sink_all(pool)
    give_up_all(pool)
    (first,) = pool.begin_rise([block_hash])
    (second,) = pool.begin_rise([block_hash])
    pool.rise_failed(first, lost=True)
    cache(pool, prompt_chain(2, 1))
    assert pool.take_sinks(4) == ()
    assert pool.stats().tiers[0].moving == 1
    assert pool.risen(second) is None
    assert len(sink_all(pool)) == 1


def test_what_is_lost_is_erased_children_first_and_of_no_use_before():
    pool, hashes = two_tiers(slots=3), prompt_chain(1, 3)
    cache(pool, hashes)
    slots = [sink.slot for sink in sink_all(pool)]
    give_up_all(pool)
    first, *others = pool.begin_rise(hashes)
    pool.rise_failed(first, lost=True)
    assert pool.erasures(Tier.SSD, 8) == (slots[0],), "the others are still read"
    for rise in others:
        pool.rise_failed(rise, lost=False)
    assert pool.erasures(Tier.SSD, 8) == tuple(reversed(slots))
    assert pool.stats().tiers[0].free == 0
    pool.end_erasure(Tier.SSD, slots[2], erased=False)
    assert pool.erasures(Tier.SSD, 2) == (slots[1], slots[0]), "what could not be erased is last"
    pool.end_erasure(Tier.SSD, slots[1], erased=True)
    assert pool.stats().tiers[0].free == 1
    with pytest.raises(AssertionError, match="is not to be erased"):
        pool.end_erasure(Tier.SSD, slots[1], erased=True)
    pool.check_integrity()


def test_a_copy_that_is_read_is_not_evicted():
    pool, hashes = two_tiers(blocks=4, slots=1), prompt_chain(1, 1)
    cache(pool, hashes)
    sink_all(pool)
    give_up_all(pool)
    (rise,) = pool.begin_rise(hashes)
    cache(pool, prompt_chain(2, 1))
    assert pool.take_sinks(4) == ()
    assert pool.risen(rise) == rise.block_id


def test_what_rises_does_not_push_out_the_prefix_that_it_follows():
    pool, hashes = two_tiers(blocks=4, slots=8), prompt_chain(1, 4)
    cache(pool, hashes)
    sink_all(pool)
    pool.allocate(2)
    assert pool.match(hashes) == 2
    assert pool.begin_rise(hashes) == (), "nothing else could make room"
    assert pool.match(hashes) == 2
    assert pool.stats().in_use == 2, "the prefix is cached as before"


def test_a_cancelled_rise_leaves_everything_as_it_was():
    pool, hashes = two_tiers(), prompt_chain(1, 3)
    cache(pool, hashes)
    sink_all(pool)
    give_up_all(pool)
    before = pool.stats()
    for rise in pool.begin_rise(hashes):
        pool.rise_failed(rise, lost=False)
    assert pool.stats() == before
    assert pool.match_held(hashes) == 3
    pool.check_integrity()


def test_what_is_not_to_be_trusted_is_forgotten_in_every_tier():
    pool, hashes = two_tiers(), prompt_chain(1, 3)
    cache(pool, hashes)
    sink_all(pool)
    pool.allocate(2)
    block_ids = pool.acquire(hashes)
    pool.release(block_ids)
    pool.forget(block_ids)
    assert pool.inventory()[1] == []
    pool.check_integrity()


def test_three_tiers_sink_step_by_step():
    pool = three_tiers(blocks=4, slots=6, ssd_slots=8, ahead=3)
    for prompt in range(1, 11):
        cache(pool, prompt_chain(prompt, 1))
        sink_all(pool)
    tiers = [pool.tier_runs(prompt_chain(prompt, 1)) for prompt in range(1, 11)]
    assert [run.tier for (run,) in tiers] == [Tier.SSD] * 3 + [Tier.DRAM] * 3 + [Tier.DEVICE] * 4
    assert pool.stats().dropped_total == 0
    assert pool.stats().gone_total == 0


def test_a_prefix_lies_in_ever_slower_tiers_and_rises_as_a_whole():
    pool = three_tiers(blocks=6, slots=4, ssd_slots=12, ahead=6)
    long = prompt_chain(1, 6)
    cache(pool, long)
    sink_all(pool)
    runs = pool.tier_runs(long)
    assert runs == (TierRun(Tier.DEVICE, 6),)
    fresh = pool.allocate(4)
    assert [run.tier for run in pool.tier_runs(long)] == [Tier.DEVICE, Tier.DRAM]
    assert pool.match_held(long) == 4, "DRAM had no room for more: it holds nothing that is worth less"
    pool.release(fresh)
    assert len(rise_all(pool, long)) == 2
    assert pool.match(long) == 4


def test_a_tier_does_not_wait_for_one_that_fails():
    pool = three_tiers(blocks=2, slots=2, ssd_slots=8, ahead=1)
    for prompt in range(1, 5):
        cache(pool, prompt_chain(prompt, 1))
        for sink in pool.take_sinks(8, into=Tier.DRAM):
            assert pool.sunk(sink)
    assert not pool.take_sinks(8, into=Tier.DRAM), "what DRAM holds shall be copied down first"
    pool.tier_fails(Tier.SSD, True)
    for prompt in range(5, 7):
        cache(pool, prompt_chain(prompt, 1))
        (sink,) = pool.take_sinks(8, into=Tier.DRAM)
        assert pool.sunk(sink)
    assert pool.stats().tiers[0].copies == 2
    pool.tier_fails(Tier.SSD, False)
    cache(pool, prompt_chain(7, 1))
    assert not pool.take_sinks(8, into=Tier.DRAM)
    pool.check_integrity()


def test_a_child_does_not_rise_where_its_parent_did_not():
    pool, hashes = two_tiers(), prompt_chain(1, 2)
    cache(pool, hashes)
    sink_all(pool)
    give_up_all(pool)
    parent, child = pool.begin_rise(hashes)
    pool.rise_failed(parent, lost=False)
    assert pool.risen(child) is None
    assert pool.stats().in_use == 0
    assert pool.match_held(hashes) == 2
    pool.check_integrity()


def test_restoring_takes_whole_chains_in_any_order():
    a, b, c, d = prompt_chain(1, 4)
    x, y = prompt_chain(2, 2)
    copies = [
        Copy(5, c, b),
        Copy(3, b, a),
        Copy(0, a, None),
        Copy(1, y, x),  # x is not there
        Copy(2, c, b),  # c again
        Copy(3, d, c),  # slot 3 again
        Copy(99, x, None),  # no such slot
    ]
    pool = two_tiers()
    assert pool.restore(Tier.SSD, copies) == 3
    assert pool.tier_runs([a, b, c, d]) == (TierRun(Tier.SSD, 3),)
    assert pool.match_held([x, y]) == 0
    assert actions(pool) == [(BlockAction.STORED, Tier.SSD, [a, b, c])]
    pool.check_integrity()
    assert [rise.slot for rise in pool.begin_rise([a, b, c, d])] == [0, 3, 5]


def test_of_what_was_restored_the_oldest_goes_first():
    pool = two_tiers(blocks=2, slots=2)
    first, second = prompt_chain(1, 1)[0], prompt_chain(2, 1)[0]
    assert pool.restore(Tier.SSD, [Copy(1, first, None), Copy(0, second, None)]) == 2
    cache(pool, prompt_chain(3, 1))
    sink_all(pool)
    assert (pool.match_held([first]), pool.match_held([second])) == (0, 1)


def test_what_comes_after_a_restart_is_newer_than_all_that_was_restored():
    pool = two_tiers(blocks=2, slots=8)
    old = [prompt_chain(prompt, 1)[0] for prompt in range(8)]
    assert pool.restore(Tier.SSD, [Copy(slot, old[slot], None) for slot in range(8)]) == 8
    for prompt in range(8, 14):
        cache(pool, prompt_chain(prompt, 1))
        sink_all(pool)
    assert [pool.match_held(prompt_chain(prompt, 1)) for prompt in range(14)] == [0] * 6 + [1] * 8


def test_a_chain_that_is_restored_in_a_ring_is_left_out():
    a, b = prompt_chain(1, 2)
    pool = two_tiers()
    assert pool.restore(Tier.SSD, [Copy(0, a, b), Copy(1, b, a)]) == 0
    assert pool.stats().tiers[0].free == 8


def test_without_a_tier_below_nothing_sinks_and_nothing_rises():
    pool, hashes = BlockPool(2, sink_ahead_blocks=2), prompt_chain(1, 2)
    cache(pool, hashes)
    assert pool.take_sinks(4) == ()
    assert pool.begin_rise(hashes) == ()
    assert pool.stats().tiers == ()
    give_up_all(pool)
    assert (pool.stats().gone_total, pool.stats().dropped_total) == (2, 0)


def test_a_report_of_what_is_not_under_way_breaks_the_contract():
    pool, hashes = two_tiers(), prompt_chain(1, 1)
    cache(pool, hashes)
    (sink,) = pool.take_sinks(1)
    assert pool.sunk(sink)
    with pytest.raises(AssertionError, match="is not under way"):
        pool.sunk(sink)
    with pytest.raises(AssertionError, match="is not under way"):
        pool.sink_failed(sink)
    give_up_all(pool)
    (rise,) = pool.begin_rise(hashes)
    pool.rise_failed(rise, lost=False)
    with pytest.raises(AssertionError, match="is not under way"):
        pool.risen(rise)
    pool.check_integrity()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lower": [(Tier.SSD, 0)]}, "lower: 0 slots in ssd"),
        ({"lower": [(Tier.DRAM, 4)]}, "dram below dram"),
        ({"lower": [(Tier.SSD, 4), (Tier.DRAM, 4)]}, "dram below ssd"),
        ({"sink_ahead_blocks": -1}, "sink_ahead_blocks: -1, at least 0"),
    ],
)
def test_tiers_that_make_no_pool_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        BlockPool(4, **settings)


def test_a_batch_of_nothing_is_refused():
    with pytest.raises(ValueError, match="blocks_max: 0, at least 1"):
        two_tiers().take_sinks(0)


def test_what_the_pool_keeps_does_not_grow_with_what_passes_through():
    pool = two_tiers(blocks=8, slots=16, ahead=4)
    for prompt in range(400):
        hashes = prompt_chain(prompt, 3)
        cache(pool, hashes)
        sink_all(pool)
        rise_all(pool, prompt_chain(max(0, prompt - 3), 3))
        pool.take_events()
    assert len(pool._inventory) <= 8 + 16
    assert not pool._sinks._in_flight
    assert not pool._rises._in_flight
    (lower,) = pool._stack.lower
    assert not lower._awaited
    assert not lower._readers
    assert sum(len(path) for path in pool._sinks._paths.values()) <= 8
