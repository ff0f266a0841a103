"""Copies on their way up into blocks of the compute tier, and what becomes of them.

While one is read its slot is pinned, and so is its fresh block. What is stored by then counts: a block that
was computed meanwhile is shared, and one whose copy was given up, or whose parent is not there, is left out.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from kvhash import BlockHash
from kvpool.lower_tier import LowerTier
from kvpool.tier_copy import BlockFacts, TierCopy
from kvpool.tier_stack import TierStack
from kvpool.tiers import Rise


@dataclass(frozen=True, slots=True)
class _InFlight:
    rise: Rise
    lower: LowerTier
    copy: TierCopy
    prefix: TierCopy | None
    """What the first of several follows in the compute tier: pinned, so that it does not go meanwhile."""


class Rises:
    """The copies of one pool that are being read into its compute tier."""

    def __init__(self, stack: TierStack) -> None:
        self._stack = stack
        self._in_flight: dict[int, _InFlight] = {}
        """By the fresh block."""

    def sources(
        self, hashes: Sequence[BlockHash], start: int, blocks_max: int | None
    ) -> list[tuple[LowerTier, TierCopy]]:
        """Where the blocks of a chain that lie below are read from, from `start` on."""
        end = len(hashes) if blocks_max is None else min(len(hashes), start + blocks_max)
        return self._stack.copies_below(hashes, start, end)

    def begin(
        self, sources: Sequence[tuple[LowerTier, TierCopy]], block_ids: Sequence[int], prefix: TierCopy | None
    ) -> tuple[Rise, ...]:
        """One for each fresh block; `prefix` is pinned once already, until the first is over."""
        rises: list[Rise] = []
        for (lower, copy), block_id in zip(sources, block_ids, strict=True):
            facts = copy.facts
            rise = Rise(facts.block_hash, facts.parent, lower.tier, copy.index, block_id)
            lower.pin(copy)
            self._in_flight[block_id] = _InFlight(rise, lower, copy, None if rises else prefix)
            rises.append(rise)
        return tuple(rises)

    def readers(self, lower: LowerTier) -> Counter[int]:
        """How many read each slot of that tier."""
        return Counter(flight.rise.slot for flight in self._in_flight.values() if flight.lower is lower)

    def end(self, rise: Rise, lost: bool) -> BlockFacts | None:
        """The slot was read, or could not be; `lost`: what it holds is no good. What may be stored in the
        fresh block, as far as its copy can say: None where that was given up meanwhile."""
        flight = self._in_flight.pop(rise.block_id, None)
        if flight is None or flight.rise != rise:
            raise AssertionError(f"{rise} is not under way")
        lower, copy = flight.lower, flight.copy
        if lost and lower.tree.at(rise.slot) is copy:
            self._stack.lose(lower, copy)
        is_there = lower.tree.at(rise.slot) is copy
        lower.unpin(rise.slot)
        if flight.prefix is not None:
            self._stack.compute.unpin(flight.prefix.index)
        return copy.facts if is_there else None
