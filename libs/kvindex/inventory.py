"""What one instance holds: its blocks with parent and tier, prefix-closed at every moment.

Prefix-closed means that the parent of every block is held too (over all tiers together). So what an
instance holds of a prompt is one run from its start, and its length can be searched for instead of
counted. The rule lives here alone: blocks are added after their parent and removed before it, anything
else is refused. Knows no block ids, pins or events.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

from kvhash import BlockHash
from kvindex.core import Tier
from kvindex.runs import InventorySnapshot

HeldBlock: TypeAlias = tuple[BlockHash, BlockHash | None, Tier]
"""A block, its parent (None for the first block of a prompt) and where it lies."""


class InventoryError(Exception):
    """A change that would leave a hole, or of a block that is not there; nothing was changed."""


@dataclass(slots=True)
class _Node:
    parent: BlockHash | None
    tier: Tier
    children: int = 0


class Inventory:
    """The blocks of one instance. All operations are O(1) where nothing else is said."""

    def __init__(self, blocks: Iterable[HeldBlock] = ()) -> None:
        """`blocks` parents first; InventoryError where they are not or one comes twice."""
        # A block enters after its parent and leaves before it, so insertion order is parents first.
        self._nodes: dict[BlockHash, _Node] = {}
        self._tier_blocks: dict[Tier, int] = {}
        for block_hash, parent, tier in blocks:
            self.add(block_hash, parent, tier)

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, block_hash: BlockHash) -> bool:
        return block_hash in self._nodes

    def __iter__(self) -> Iterator[BlockHash]:
        """All hashes, parents first."""
        return iter(self._nodes)

    def add(self, block_hash: BlockHash, parent: BlockHash | None, tier: Tier) -> None:
        """InventoryError where the block is held already or its parent is not."""
        if block_hash in self._nodes:
            raise InventoryError(f"block {block_hash.hex()} is held already")
        if parent is not None:
            self._node(parent, "parent").children += 1
        self._nodes[block_hash] = _Node(parent, tier)
        self._tier_blocks[tier] = self._tier_blocks.get(tier, 0) + 1

    def remove(self, block_hash: BlockHash) -> None:
        """InventoryError where the block is not held or has a held child."""
        node = self._node(block_hash)
        if node.children:
            raise InventoryError(f"block {block_hash.hex()} has {node.children} held children")
        del self._nodes[block_hash]
        self._leave_tier(node.tier)
        if node.parent is not None:
            self._nodes[node.parent].children -= 1

    def move(self, block_hash: BlockHash, tier: Tier) -> None:
        """The block lies in `tier` now. InventoryError where it is not held."""
        node = self._node(block_hash)
        self._leave_tier(node.tier)
        node.tier = tier
        self._tier_blocks[tier] = self._tier_blocks.get(tier, 0) + 1

    def tier(self, block_hash: BlockHash) -> Tier:
        """InventoryError where the block is not held."""
        return self._node(block_hash).tier

    def blocks_in(self, tier: Tier) -> int:
        """How many blocks lie in `tier`."""
        return self._tier_blocks.get(tier, 0)

    def blocks(self) -> list[HeldBlock]:
        """All blocks, parents first; looks at every block."""
        return [(block_hash, node.parent, node.tier) for block_hash, node in self._nodes.items()]

    def snapshot(self) -> InventorySnapshot:
        """All blocks, to be packed later; copies two lists of references."""
        return InventorySnapshot(list(self._nodes), list(self._nodes.values()))

    def _node(self, block_hash: BlockHash, what: str = "block") -> _Node:
        node = self._nodes.get(block_hash)
        if node is None:
            raise InventoryError(f"{what} {block_hash.hex()} is not held")
        return node

    def _leave_tier(self, tier: Tier) -> None:
        self._tier_blocks[tier] -= 1
        if not self._tier_blocks[tier]:
            del self._tier_blocks[tier]
