"""The blocks that may be evicted now, sorted by who goes first.

A heap with lazy removal: O(log n) per change, and the heap never holds more than twice the live entries
plus SLACK_ENTRIES. The order itself is `policy.evict`.
"""

from heapq import heapify, heappop, heappush

from policy.evict import (
    DEFAULT_SCALE,
    EvictionCandidate,
    EvictionKey,
    EvictionOrder,
    EvictionScale,
    key_function,
)

SLACK_ENTRIES = 64
"""Dead entries that are tolerated however few live ones there are."""


class EvictableBlocks:
    """A set of candidates that gives up the next victim of its order."""

    def __init__(self, order: EvictionOrder, scale: EvictionScale = DEFAULT_SCALE) -> None:
        self._key = key_function(order, scale)
        self._keys: dict[int, EvictionKey] = {}
        # A key is live while it is the one recorded in `_keys`; a removed block leaves its own behind.
        self._heap: list[EvictionKey] = []

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._keys

    def add(self, candidate: EvictionCandidate) -> None:
        """The block may go from now on. It must not be in the set."""
        key = self._key(candidate)
        self._keys[candidate.block_id] = key
        heappush(self._heap, key)

    def discard(self, block_id: int) -> None:
        """The block may not go any more; nothing happens where it is not in the set."""
        if self._keys.pop(block_id, None) is not None:
            self._compact()

    def first(self) -> int | None:
        """The block that goes first, which stays in the set; None where the set is empty."""
        heap, keys = self._heap, self._keys
        while heap:
            key = heap[0]
            if keys.get(key[-1]) == key:
                return key[-1]
            heappop(heap)
        return None

    def pop(self) -> int:
        """Take out the block that goes first. There must be one."""
        block_id = self.first()
        assert block_id is not None, "nothing can be evicted"
        heappop(self._heap)
        del self._keys[block_id]
        self._compact()
        return block_id

    def check_integrity(self) -> None:
        """AssertionError where a live block has no entry or dead entries are over their bound."""
        entries = set(self._heap)
        for block_id, key in self._keys.items():
            if key not in entries:
                raise AssertionError(f"block {block_id} can never be evicted")
        if len(self._heap) > 2 * len(self._keys) + SLACK_ENTRIES:
            raise AssertionError(f"{len(self._heap)} entries for {len(self._keys)} blocks")

    def _compact(self) -> None:
        if len(self._heap) > 2 * len(self._keys) + SLACK_ENTRIES:
            self._heap = list(self._keys.values())
            heapify(self._heap)
