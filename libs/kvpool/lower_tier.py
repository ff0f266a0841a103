"""One tier below the compute tier by itself: which of its slots hold which block's copy, and which are busy.

A slot is free, reserved (a copy is being written to it), holding a copy, spoiled (what is in it must not be
found again by a restart: it is erased before it is free) or left (its copy was given up while somebody read
it). Readers pin slots: a pinned slot's copy is not evicted, and where it is lost its slot is neither erased
nor given to another before the last reader is done. A parent whose child is being copied here is held too,
so that the child does not come too late.

Knows no other tier, no inventory and no events. AssertionError means that the caller broke the contract.
"""

from collections import Counter
from collections.abc import Collection
from itertools import islice
from typing import TypeVar

from kvhash import BlockHash
from kvindex.core import Tier
from kvpool.tier_copy import BlockFacts, TierCopy, check
from kvpool.tier_tree import TierTree
from kvpool.tiers import TierStats
from policy.evict import EvictionOrder

Counted = TypeVar("Counted", int, BlockHash)


class LowerTier:
    """The slots 0 … `slots` - 1 of one tier. Calls cost O(log n), as those of its tree."""

    def __init__(self, tier: Tier, slots: int, order: EvictionOrder) -> None:
        self.tier = tier
        self.tree = TierTree(slots, order)
        self._slots = slots
        self._free = list(range(slots - 1, -1, -1))
        self._reserved: set[int] = set()
        self._spoiled: dict[int, None] = {}
        """In the order in which they are to be erased: a child before its parent."""
        self._readers: Counter[int] = Counter()
        """Pins by slot, none that is 0."""
        self._awaited: Counter[BlockHash] = Counter()
        """How many children are being copied here, by parent, none that is 0."""
        self.sunk_total = 0
        self.discarded_total = 0
        self.risen_total = 0
        self.evicted_total = 0
        self.lost_total = 0

    def __len__(self) -> int:
        return self._slots

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def reserved(self) -> int:
        """Slots that are being written."""
        return len(self._reserved)

    def reserve(self) -> int:
        """A free slot, to be written to; there must be one."""
        slot = self._free.pop()
        self._reserved.add(slot)
        return slot

    def fill(self, slot: int, facts: BlockFacts) -> None:
        """A reserved slot holds the copy of that block; its parent, where it has one, has a copy here."""
        self._reserved.remove(slot)
        self.tree.add(facts, slot, self._awaited[facts.block_hash])

    def give_back(self, slot: int, written: bool) -> None:
        """A reserved slot holds no copy; `written`: but what a restart would take for one."""
        self._reserved.remove(slot)
        if written:
            self.spoil(slot)
        self._vacate(slot)

    def spoil(self, slot: int) -> None:
        """The slot is to be erased before it is used again; the copy in it, if there is one, goes next."""
        self._spoiled[slot] = None

    def erasures(self, slots_max: int) -> tuple[int, ...]:
        """The slots to erase next."""
        return tuple(islice((slot for slot in self._spoiled if slot not in self._readers), slots_max))

    def end_erasure(self, slot: int, erased: bool) -> None:
        """A slot of `erasures` was erased, or could not be: then it is the last to be tried again."""
        is_due = slot in self._spoiled and slot not in self._readers
        assert is_due, f"slot {slot} is not to be erased"
        del self._spoiled[slot]
        if not erased:
            self.spoil(slot)
        self._vacate(slot)

    def free_slots(self) -> frozenset[int]:
        """O(slots), for the start."""
        return frozenset(self._free)

    def claim(self, slots: Collection[int]) -> None:
        """Reserve these slots, which must be free. O(slots), for the start."""
        claimed = set(slots)
        free = [slot for slot in self._free if slot not in claimed]
        assert len(claimed) == len(slots) == len(self._free) - len(free), "a slot is not free"
        self._free = free
        self._reserved |= claimed

    def await_child(self, parent: BlockHash | None) -> None:
        """A child of that block is being copied here; the parent's copy may still be on its way itself."""
        if parent is None:
            return
        self._awaited[parent] += 1
        copy = self.tree.get(parent)
        if copy is not None:
            self.tree.hold(copy)

    def child_came(self, parent: BlockHash | None) -> None:
        """The inverse of `await_child`, whatever became of the child."""
        if parent is None:
            return
        _take_one(self._awaited, parent)
        copy = self.tree.get(parent)
        if copy is not None:
            self.tree.unhold(copy)

    def pin(self, copy: TierCopy) -> None:
        """A reader of the copy's slot."""
        self._readers[copy.index] += 1
        self.tree.hold(copy)

    def unpin(self, slot: int) -> None:
        """One reader less; a slot that was left meanwhile is free when the last has gone."""
        _take_one(self._readers, slot)
        copy = self.tree.at(slot)
        if copy is not None:
            self.tree.unhold(copy)
        else:
            self._vacate(slot)

    def remove(self, copy: TierCopy) -> None:
        """Give up a leaf, whoever reads it or is being copied under it."""
        for _ in range(self._held(copy)):
            self.tree.unhold(copy)
        self.tree.remove(copy)
        self._vacate(copy.index)

    def check_users(self, readers: Counter[int], awaited: Counter[BlockHash]) -> None:
        """AssertionError where others read slots or await children than are counted."""
        check(self._readers == readers, f"readers of {self.tier}, not", readers)
        check(self._awaited == awaited, f"awaited in {self.tier}, not", awaited)

    def stats(self, lying: int) -> TierStats:
        """`lying`: how many blocks have no faster copy than the one here."""
        copies = len(self.tree)
        return TierStats(
            tier=self.tier,
            blocks=self._slots,
            free=len(self._free),
            copies=copies,
            moving=self._slots - len(self._free) - copies,
            lying=lying,
            sunk_total=self.sunk_total,
            discarded_total=self.discarded_total,
            risen_total=self.risen_total,
            evicted_total=self.evicted_total,
            lost_total=self.lost_total,
        )

    def generation(self, index: int) -> int:
        """0: a slot that is copied from is pinned, and so needs no generation."""
        return 0

    def pin_source(self, index: int) -> None:
        """A reader of the slot's copy, which must be there."""
        copy = self.tree.at(index)
        assert copy is not None, f"slot {index} holds nothing"
        self.pin(copy)

    def unpin_source(self, index: int) -> None:
        self.unpin(index)

    def _vacate(self, slot: int) -> None:
        """A slot without a copy is free once nobody reads it and it need not be erased."""
        if slot not in self._readers and slot not in self._spoiled:
            self._free.append(slot)

    def _held(self, copy: TierCopy) -> int:
        """What holds a copy besides its children."""
        return self._readers[copy.index] + self._awaited[copy.facts.block_hash]

    def check_integrity(self) -> None:
        """AssertionError where a slot is lost or counted twice, or in contradiction to the tree. O(slots)."""
        held = [0] * self._slots
        holding = set()
        for copy in self.tree:
            held[copy.index] = self._held(copy)
            holding.add(copy.index)
        left = self._readers.keys() - holding - self._spoiled.keys()
        counted = sorted([*self._free, *self._reserved, *self._spoiled, *holding, *left])
        check(counted == list(range(self._slots)), f"slots of {self.tier}:", counted)
        check(all(count > 0 for count in self._readers.values()), "readers:", self._readers)
        check(all(count > 0 for count in self._awaited.values()), "awaited:", self._awaited)
        self.tree.check_integrity(held)


def _take_one(counts: Counter[Counted], key: Counted) -> None:
    assert counts[key] > 0, f"{key!r} is not counted"
    counts[key] -= 1
    if not counts[key]:
        del counts[key]
