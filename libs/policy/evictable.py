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
        """The block may go from now on; what was said of it before is forgotten."""
        key = self._keys[candidate.block_id] = self._key(candidate)
        heappush(self._heap, key)
        if len(self._heap) > 2 * len(self._keys) + SLACK_ENTRIES:
            self._compact()

    def discard(self, block_id: int) -> None:
        """The block may not go any more; nothing happens where it is not in the set."""
        if self._keys.pop(block_id, None) and len(self._heap) > 2 * len(self._keys) + SLACK_ENTRIES:
            self._compact()

    def first(self) -> int | None:
        """The block that goes first, which stays in the set; None where the set is empty."""
        while self._heap:
            key = self._heap[0]
            if self._keys.get(key[-1]) == key:
                return key[-1]
            heappop(self._heap)
        return None

    def pop(self) -> int:
        """Take out the block that goes first. There must be one."""
        heap, keys = self._heap, self._keys
        while True:
            key = heappop(heap)
            block_id = key[-1]
            if keys.get(block_id) == key:
                del keys[block_id]
                if len(heap) > 2 * len(keys) + SLACK_ENTRIES:
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
        self._heap = list(self._keys.values())
        heapify(self._heap)
