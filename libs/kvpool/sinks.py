"""Which copies are made one tier further down, ahead of need, and what becomes of them.

In every tier that has one below, the copies that go next are staged (`tier_tree`) until free and staged
ones together reach `sink_ahead_blocks`. A copy that has one in the tier below is staged at once. Any other
is copied down first, its ancestors before it, since the tier below is prefix-closed too. One that finds no
room there is staged as it is, and dropped when its turn comes: room is made by eviction of what is worth
less, never of what is worth as much, so nothing goes down twice in a circle.

What is copied from the compute tier is not pinned: it may be evicted, and its block given to somebody else,
while it is read. Then the copy is thrown away.
"""

import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto

from kvhash import BlockHash
from kvindex.core import Tier
from kvpool.lower_tier import LowerTier
from kvpool.tier_copy import BlockFacts, TierCopy, check
from kvpool.tier_stack import AnyTier, TierStack
from kvpool.tiers import Sink

LOOKS_MAX = 1024
"""Copies looked at in one call, for each tier: some milliseconds. The next call goes on from there."""


class _NoSlot(Enum):
    WORTH_LESS = auto()
    """Than whatever the tier holds."""
    NOT_NOW = auto()
    """All that could go is in use, or has to be copied further down first."""


@dataclass(frozen=True, slots=True)
class _InFlight:
    sink: Sink
    upper: AnyTier
    lower: LowerTier
    copy: TierCopy
    """The source. A block that goes and is stored again has another one."""


class Sinks:
    """The copies between neighbouring tiers of one pool. O(log n) for each block, once per use of it."""

    def __init__(self, stack: TierStack, ahead_blocks: int) -> None:
        self._stack = stack
        self._ahead_blocks = ahead_blocks
        self._in_flight: dict[tuple[Tier, BlockHash], _InFlight] = {}
        """By target and block: none is copied to one tier twice at a time."""
        self._sources: Counter[Tier] = Counter()
        self._failing: set[Tier] = set()
        # What was found to be copied before the next copy of a tier can be staged, the root last.
        self._paths: dict[Tier, list[TierCopy]] = {}

    def take(self, blocks_max: int, ahead_blocks: int | None, into: Tier | None) -> tuple[Sink, ...]:
        """See `BlockPool.take_sinks`."""
        ahead = self._ahead_blocks if ahead_blocks is None else ahead_blocks
        # Who asks for more than is configured wants all of it, and nothing else meanwhile.
        looks_max = LOOKS_MAX if ahead_blocks is None else sys.maxsize
        sinks: list[Sink] = []
        # From below: a tier has room for others once its own are settled.
        for upper, lower in reversed(list(zip(self._stack.tiers, self._stack.lower, strict=False))):
            if into is not None and lower.tier is not into:
                continue
            for sink in self._wanted(upper, lower, ahead, looks_max):
                sinks.append(sink)
                if len(sinks) >= blocks_max:
                    return tuple(sinks)
        return tuple(sinks)

    def tier_fails(self, tier: Tier, fails: bool) -> None:
        """See `BlockPool.tier_fails`."""
        if fails:
            self._failing.add(tier)
        else:
            self._failing.discard(tier)

    def end(self, sink: Sink, written: bool) -> bool:
        """The copy was made, or could not be. Whether the tier below has it now."""
        flight = self._in_flight.pop((sink.tier, sink.block_hash), None)
        if flight is None or flight.sink != sink:
            raise AssertionError(f"{sink} is not under way")
        upper, lower, copy = flight.upper, flight.lower, flight.copy
        self._sources[upper.tier] -= 1
        is_there = upper.tree.at(copy.index) is copy
        parent_is_there = sink.parent is None or sink.parent in lower.tree
        kept = written and is_there and parent_is_there and sink.block_hash not in lower.tree
        if kept:
            lower.sunk_total += 1
            lower.fill(sink.slot, copy.facts)
            self._stack.came(copy.facts, lower.tier)
        else:
            lower.discarded_total += written
            lower.give_back(sink.slot, written)
        lower.child_came(sink.parent)
        if is_there:
            copy.unsinkable = not written
        current = upper.tree.get(sink.block_hash)
        if current is not None and current.sinking:
            upper.tree.mark_sinking(current, False)
        upper.unpin_source(sink.source_index)
        return kept

    def _wanted(self, upper: AnyTier, lower: LowerTier, ahead: int, looks_max: int) -> Iterator[Sink]:
        """Stages what goes next, and yields what must be copied for that, each one reserved."""
        tree = upper.tree
        looked_at = 0
        while upper.free + tree.staged + self._sources[upper.tier] < ahead:
            copy = tree.next_to_stage()
            if copy is None or looked_at == looks_max:
                return
            looked_at += 1
            if copy.unsinkable or copy.facts.block_hash in lower.tree:
                tree.stage(copy)
                continue
            if self._is_below(copy, lower):
                # Of a predecessor that was given up. When that copy is over, this one can be made.
                tree.mark_sinking(copy, True)
                continue
            step = self._next_step(copy, upper, lower)
            if step.unsinkable:
                copy.unsinkable = True
                continue
            slot = self._slot_for(step.facts, lower)
            if slot is _NoSlot.NOT_NOW:
                return
            if slot is _NoSlot.WORTH_LESS:
                copy.unsinkable = True
                continue
            yield self._begin(step, upper, lower, slot)

    def _next_step(self, copy: TierCopy, upper: AnyTier, lower: LowerTier) -> TierCopy:
        """What is copied down first so that in the end `copy` is: its first ancestor that has no copy below
        and none on its way, or itself. O(1) on average: the path is kept."""
        path = self._paths.get(upper.tier, [])
        if not (path and path[0] is copy and self._is_next(path[-1], upper, lower)):
            path = [copy]
            parent = copy.parent
            while parent is not None and not self._is_below(parent, lower):
                path.append(parent)
                parent = parent.parent
            self._paths[upper.tier] = path
        return path[-1]

    def _is_next(self, step: TierCopy, upper: AnyTier, lower: LowerTier) -> bool:
        is_there = upper.tree.at(step.index) is step and not self._is_below(step, lower)
        return is_there and (step.parent is None or self._is_below(step.parent, lower))

    def _is_below(self, copy: TierCopy, lower: LowerTier) -> bool:
        """Whether the tier below has a copy of it, or it is on its way there."""
        block_hash = copy.facts.block_hash
        return block_hash in lower.tree or (lower.tier, block_hash) in self._in_flight

    def _slot_for(self, facts: BlockFacts, lower: LowerTier) -> int | _NoSlot:
        """A reserved slot for a copy of that block; evicts one that is worth less. A tier that has one below
        itself evicts what is settled only: it can wait, unless that one fails."""
        if not lower.free:
            below = self._stack.below(lower)
            waits = below is not None and below.tier not in self._failing
            victim = lower.tree.first_staged() if waits else lower.tree.victim()
            if victim is None:
                return _NoSlot.NOT_NOW
            if victim.facts.block_hash == facts.parent or not lower.tree.goes_before(victim, facts):
                return _NoSlot.WORTH_LESS
            self._stack.evict(lower)
        return lower.reserve()

    def _begin(self, step: TierCopy, upper: AnyTier, lower: LowerTier, slot: int) -> Sink:
        facts = step.facts
        self._paths[upper.tier].pop()
        lower.await_child(facts.parent)
        upper.pin_source(step.index)
        upper.tree.mark_sinking(step, True)
        generation = upper.generation(step.index)
        sink = Sink(facts.block_hash, facts.parent, upper.tier, step.index, generation, lower.tier, slot)
        self._in_flight[lower.tier, facts.block_hash] = _InFlight(sink, upper, lower, step)
        self._sources[upper.tier] += 1
        return sink

    def readers(self, tier: LowerTier) -> Counter[int]:
        """How many read each slot of that tier."""
        flights = self._in_flight.values()
        return Counter(flight.sink.source_index for flight in flights if flight.upper is tier)

    def awaited(self, tier: LowerTier) -> Counter[BlockHash]:
        """How many children of each block are on their way to that tier."""
        sinks = (flight.sink for flight in self._in_flight.values() if flight.lower is tier)
        return Counter(sink.parent for sink in sinks if sink.parent is not None)

    def check_integrity(self) -> None:
        """AssertionError where a copy under way has no slot or is counted wrongly."""
        reserved = Counter(flight.lower.tier for flight in self._in_flight.values())
        for lower in self._stack.lower:
            check(lower.reserved == reserved[lower.tier], f"{lower.tier}: slots reserved for no copy")
        sources = Counter(flight.upper.tier for flight in self._in_flight.values())
        check(+self._sources == sources, f"copies under way: {self._sources}, not {sources}")
        for flight in self._in_flight.values():
            is_there = flight.upper.tree.at(flight.copy.index) is flight.copy
            check(not is_there or flight.copy.sinking, "not known to be copied:", flight.copy)
        for upper, lower in zip(self._stack.tiers, self._stack.lower, strict=False):
            sinking = (copy for copy in upper.tree if copy.sinking)
            check(
                all((lower.tier, copy.facts.block_hash) in self._in_flight for copy in sinking), "never over"
            )
