"""How a directory stays true to one instance: numbered events, gaps, inventories (DESIGN §5).

One `Sync` per instance. Events are applied only in an unbroken row from an inventory on; whatever is
lost, late or repeated leads to a new inventory, never to a directory that stays wrong.
"""

from dataclasses import dataclass, field, replace

from kvhash import HASH_BYTES
from kvindex.core import BlockEvent

HELD_EVENTS_MAX = 16_384
HELD_BLOCKS_MAX = 131_072
"""Events and their blocks that are kept while an inventory is under way; past it the oldest are dropped.

The newest are what is needed: an inventory stands for all that its instance did until it was asked. It
closes the gap where the events after it are still kept when it has come, that is at any rate below
HELD_EVENTS_MAX in the time that an inventory takes, however many were dropped before.
"""
RETRY_INTERVAL_S = 1.0
"""An inventory that did not come is asked for again after this."""


@dataclass(frozen=True, slots=True)
class Held:
    """Messages that came ahead of the inventory, in the order in which they came."""

    messages: tuple["EventsCame", ...] = ()
    events: int = 0
    blocks: int = 0

    def with_message(self, message: "EventsCame") -> "Held":
        """With this one, and without the oldest as far as the bounds demand."""
        if not message.events:
            return self
        messages = (*self.messages, message)
        events, blocks = self.events + len(message.events), self.blocks + _blocks(message)
        dropped = 0
        while dropped < len(messages) and (events > HELD_EVENTS_MAX or blocks > HELD_BLOCKS_MAX):
            events -= len(messages[dropped].events)
            blocks -= _blocks(messages[dropped])
            dropped += 1
        return Held(messages[dropped:], events, blocks)


@dataclass(frozen=True, slots=True)
class Sync:
    """What the directory knows of one instance's event stream. `next_number` None: no inventory yet."""

    incarnation: int
    next_number: int | None = None
    held: Held = field(default_factory=Held)
    asked_at_s: float | None = None

    @property
    def synchronised(self) -> bool:
        return self.next_number is not None and self.asked_at_s is None


# --- events -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Appeared:
    """The instance is registered (again), with this incarnation."""

    incarnation: int


@dataclass(frozen=True, slots=True)
class EventsCame:
    """Without any `events` it still says which number comes next: a lost last event shows."""

    incarnation: int
    first_number: int
    events: tuple[BlockEvent, ...]


@dataclass(frozen=True, slots=True)
class InventoryCame:
    """Whole and sound. Its blocks stay with whoever received them: nothing here depends on them."""

    incarnation: int
    as_of_number: int


@dataclass(frozen=True, slots=True)
class TimePassed:
    """Also says that an inventory asked for did not come, once RETRY_INTERVAL_S are over."""


Event = Appeared | EventsCame | InventoryCame | TimePassed

# --- effects ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AskInventory:
    pass


@dataclass(frozen=True, slots=True)
class Apply:
    events: tuple[BlockEvent, ...]


@dataclass(frozen=True, slots=True)
class Replace:
    """Everything known of the instance is replaced by the inventory that came."""


@dataclass(frozen=True, slots=True)
class Drop:
    """Nothing of the instance is true any more."""


Effect = AskInventory | Apply | Replace | Drop
Outcome = tuple[Sync, tuple[Effect, ...]]


def begin(incarnation: int, now_s: float) -> Outcome:
    """The first sight of an instance."""
    return Sync(incarnation, asked_at_s=now_s), (AskInventory(),)


def step(sync: Sync, event: Event, now_s: float) -> Outcome:
    match event:
        case Appeared(incarnation):
            if incarnation == sync.incarnation:
                return sync, ()
            restarted, effects = begin(incarnation, now_s)
            return restarted, (Drop(), *effects)
        case EventsCame():
            if event.incarnation != sync.incarnation:
                return sync, ()
            return _events(sync, event, now_s)
        case InventoryCame():
            if event.incarnation != sync.incarnation or sync.asked_at_s is None:
                return sync, ()
            return _inventory(sync, event, now_s)
        case TimePassed():
            if sync.asked_at_s is None or now_s - sync.asked_at_s < RETRY_INTERVAL_S:
                return sync, ()
            return _ask(sync, now_s)


def _events(sync: Sync, event: EventsCame, now_s: float) -> Outcome:
    if sync.asked_at_s is not None or sync.next_number is None:
        return replace(sync, held=sync.held.with_message(event)), ()
    if event.first_number > sync.next_number:
        return _ask_anew(sync, now_s)
    new = event.events[sync.next_number - event.first_number :]
    if not new:
        return sync, ()
    return replace(sync, next_number=sync.next_number + len(new)), (Apply(new),)


def _inventory(sync: Sync, event: InventoryCame, now_s: float) -> Outcome:
    """The inventory stands for all events up to its number; those held after it must follow unbroken."""
    next_number = event.as_of_number + 1
    following: list[BlockEvent] = []
    messages = sorted(sync.held.messages, key=lambda message: message.first_number)
    gap = False
    for message in messages:
        if message.first_number > next_number:
            gap = True
            break
        new = message.events[next_number - message.first_number :]
        following += new
        next_number += len(new)
    known = replace(sync, next_number=next_number, held=Held(), asked_at_s=None)
    effects = (Replace(), Apply(tuple(following))) if following else (Replace(),)
    if not gap:
        return known, effects
    again, asked = _ask_anew(known, now_s)
    return again, (*effects, *asked)


def _ask_anew(sync: Sync, now_s: float) -> Outcome:
    """Nothing is kept of what has come: an inventory that is asked for only now stands for all of it. So a
    number that the instance never reached costs one inventory, and is not waited for."""
    return _ask(replace(sync, held=Held()), now_s)


def _ask(sync: Sync, now_s: float) -> Outcome:
    return replace(sync, asked_at_s=now_s), (AskInventory(),)


def _blocks(message: EventsCame) -> int:
    return sum(len(event.block_hashes) for event in message.events) // HASH_BYTES
