"""A directory that follows an instance through lost, repeated and shuffled events."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvindex.core import BlockAction, BlockEvent, Tier
from protocol import inventory
from protocol.inventory import Appeared, Apply, AskInventory, Drop, EventsCame, InventoryCame, Replace

pytestmark = pytest.mark.unit


def stored(number: int) -> BlockEvent:
    return BlockEvent(BlockAction.STORED, number.to_bytes(16, "big"), Tier.DRAM)


class Directory:
    """Carries out effects as kvmeta does; an inventory asked for is answered by the test."""

    def __init__(self) -> None:
        self.sync, effects = inventory.begin(incarnation=1, now_s=0.0)
        self.blocks: set[bytes] = set()
        self.asked = 0
        self.carry_out(effects)

    def feed(self, event: inventory.Event, now_s: float = 0.0) -> None:
        self.sync, effects = inventory.step(self.sync, event, now_s)
        self.carry_out(effects)

    def carry_out(self, effects: tuple[inventory.Effect, ...]) -> None:
        for effect in effects:
            match effect:
                case AskInventory():
                    self.asked += 1
                case Apply(events):
                    self.blocks |= {event.block_hashes for event in events}
                case Replace(blocks):
                    self.blocks = {block_hash for block_hash, _, _ in blocks}
                case Drop():
                    self.blocks = set()


def as_of(number: int, incarnation: int = 1) -> InventoryCame:
    blocks = tuple((stored(n).block_hashes, None, Tier.DRAM) for n in range(1, number + 1))
    return InventoryCame(incarnation, number, blocks)


def expected(number: int) -> set[bytes]:
    return {stored(n).block_hashes for n in range(1, number + 1)}


def test_events_before_the_inventory_are_kept() -> None:
    directory = Directory()
    directory.feed(EventsCame(1, 3, (stored(3), stored(4))))
    assert not directory.sync.synchronised
    directory.feed(as_of(3))
    assert directory.sync.synchronised
    assert directory.blocks == expected(4)


def test_a_gap_asks_for_the_inventory() -> None:
    directory = Directory()
    directory.feed(as_of(0))
    directory.feed(EventsCame(1, 2, (stored(2),)))
    assert directory.asked == 2
    directory.feed(as_of(2))
    assert directory.blocks == expected(2)
    assert directory.sync.synchronised


def test_an_empty_message_shows_a_lost_last_event() -> None:
    directory = Directory()
    directory.feed(as_of(0))
    directory.feed(EventsCame(1, 1, ()))
    assert directory.asked == 1
    directory.feed(EventsCame(1, 2, ()))
    assert directory.asked == 2


def test_an_inventory_that_does_not_come_is_asked_again() -> None:
    directory = Directory()
    directory.feed(inventory.TimePassed(), now_s=0.5)
    assert directory.asked == 1
    directory.feed(inventory.TimePassed(), now_s=inventory.RETRY_INTERVAL_S)
    assert directory.asked == 2


def test_a_new_incarnation_starts_over_and_the_old_one_is_ignored() -> None:
    directory = Directory()
    directory.feed(as_of(2))
    directory.feed(Appeared(2))
    assert directory.blocks == set()
    directory.feed(EventsCame(1, 3, (stored(3),)))
    directory.feed(as_of(3, incarnation=1))
    assert directory.blocks == set()
    directory.feed(as_of(1, incarnation=2))
    assert directory.blocks == expected(1)


@settings(max_examples=200)
@given(st.integers(1, 40), st.integers(0, 2**32))
def test_lost_shuffled_and_repeated_events_end_in_the_truth(events: int, seed: int) -> None:
    """After one heartbeat and one answered inventory the directory is exact."""
    rng = random.Random(seed)
    directory = Directory()
    messages = [EventsCame(1, n, (stored(n),)) for n in range(1, events + 1)]
    delivered = [message for message in messages if rng.random() > 0.2]
    delivered += [message for message in messages if rng.random() > 0.7]
    rng.shuffle(delivered)
    for message in delivered:
        if rng.random() < 0.2:
            directory.feed(as_of(rng.randint(0, events)))
        directory.feed(message)
        assert directory.blocks <= expected(events)
    directory.feed(EventsCame(1, events + 1, ()))
    if not directory.sync.synchronised:
        directory.feed(as_of(events))
    assert directory.sync.synchronised, f"seed {seed}"
    assert directory.blocks == expected(events), f"seed {seed}"
