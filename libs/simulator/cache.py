"""What one pool of blocks hits for a trace, under each eviction order and capacity.

Two caches. The **plain** one keeps any blocks: a prefix may have holes, and a block counts as a hit wherever
it lies in the prompt. It shows what an order would do without the pool's rules, and compares with published
figures. The **closed** one works as `kvpool` does: what it holds is closed under prefixes, only leaves go,
and none of the blocks that the request at hand uses. Both look a request up before it brings in its own
blocks, one request after the other, and ask `policy.evict` who goes.

A trace tells neither priority nor SLO class: all are alike. For remaining tokens stands the length of the
answer, which is what was left when its prompt was prefilled (and what no real pool knows: an upper bound).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from policy.cost import prefill_s
from policy.evict import BlockUse, EvictionCandidate, EvictionOrder
from policy.evictable import EvictableBlocks
from simulator.closed_cache import ClosedCache, eviction_scale
from simulator.reference_hardware import REFERENCE_COST
from simulator.trace import TRACE_BLOCK_TOKENS, TracedRequest


class CacheKind(StrEnum):
    PLAIN = "plain"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class CacheHits:
    """Over all requests of a trace."""

    blocks: int
    """Looked up."""
    hit_blocks: int
    evicted_blocks: int
    prefill_s: float
    """Of all prompts on the reference hardware, with nothing cached."""
    saved_s: float | None
    """Of that, what the hits save; None for the plain cache, of whose hits a prefill could use only some."""

    @property
    def hit_rate(self) -> float:
        return self.hit_blocks / self.blocks

    @property
    def saved_rate(self) -> float | None:
        return None if self.saved_s is None else self.saved_s / self.prefill_s


def simulate_cache(
    requests: Sequence[TracedRequest], kind: CacheKind, order: EvictionOrder, capacity_blocks: int
) -> CacheHits:
    """`requests` and `capacity_blocks` are at least 1. O(log capacity) a block."""
    cache = _cache(kind, order, capacity_blocks)
    hit_blocks = 0
    saved_s = 0.0
    for request in requests:
        hits = cache.hits(request.block_ids)
        cache.use(request.block_ids, hits, BlockUse(remaining_tokens=request.output_tokens))
        hit_blocks += hits
        hit_tokens = min(hits * TRACE_BLOCK_TOKENS, request.input_tokens)
        saved_s += prefill_s(REFERENCE_COST, hit_tokens, 0)
    return CacheHits(
        sum(len(request.block_ids) for request in requests),
        hit_blocks,
        cache.evicted_blocks,
        sum(prefill_s(REFERENCE_COST, request.input_tokens, 0) for request in requests),
        saved_s if kind is CacheKind.CLOSED else None,
    )


def _cache(kind: CacheKind, order: EvictionOrder, capacity_blocks: int) -> "PlainCache | ClosedCache":
    match kind:
        case CacheKind.PLAIN:
            return PlainCache(order, capacity_blocks)
        case CacheKind.CLOSED:
            return ClosedCache(order, capacity_blocks)


class PlainCache:
    """Any blocks, each on its own. Its clock ticks at each use of a block."""

    def __init__(self, order: EvictionOrder, capacity_blocks: int) -> None:
        self.evicted_blocks = 0
        self._capacity_blocks = capacity_blocks
        self._evictable = EvictableBlocks(order, eviction_scale(capacity_blocks, TRACE_BLOCK_TOKENS))
        self._uses: dict[int, int] = {}
        """Of each block held. One that goes takes its count with it."""
        self._clock = 0

    def hits(self, block_ids: Sequence[int]) -> int:
        return sum(block_id in self._uses for block_id in block_ids)

    def use(self, block_ids: Sequence[int], hits: int, use: BlockUse) -> None:
        """Every block of a prompt, first to last, each brought in where it is not held."""
        for depth_blocks, block_id in enumerate(block_ids):
            self._clock += 1
            uses = self._uses.get(block_id, 0) + 1
            if uses == 1 and len(self._uses) == self._capacity_blocks:
                del self._uses[self._evictable.pop()]
                self.evicted_blocks += 1
            self._uses[block_id] = uses
            self._evictable.add(EvictionCandidate(block_id, self._clock, uses, depth_blocks, use))
