"""The numbered changes of an inventory that nobody has taken yet.

Consecutive blocks of one chain become one event. Events are numbered from 1 without gaps, as long as
they are taken before BACKLOG_BLOCKS_MAX blocks pile up. Past that the backlog is dropped and its numbers
are never given out: whoever follows sees a gap, and asks for the inventory as after any lost message.
"""

from dataclasses import dataclass, field

from kvhash import BlockHash
from kvindex.core import BlockAction, BlockEvent, Tier

EVENT_BLOCKS_MAX = 4096
"""Blocks in one event: 64 KiB of hashes, far below the limit of one message."""

BACKLOG_BLOCKS_MAX = 65_536
"""Blocks in all events that were not taken yet."""


@dataclass(slots=True)
class _OpenEvent:
    action: BlockAction
    tier: Tier
    parent: BlockHash | None
    block_hashes: list[BlockHash] = field(default_factory=list)


class EventLog:
    """Events of one inventory, in the order in which they happened."""

    def __init__(self) -> None:
        self._events: list[_OpenEvent] = []
        self._first_number = 1
        self._blocks = 0
        self._sealed = False

    @property
    def last_number(self) -> int:
        """Number of the last event that was recorded, taken or not; 0 before the first."""
        return self._first_number + len(self._events) - 1

    def stored(self, block_hash: BlockHash, parent: BlockHash | None, tier: Tier) -> None:
        """Record that a block is reusable now; it continues the last event where it follows its chain."""
        last = self._continued(BlockAction.STORED, tier)
        if last is not None and last.block_hashes[-1] == parent:
            self._append(last, block_hash)
        else:
            self._open(BlockAction.STORED, block_hash, parent, tier)

    def moved(self, block_hash: BlockHash, tier: Tier) -> None:
        """Record that a block lies in `tier` now. Along a chain tiers only get slower at every moment: a
        block's children must have been recorded before where it sinks, its parent where it rises."""
        self._unlinked(BlockAction.MOVED, block_hash, tier)

    def removed(self, block_hash: BlockHash, tier: Tier) -> None:
        """Record that a block is gone; its children must have been recorded before."""
        self._unlinked(BlockAction.REMOVED, block_hash, tier)

    def seal(self) -> None:
        """Add nothing more to the last event, because somebody has been told its number."""
        self._sealed = True

    def take(self) -> tuple[int, tuple[BlockEvent, ...]]:
        """(number of the first, events) since the last call; the next number and () where there are none."""
        first_number = self._first_number
        events = tuple(
            BlockEvent(event.action, b"".join(event.block_hashes), event.tier, event.parent or b"")
            for event in self._events
        )
        self._clear()
        return first_number, events

    def _unlinked(self, action: BlockAction, block_hash: BlockHash, tier: Tier) -> None:
        """Record what is told of blocks one by one, whatever chain they are of."""
        last = self._continued(action, tier)
        if last is not None:
            self._append(last, block_hash)
        else:
            self._open(action, block_hash, None, tier)

    def _continued(self, action: BlockAction, tier: Tier) -> _OpenEvent | None:
        """The last event, where a block of this action may be added to it."""
        if self._sealed or not self._events:
            return None
        last = self._events[-1]
        fits = last.action is action and last.tier is tier and len(last.block_hashes) < EVENT_BLOCKS_MAX
        return last if fits and self._blocks < BACKLOG_BLOCKS_MAX else None

    def _append(self, event: _OpenEvent, block_hash: BlockHash) -> None:
        event.block_hashes.append(block_hash)
        self._blocks += 1

    def _open(self, action: BlockAction, block_hash: BlockHash, parent: BlockHash | None, tier: Tier) -> None:
        if self._blocks >= BACKLOG_BLOCKS_MAX:
            self._clear()
        self._events.append(_OpenEvent(action, tier, parent, [block_hash]))
        self._blocks += 1
        self._sealed = False

    def _clear(self) -> None:
        self._first_number += len(self._events)
        self._events = []
        self._blocks = 0
        self._sealed = False
