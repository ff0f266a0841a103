"""An inventory as packed runs, the form in which it travels: no object for each block."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvhash import HASH_BYTES, BlockHash
from kvindex.core import HeldRun, Tier

NO_PARENT = bytes(HASH_BYTES)
"""Stands for the parent of a prompt's first block."""


class HeldNode(Protocol):
    """What is known of one block beside its hash."""

    @property
    def parent(self) -> BlockHash | None: ...

    @property
    def tier(self) -> Tier: ...


@dataclass(frozen=True, slots=True)
class HeldPart:
    """Some blocks of one tier."""

    tier: Tier
    block_hashes: Sequence[BlockHash]
    nodes: Sequence[HeldNode]

    def pack(self) -> HeldRun:
        parents = b"".join([node.parent or NO_PARENT for node in self.nodes])
        return HeldRun(self.tier, b"".join(self.block_hashes), parents)


@dataclass(frozen=True, slots=True)
class InventorySnapshot:
    """What was held at one moment, to be packed later, in another thread if need be.

    A block that has moved meanwhile may be told in its old or its new tier: whoever follows the events from
    that moment on is told of the move too. Its parent never changes.
    """

    block_hashes: Sequence[BlockHash]
    nodes: Sequence[HeldNode]

    def parts(self, blocks_max: int) -> list[HeldPart]:
        """All blocks, at most `blocks_max` in a part; parents first, but for blocks that moved meanwhile."""
        hashes_of: dict[Tier, list[BlockHash]] = {tier: [] for tier in Tier}
        nodes_of: dict[Tier, list[HeldNode]] = {tier: [] for tier in Tier}
        for block_hash, node in zip(self.block_hashes, self.nodes, strict=True):
            tier = node.tier
            hashes_of[tier].append(block_hash)
            nodes_of[tier].append(node)
        # The fastest tier first: no block lies in a faster one than its parent.
        return [
            HeldPart(
                tier, hashes_of[tier][start : start + blocks_max], nodes_of[tier][start : start + blocks_max]
            )
            for tier in Tier
            for start in range(0, len(hashes_of[tier]), blocks_max)
        ]
