"""What a pool keeps of one block, and what must hold of all of them together."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from kvhash import BlockHash
from kvindex.inventory import Inventory
from kvpool.evictable import EvictableBlocks


@dataclass(slots=True)
class Block:
    generation: int = 0
    pins: int = 0
    holds: int = 0
    """Pins plus children in use: the block is in use while this is not 0."""
    block_hash: BlockHash | None = None
    used_at: int = 0
    uses: int = 0


def check_bookkeeping(
    blocks: Sequence[Block],
    free_ids: Collection[int],
    id_of: Mapping[BlockHash, int],
    inventory: Inventory,
    evictable: EvictableBlocks,
    cached: int,
) -> None:
    """AssertionError where any of these contradicts another. O(blocks)."""
    free = set(free_ids)
    _check(len(free) == len(free_ids), "a block is free twice")
    stored = {
        block.block_hash: block_id for block_id, block in enumerate(blocks) if block.block_hash is not None
    }
    _check(stored == id_of, "hashes and blocks do not point at each other")
    _check(stored.keys() == set(inventory), "the inventory lists other blocks than are stored")

    children_in_use = [0] * len(blocks)
    for block_hash, block_id in stored.items():
        parent = inventory.parent(block_hash)
        if parent is not None and blocks[block_id].holds:
            children_in_use[id_of[parent]] += 1
    cached_found = 0
    for block_id, block in enumerate(blocks):
        _check(block.holds == block.pins + children_in_use[block_id], f"holds of block {block_id}: {block}")
        is_stored = block.block_hash is not None
        _check((block_id in free) == (not block.holds and not is_stored), f"block {block_id} is lost")
        is_cached = is_stored and not block.holds
        cached_found += is_cached
        may_go = is_cached and block.block_hash is not None and inventory.is_leaf(block.block_hash)
        _check((block_id in evictable) == may_go, f"eviction of block {block_id}: {block}")
    _check(cached_found == cached, f"{cached_found} blocks are cached, {cached} were counted")
    evictable.check_integrity()


def _check(holds: bool, detail: str) -> None:
    if not holds:
        raise AssertionError(detail)
