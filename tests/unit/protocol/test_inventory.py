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
        self.came: set[bytes] = set()
        self.sync, effects = inventory.begin(incarnation=1, now_s=0.0)
        self.blocks: set[bytes] = set()
        self.asked = 0
        self.carry_out(effects)

    def feed(self, event: inventory.Event, now_s: float = 0.0) -> None:
        self.sync, effects = inventory.step(self.sync, event, now_s)
        self.carry_out(effects)

    def answer(self, number: int, incarnation: int = 1) -> None:
        """An inventory of what was stored up to this event."""
        self.came = expected(number)
        self.feed(InventoryCame(incarnation, number))

    def carry_out(self, effects: tuple[inventory.Effect, ...]) -> None:
        for effect in effects:
            match effect:
                case AskInventory():
                    self.asked += 1
                case Apply(events):
                    self.blocks = self.blocks | {event.block_hashes for event in events}
                case Replace():
                    self.blocks = self.came
                case Drop():
                    self.blocks = set()


def expected(number: int) -> set[bytes]:
    return {stored(n).block_hashes for n in range(1, number + 1)}


def test_events_before_the_inventory_are_kept() -> None:
    directory = Directory()
    directory.feed(EventsCame(1, 3, (stored(3), stored(4))))
    assert not directory.sync.synchronised
    directory.answer(3)
    assert directory.sync.synchronised
    assert directory.blocks == expected(4)


def test_a_gap_asks_for_the_inventory() -> None:
    directory = Directory()
    directory.answer(0)
    directory.feed(EventsCame(1, 2, (stored(2),)))
    assert directory.asked == 2
    directory.answer(2)
    assert directory.blocks == expected(2)
    assert directory.sync.synchronised


def test_a_number_that_was_never_reached_costs_one_inventory() -> None:
    """A message that is not true: to wait for what precedes it would be to ask for ever."""
    directory = Directory()
    directory.answer(2)
    directory.feed(EventsCame(1, 1000, (stored(1000),)))
    assert directory.asked == 2
    directory.answer(2)
    assert directory.sync.synchronised
    assert directory.asked == 2
    directory.feed(EventsCame(1, 3, (stored(3),)))
    assert directory.blocks == expected(3)


def test_what_comes_while_the_inventory_does_may_cost_another_one_but_no_third() -> None:
    directory = Directory()
    directory.feed(EventsCame(1, 1000, (stored(1000),)))
    directory.answer(2)
    assert directory.asked == 2
    directory.answer(2)
    assert directory.sync.synchronised
    assert directory.asked == 2


def test_an_empty_message_shows_a_lost_last_event() -> None:
    directory = Directory()
    directory.answer(0)
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
    directory.answer(2)
    directory.feed(Appeared(2))
    assert directory.blocks == set()
    directory.feed(EventsCame(1, 3, (stored(3),)))
    directory.answer(3, incarnation=1)
    assert directory.blocks == set()
    directory.answer(1, incarnation=2)
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
            directory.answer(rng.randint(0, events))
        directory.feed(message)
        assert directory.blocks <= expected(events)
    directory.feed(EventsCame(1, events + 1, ()))
    if not directory.sync.synchronised:
        directory.answer(events)
    assert directory.sync.synchronised, f"seed {seed}"
    assert directory.blocks == expected(events), f"seed {seed}"


def test_held_events_are_bounded_and_the_newest_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever was dropped before it was asked, the inventory that then comes closes the gap."""
    monkeypatch.setattr(inventory, "HELD_EVENTS_MAX", 10)
    directory = Directory()
    for number in range(1, 101):
        directory.feed(EventsCame(1, number, (stored(number),)))
    assert directory.sync.held.events == 10
    directory.answer(95)
    assert directory.sync.synchronised
    assert directory.blocks == expected(100)
    assert directory.sync.held.events == 0


def test_a_stream_that_outruns_its_inventories_is_caught_up_with_once_one_comes_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Inventories that are too old are taken, as far as they go, and another one is asked for at once."""
    monkeypatch.setattr(inventory, "HELD_EVENTS_MAX", 10)
    directory = Directory()
    number = 0

    def say(events: int) -> None:
        nonlocal number
        for _ in range(events):
            number += 1
            directory.feed(EventsCame(1, number, (stored(number),)))

    for too_many in (30, 12, 11):
        asked_at, asked = number, directory.asked
        say(too_many)
        directory.answer(asked_at)
        assert not directory.sync.synchronised
        assert directory.asked == asked + 1
        assert directory.blocks == expected(asked_at)
    asked_at = number
    say(10)
    directory.answer(asked_at)
    assert directory.sync.synchronised
    assert directory.blocks == expected(number)


def test_held_blocks_are_bounded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inventory, "HELD_BLOCKS_MAX", 100)
    directory = Directory()
    for number in range(1, 20):
        event = BlockEvent(BlockAction.MOVED, bytes(16 * 30), Tier.DRAM)
        directory.feed(EventsCame(1, number, (event,)))
    assert (directory.sync.held.events, directory.sync.held.blocks) == (3, 90)
