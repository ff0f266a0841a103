"""All tiers of a pool together: what a copy's coming and going means to the inventory and its events.

A block lies in the fastest tier that has a copy of it; that is what the inventory says. Every tier is
prefix-closed by itself, so what is held at all is prefix-closed, and along a chain tiers only get slower.
That holds between any two events too: copies come parents first and go children first.
"""

from collections.abc import Iterable, Sequence
from typing import TypeAlias

from kvhash import BlockHash
from kvindex.core import Tier, TierRun
from kvindex.inventory import Inventory
from kvpool.compute_tier import ComputeTier
from kvpool.events import EventLog
from kvpool.lower_tier import LowerTier
from kvpool.tier_copy import BlockFacts, TierCopy, check
from kvpool.tiers import Copy

AnyTier: TypeAlias = ComputeTier | LowerTier

TIERS_FASTEST_FIRST = tuple(Tier)


class TierStack:
    """The compute tier and the lower ones, fastest first."""

    def __init__(self, compute: ComputeTier, lower: Sequence[LowerTier]) -> None:
        self.compute = compute
        self.lower = tuple(lower)
        self.tiers: tuple[AnyTier, ...] = (compute, *lower)
        self.inventory = Inventory()
        self.events = EventLog()
        self.dropped_total = 0
        self.gone_total = 0

    def below(self, tier: LowerTier) -> LowerTier | None:
        """The next slower tier; None where there is none."""
        place = self.lower.index(tier) + 1
        return self.lower[place] if place < len(self.lower) else None

    def facts_below(self, block_hash: BlockHash) -> BlockFacts | None:
        """What is known of a block that has a copy in a lower tier."""
        for tier in self.lower:
            copy = tier.tree.get(block_hash)
            if copy is not None:
                return copy.facts
        return None

    def touch(self, facts: BlockFacts) -> None:
        """A block was used: the lower tiers reckon with that too."""
        for tier in self.lower:
            copy = tier.tree.get(facts.block_hash)
            if copy is not None:
                tier.tree.touch(copy)

    def tier_runs(self, hashes: Sequence[BlockHash]) -> tuple[TierRun, ...]:
        """Where the leading held blocks of a chain lie: at most one run for each tier."""
        runs = []
        end = 0
        for tier in self.tiers:
            matched = tier.tree.match(hashes)
            if matched > end:
                runs.append(TierRun(tier.tier, matched - end))
                end = matched
        return tuple(runs)

    def copies_below(
        self, hashes: Sequence[BlockHash], start: int, end: int
    ) -> list[tuple[LowerTier, TierCopy]]:
        """Where the blocks of a chain are read from best, from `start` on as far as they are held."""
        found: list[tuple[LowerTier, TierCopy]] = []
        for tier in self.lower:
            for place in range(start + len(found), end):
                copy = tier.tree.get(hashes[place])
                if copy is None:
                    break
                found.append((tier, copy))
        return found

    def came(self, facts: BlockFacts, tier: Tier) -> None:
        """A copy has come to a tier; its parent's was there before."""
        block_hash = facts.block_hash
        if block_hash not in self.inventory:
            self.inventory.add(block_hash, facts.parent, tier)
            self.events.stored(block_hash, facts.parent, tier)
        elif is_faster(tier, self.inventory.tier(block_hash)):
            self.inventory.move(block_hash, tier)
            self.events.moved(block_hash, tier)

    def evict(self, source: AnyTier) -> None:
        """The copy that goes next in that tier makes room; there must be one."""
        copy = source.tree.victim()
        assert copy is not None, f"nothing can be evicted from {source.tier}"
        if isinstance(source, LowerTier):
            source.evicted_total += 1
        if not self.remove(source, copy):
            if source is self.tiers[-1]:
                self.gone_total += 1
            else:
                self.dropped_total += 1

    def remove(self, source: AnyTier, copy: TierCopy) -> bool:
        """A leaf's copy leaves a tier. False where that was the last of its block."""
        source.remove(copy)
        block_hash = copy.facts.block_hash
        if self.inventory.tier(block_hash) is not source.tier:
            return True
        for tier in self.lower:
            if block_hash in tier.tree:
                self.inventory.move(block_hash, tier.tier)
                self.events.moved(block_hash, tier.tier)
                return True
        self.inventory.remove(block_hash)
        self.events.removed(block_hash, source.tier)
        return False

    def lose(self, tier: LowerTier, copy: TierCopy) -> None:
        """A lower tier's copy is no good: it goes, with all that hangs on it there, for a successor too.
        O(their number)."""
        for lost in tier.tree.subtree(copy):
            tier.lost_total += 1
            tier.spoil(lost.index)
            self.remove(tier, lost)

    def restore(self, tier: LowerTier, copies: Iterable[Copy], used_at: int) -> int:
        """Take in what a store found again, used at `used_at` and after in its order; see `BlockPool`."""
        chosen = _closed(copies, tier)
        tier.claim([copy.slot for _, copy in chosen])
        for age, copy in chosen:
            facts = self._restored_facts(copy, used_at + age)
            tier.fill(copy.slot, facts)
            self.came(facts, tier.tier)
        return len(chosen)

    def _restored_facts(self, copy: Copy, used_at: int) -> BlockFacts:
        """Of one block there is one record of facts, in whatever tiers it has copies already."""
        known = self.compute.tree.get(copy.block_hash)
        facts = known.facts if known is not None else self.facts_below(copy.block_hash)
        if facts is not None:
            return facts
        parent = None if copy.parent is None else self.facts_below(copy.parent)
        depth_blocks = 0 if parent is None else parent.depth_blocks + 1
        return BlockFacts(copy.block_hash, copy.parent, depth_blocks, used_at, uses=1)

    def check_integrity(self) -> None:
        """AssertionError where a tier contradicts itself, or the inventory the tiers. O(copies)."""
        self.compute.check_integrity()
        fastest: dict[BlockHash, tuple[BlockFacts, Tier]] = {}
        for tier in self.tiers:
            tier.check_integrity()
            for copy in tier.tree:
                facts, _ = fastest.setdefault(copy.facts.block_hash, (copy.facts, tier.tier))
                check(copy.facts is facts, "two accounts of one block:", copy)
        said = {block_hash: (parent, tier) for block_hash, parent, tier in self.inventory.blocks()}
        check(
            said == {block_hash: (facts.parent, tier) for block_hash, (facts, tier) in fastest.items()},
            "the inventory lists other blocks or tiers than there are",
        )


def is_faster(tier: Tier, other: Tier) -> bool:
    return TIERS_FASTEST_FIRST.index(tier) < TIERS_FASTEST_FIRST.index(other)


def _closed(copies: Iterable[Copy], tier: LowerTier) -> list[tuple[int, Copy]]:
    """Those that can be taken, parents first, each with its place in `copies`: of two in one slot or of one
    block the first, none in a slot that is not free, none whose parent is not there in the end."""
    free = tier.free_slots()
    slots: set[int] = set()
    seen: set[BlockHash] = set()
    children: dict[BlockHash | None, list[tuple[int, Copy]]] = {}
    for place, copy in enumerate(copies):
        if (
            copy.slot in slots
            or copy.slot not in free
            or copy.block_hash in seen
            or copy.block_hash in tier.tree
        ):
            continue
        slots.add(copy.slot)
        seen.add(copy.block_hash)
        children.setdefault(copy.parent, []).append((place, copy))
    closed = children.pop(None, [])
    for parent in [parent for parent in children if parent is not None and parent in tier.tree]:
        closed += children.pop(parent)
    for _, copy in closed:
        closed += children.pop(copy.block_hash, [])
    return closed
