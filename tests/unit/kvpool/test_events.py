"""EventLog: numbers, coalescing into chains, and its bounds."""

import pytest

import kvpool.events as events_module
from kvhash import BlockHash
from kvindex.core import BlockAction, BlockEvent, Tier
from kvpool.events import EventLog

pytestmark = pytest.mark.unit

A, B, C, D, E = (BlockHash(bytes([letter]) * 16) for letter in b"abcde")


def stored(block_hashes: bytes, parent: bytes = b"") -> BlockEvent:
    return BlockEvent(BlockAction.STORED, block_hashes, Tier.DRAM, parent)


def removed(block_hashes: bytes) -> BlockEvent:
    return BlockEvent(BlockAction.REMOVED, block_hashes, Tier.DRAM)


def moved(block_hashes: bytes, tier: Tier) -> BlockEvent:
    return BlockEvent(BlockAction.MOVED, block_hashes, tier)


def test_consecutive_blocks_of_one_chain_are_one_event():
    log = EventLog()
    log.stored(A, None, Tier.DRAM)
    log.stored(B, A, Tier.DRAM)
    log.stored(C, A, Tier.DRAM)
    log.stored(D, C, Tier.DRAM)
    log.stored(E, None, Tier.DRAM)
    assert log.last_number == 3
    assert log.take() == (1, (stored(A + B), stored(C + D, A), stored(E)))
    assert log.take() == (4, ())


def test_a_chain_does_not_continue_over_other_events():
    log = EventLog()
    log.stored(A, None, Tier.DRAM)
    log.removed(C, Tier.DRAM)
    log.removed(D, Tier.DRAM)
    log.stored(B, A, Tier.DRAM)
    assert log.take() == (1, (stored(A), removed(C + D), stored(B, A)))


def test_a_chain_is_cut_where_the_tier_changes():
    log = EventLog()
    log.stored(A, None, Tier.DRAM)
    log.stored(B, A, Tier.SSD)
    first, second = log.take()[1]
    assert (first.tier, second.tier, second.parent) == (Tier.DRAM, Tier.SSD, A)


def test_blocks_that_move_to_one_tier_are_one_event_whatever_their_chains():
    log = EventLog()
    log.moved(C, Tier.SSD)
    log.moved(B, Tier.SSD)
    log.moved(E, Tier.SSD)
    log.moved(B, Tier.DRAM)
    log.removed(E, Tier.SSD)
    log.moved(C, Tier.DRAM)
    assert log.take() == (
        1,
        (
            moved(C + B + E, Tier.SSD),
            moved(B, Tier.DRAM),
            BlockEvent(BlockAction.REMOVED, E, Tier.SSD),
            moved(C, Tier.DRAM),
        ),
    )


def test_a_taken_event_is_not_continued():
    log = EventLog()
    log.stored(A, None, Tier.DRAM)
    assert log.take() == (1, (stored(A),))
    log.stored(B, A, Tier.DRAM)
    assert log.take() == (2, (stored(B, A),))


def test_a_sealed_event_is_not_continued_but_later_ones_are():
    log = EventLog()
    log.stored(A, None, Tier.DRAM)
    log.seal()
    log.stored(B, A, Tier.DRAM)
    log.stored(C, B, Tier.DRAM)
    assert log.take() == (1, (stored(A), stored(B + C, A)))


def test_an_event_is_bounded(monkeypatch):
    monkeypatch.setattr(events_module, "EVENT_BLOCKS_MAX", 2)
    log = EventLog()
    for block_hash, parent in ((A, None), (B, A), (C, B)):
        log.stored(block_hash, parent, Tier.DRAM)
    for block_hash in (C, B, A):
        log.removed(block_hash, Tier.DRAM)
    assert log.take() == (1, (stored(A + B), stored(C, B), removed(C + B), removed(A)))


def test_past_its_bound_the_backlog_is_dropped_and_numbers_jump(monkeypatch):
    monkeypatch.setattr(events_module, "BACKLOG_BLOCKS_MAX", 3)
    log = EventLog()
    log.stored(A, None, Tier.DRAM)
    log.stored(B, None, Tier.DRAM)
    log.stored(C, B, Tier.DRAM)
    assert log.last_number == 2
    log.stored(D, C, Tier.DRAM)
    assert log.last_number == 3
    # Numbers 1 and 2 are never seen by anybody: a follower that waits for 1 finds the gap at once.
    assert log.take() == (3, (stored(D, C),))
    log.stored(E, D, Tier.DRAM)
    assert log.take() == (4, (stored(E, D),))


def test_the_backlog_never_holds_more_blocks_than_its_bound(monkeypatch):
    monkeypatch.setattr(events_module, "BACKLOG_BLOCKS_MAX", 10)
    log = EventLog()
    for number in range(95):
        log.stored(BlockHash(number.to_bytes(16, "big")), None, Tier.DRAM)
        assert sum(len(event.block_hashes) for event in log._events) <= 10
    first_number, events = log.take()
    assert (first_number, len(events)) == (91, 5)
