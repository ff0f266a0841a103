"""The blocks that are computed on: which are free, fresh or stored, their pins and generations.

A block is free (holds nothing), fresh (pinned, being filled, known by its id alone) or stored (full, known
by its hash, a copy of the tier's tree). Knows no other tier, no inventory and no events.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kvindex.core import Tier
from kvpool.tier_copy import BlockFacts, TierCopy, check
from kvpool.tier_tree import TierTree
from policy.evict import EvictionOrder


@dataclass(slots=True)
class Block:
    generation: int = 0
    pins: int = 0
    copy: TierCopy | None = None
    """What it holds, where it is stored."""


class ComputeTier:
    """The blocks 0 … `blocks` - 1."""

    def __init__(self, tier: Tier, blocks: int, order: EvictionOrder) -> None:
        self.tier = tier
        self.tree = TierTree(blocks, order)
        self._blocks = [Block() for _ in range(blocks)]
        # Taken from the end: the block that was freed last is given first, its pages are warm.
        self._free = list(range(blocks - 1, -1, -1))

    def __len__(self) -> int:
        return len(self._blocks)

    @property
    def free(self) -> int:
        return len(self._free)

    def block(self, block_id: int) -> Block:
        return self._blocks[block_id]

    def pinned(self, block_id: int) -> Block:
        """AssertionError where the block is not pinned."""
        block = self._blocks[block_id] if block_id >= 0 else None
        if block is None or not block.pins:
            raise AssertionError(f"block {block_id} is not pinned")
        return block

    def take(self, count: int) -> list[int]:
        """`count` fresh blocks, each pinned once and of a new generation; so many must be free."""
        block_ids = [self._free.pop() for _ in range(count)]
        for block_id in block_ids:
            block = self._blocks[block_id]
            block.generation += 1
            block.pins = 1
        return block_ids

    def pin(self, block_id: int) -> None:
        """One pin more on a stored block, in use or cached, or on one that is pinned."""
        block = self._blocks[block_id]
        block.pins += 1
        if block.copy is not None:
            self.tree.hold(block.copy)

    def unpin(self, block_id: int) -> None:
        """One pin less: at none left, a stored block stays cached, a fresh one is free."""
        block = self.pinned(block_id)
        block.pins -= 1
        if block.copy is not None:
            self.tree.unhold(block.copy)
        elif not block.pins:
            self._free.append(block_id)

    def store(self, block_id: int, facts: BlockFacts) -> None:
        """A fresh block holds that from now on; its parent, where it has one, must be stored."""
        block = self._blocks[block_id]
        block.copy = self.tree.add(facts, block_id, block.pins)

    def remove(self, copy: TierCopy) -> None:
        """A cached leaf's block is free."""
        self.tree.remove(copy)
        self._blocks[copy.index].copy = None
        self._free.append(copy.index)

    def generation(self, index: int) -> int:
        return self._blocks[index].generation

    def pin_source(self, index: int) -> None:
        """Nothing: a block may go while it is copied down, whoever copied it sees that it did."""

    def unpin_source(self, index: int) -> None:
        """Nothing, as for `pin_source`."""

    def check_integrity(self) -> None:
        """AssertionError where a block is lost, free twice, or in contradiction to the tree. O(blocks)."""
        free = set(self._free)
        check(len(free) == len(self._free), "a block is free twice")
        for block_id, block in enumerate(self._blocks):
            check(block.copy is self.tree.at(block_id), "does not know what it holds: block", block_id)
            is_free = not block.pins and block.copy is None
            check((block_id in free) == is_free, "lost:", block)
        self.tree.check_integrity([block.pins for block in self._blocks])


def others_hold(blocks: Sequence[Block]) -> int:
    """Of a sequence's pinned blocks, how many leading ones stay stored and in use if it unpins all."""
    child: TierCopy | None = None
    for place in range(len(blocks) - 1, -1, -1):
        copy = blocks[place].copy
        if copy is None:
            continue
        of_own_child = child is not None and child.parent is copy
        if copy.holds - 1 - of_own_child > 0:
            return place + 1
        child = copy
    return 0
