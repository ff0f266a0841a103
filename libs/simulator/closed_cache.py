"""The prefixes that one instance keeps: closed under prefixes as `kvpool` is, leaves go first.

A block is known by its id in the trace. What goes is `policy.evict`'s to say; what is being read is held and
stays, and with it, as it has a child or is held itself, all before it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from policy.evict import (
    BlockUse,
    EvictionCandidate,
    EvictionOrder,
    EvictionScale,
    cost_doubles_at_blocks,
)
from policy.evictable import EvictableBlocks
from simulator.reference_hardware import REFERENCE_COST
from simulator.trace import TRACE_BLOCK_TOKENS


def eviction_scale(capacity_blocks: int, block_tokens: int) -> EvictionScale:
    return EvictionScale(capacity_blocks, cost_doubles_at_blocks(REFERENCE_COST, block_tokens))


Evicting = Callable[[tuple[int, ...], BlockUse], None]
"""Told of a block that is about to go, by its chain from the start, and by who used it last."""


@dataclass(slots=True)
class _Node:
    """A block that the cache holds."""

    parent: int | None
    depth_blocks: int
    use: BlockUse
    used_at: int = 0
    uses: int = 0
    children: int = 0
    readers: int = 0
    """Who hold a prefix that ends in it."""


class ClosedCache:
    """Prefixes, whole from their start. Its clock ticks with each request and each block brought in."""

    def __init__(
        self,
        order: EvictionOrder,
        capacity_blocks: int,
        block_tokens: int = TRACE_BLOCK_TOKENS,
        on_evicting: Evicting | None = None,
    ) -> None:
        self.evicted_blocks = 0
        self._on_evicting = on_evicting
        self._capacity_blocks = capacity_blocks
        self._evictable = EvictableBlocks(order, eviction_scale(capacity_blocks, block_tokens))
        self._nodes: dict[int, _Node] = {}
        self._clock = 0

    @property
    def blocks(self) -> int:
        """Held, never more than the capacity."""
        return len(self._nodes)

    def hits(self, block_ids: Sequence[int]) -> int:
        """Leading blocks held. Behind one that is not held none is."""
        for hits, block_id in enumerate(block_ids):
            if block_id not in self._nodes:
                return hits
        return len(block_ids)

    def hold(self, prefix: Sequence[int]) -> None:
        """Keep a prefix, all of which is there, until as many `release` it."""
        if prefix:
            self._nodes[prefix[-1]].readers += 1
            self._evictable.discard(prefix[-1])

    def release(self, prefix: Sequence[int]) -> None:
        if prefix:
            self._nodes[prefix[-1]].readers -= 1
            self._offer_leaf(prefix[-1])

    def use(self, block_ids: Sequence[int], hits: int, use: BlockUse) -> None:
        """A prompt whose first `hits` blocks are held. The rest comes in, as far as there is room: nothing
        goes that the request uses or a reader holds."""
        block_ids = block_ids[: self._capacity_blocks]
        if hits:
            # The others have a child and are no candidates.
            self._evictable.discard(block_ids[hits - 1])
        new = self._make_room(len(block_ids) - hits, block_ids[hits - 1] if hits else None)
        block_ids = block_ids[: hits + new]
        self._clock += 1 + new
        self._bring_in(block_ids, hits, use)
        for block_id in block_ids:
            node = self._nodes[block_id]
            node.used_at = self._clock
            node.uses += 1
            node.use = use
        if block_ids:
            self._offer_leaf(block_ids[-1])

    def check_integrity(self) -> None:
        """AssertionError where a block is held without its parent, is counted wrongly, or still has a reader
        when nobody reads."""
        children = dict.fromkeys(self._nodes, 0)
        for node in self._nodes.values():
            if node.parent is not None:
                children[node.parent] += 1
        for block_id, node in self._nodes.items():
            assert node.children == children[block_id], f"children of block {block_id}"
            assert node.readers == 0, f"block {block_id} is held"
            assert (node.children == 0) == (block_id in self._evictable), f"block {block_id} as a candidate"
        assert len(self._nodes) <= self._capacity_blocks, "more blocks than there is room for"

    def _make_room(self, blocks: int, kept: int | None) -> int:
        """For so many, or for how many there can be; `kept` is the last block in use, all before it have a
        child."""
        while len(self._nodes) + blocks > self._capacity_blocks and len(self._evictable):
            block_id = self._evictable.pop()
            if self._on_evicting is not None:
                self._on_evicting(self._chain(block_id), self._nodes[block_id].use)
            parent = self._nodes.pop(block_id).parent
            self.evicted_blocks += 1
            if parent is not None:
                self._nodes[parent].children -= 1
                if parent != kept:
                    self._offer_leaf(parent)
        return min(blocks, self._capacity_blocks - len(self._nodes))

    def _chain(self, block_id: int) -> tuple[int, ...]:
        chain: list[int] = []
        last: int | None = block_id
        while last is not None:
            chain.append(last)
            last = self._nodes[last].parent
        return tuple(reversed(chain))

    def _bring_in(self, block_ids: Sequence[int], first: int, use: BlockUse) -> None:
        for depth_blocks in range(first, len(block_ids)):
            parent = block_ids[depth_blocks - 1] if depth_blocks else None
            if parent is not None:
                self._nodes[parent].children += 1
            self._nodes[block_ids[depth_blocks]] = _Node(parent, depth_blocks, use)

    def _offer_leaf(self, block_id: int) -> None:
        node = self._nodes[block_id]
        if not node.children and not node.readers:
            self._evictable.add(
                EvictionCandidate(block_id, node.used_at, node.uses, node.depth_blocks, node.use)
            )
