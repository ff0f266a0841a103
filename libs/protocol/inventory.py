"""How a directory stays true to one instance: numbered events, gaps, inventories (DESIGN §5).

One `Sync` per instance. Events are applied only in an unbroken row from an inventory on; whatever is
lost, late or repeated leads to a new inventory, never to a directory that stays wrong.
"""

from dataclasses import dataclass, replace

from kvindex.core import BlockEvent
from kvindex.inventory import HeldBlock

HELD_EVENTS_MAX = 4096
"""Events kept while an inventory is under way; past it they are dropped, and asked for again."""
RETRY_INTERVAL_S = 1.0
"""An inventory that did not come is asked for again after this."""


@dataclass(frozen=True, slots=True)
class Sync:
    """What the directory knows of one instance's event stream. `next_number` None: no inventory yet."""

    incarnation: int
    next_number: int | None = None
    held: tuple[tuple[int, BlockEvent], ...] = ()
    """Numbered events that came ahead of the inventory."""
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
    incarnation: int
    as_of_number: int
    blocks: tuple[HeldBlock, ...]


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
    """Everything known of the instance is replaced by these blocks, parents first."""

    blocks: tuple[HeldBlock, ...]


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
        return _hold(sync, event), ()
    if event.first_number > sync.next_number:
        return _ask(_hold(sync, event), now_s)
    numbered = _from(sync.next_number, event)
    if not numbered:
        return sync, ()
    applied = Apply(tuple(block_event for _, block_event in numbered))
    return replace(sync, next_number=numbered[-1][0] + 1), (applied,)


def _inventory(sync: Sync, event: InventoryCame, now_s: float) -> Outcome:
    """The inventory stands for all events up to its number; those held after it must follow unbroken."""
    known = replace(sync, next_number=event.as_of_number + 1, held=(), asked_at_s=None)
    effects: tuple[Effect, ...] = (Replace(event.blocks),)
    following = sorted(
        ((number, held) for number, held in dict(sync.held).items() if number > event.as_of_number),
        key=lambda numbered: numbered[0],
    )
    for position, (number, block_event) in enumerate(following):
        if number != event.as_of_number + 1 + position:
            again, asked = _ask(replace(known, held=tuple(following[position:])), now_s)
            return again, (*effects, *asked)
        effects = (*effects, Apply((block_event,)))
        known = replace(known, next_number=number + 1)
    return known, effects


def _ask(sync: Sync, now_s: float) -> Outcome:
    return replace(sync, asked_at_s=now_s), (AskInventory(),)


def _hold(sync: Sync, event: EventsCame) -> Sync:
    numbered = tuple((event.first_number + i, block_event) for i, block_event in enumerate(event.events))
    return replace(sync, held=(sync.held + numbered)[-HELD_EVENTS_MAX:])


def _from(next_number: int, event: EventsCame) -> list[tuple[int, BlockEvent]]:
    numbered = [(event.first_number + i, block_event) for i, block_event in enumerate(event.events)]
    return [(number, block_event) for number, block_event in numbered if number >= next_number]
