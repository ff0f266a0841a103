"""The pool of one instance: prefixes in DRAM and, where it has one, on SSD below it.

As in `kvpool` each tier is prefix-closed by itself, and a block lies in the fastest tier that has it. What
goes from DRAM sinks to SSD with what comes before it; the copies were made ahead of need, so that costs no
time. What is used comes back up, and stays below.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kvindex.core import InstanceId, InstanceMatch, Tier, TierRun
from policy.evict import BlockUse
from simulator.closed_cache import ClosedCache
from simulator.setup import NodeShape


@dataclass(frozen=True, slots=True)
class HeldPrefix:
    """As far as each tier had it when it was held."""

    memory: tuple[int, ...]
    ssd: tuple[int, ...]


class NodePool:
    def __init__(self, shape: NodeShape, block_tokens: int) -> None:
        self._ssd = None
        if shape.ssd_blocks:
            self._ssd = ClosedCache(shape.eviction, shape.ssd_blocks, block_tokens)
        sink = None if self._ssd is None else self._sink
        self._memory = ClosedCache(shape.eviction, shape.pool_blocks, block_tokens, sink)

    @property
    def evicted_blocks(self) -> int:
        """That went from the slowest tier."""
        return self._memory.evicted_blocks if self._ssd is None else self._ssd.evicted_blocks

    @property
    def memory_blocks(self) -> int:
        """Held in DRAM."""
        return self._memory.blocks

    def memory_hits(self, block_ids: Sequence[int]) -> int:
        """Leading blocks in DRAM."""
        return self._memory.hits(block_ids)

    def hits(self, block_ids: Sequence[int]) -> int:
        """Leading blocks held in any tier."""
        hits = self._memory.hits(block_ids)
        return hits if self._ssd is None else max(hits, self._ssd.hits(block_ids))

    def match(self, instance: InstanceId, block_ids: Sequence[int]) -> InstanceMatch | None:
        """Where the leading held blocks lie; None where none is held."""
        memory_blocks = self._memory.hits(block_ids)
        blocks = memory_blocks if self._ssd is None else max(memory_blocks, self._ssd.hits(block_ids))
        if not blocks:
            return None
        in_memory = (TierRun(Tier.DRAM, memory_blocks),) if memory_blocks else ()
        on_ssd = (TierRun(Tier.SSD, blocks - memory_blocks),) if blocks > memory_blocks else ()
        return InstanceMatch(instance, blocks, in_memory + on_ssd)

    def hold(self, prefix: tuple[int, ...]) -> HeldPrefix:
        """Keep what is there of a prefix until it is released."""
        held = HeldPrefix(prefix[: self._memory.hits(prefix)], ())
        self._memory.hold(held.memory)
        if self._ssd is not None:
            held = HeldPrefix(held.memory, prefix[: self._ssd.hits(prefix)])
            self._ssd.hold(held.ssd)
        return held

    def release(self, held: HeldPrefix) -> None:
        self._memory.release(held.memory)
        if self._ssd is not None:
            self._ssd.release(held.ssd)

    def use(self, block_ids: Sequence[int], use: BlockUse) -> None:
        """A prompt was computed: all of it comes into DRAM, as far as there is room."""
        self._memory.use(block_ids, self._memory.hits(block_ids), use)
        if self._ssd is not None:
            hits = self._ssd.hits(block_ids)
            self._ssd.use(block_ids[:hits], hits, use)

    def check_integrity(self) -> None:
        """AssertionError, as a ClosedCache's."""
        self._memory.check_integrity()
        if self._ssd is not None:
            self._ssd.check_integrity()

    def _sink(self, chain: tuple[int, ...], use: BlockUse) -> None:
        assert self._ssd is not None
        self._ssd.use(chain, self._ssd.hits(chain), use)
