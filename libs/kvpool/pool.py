"""Which block of the arena is free, cached or in use, and what it holds. Pure bookkeeping.

A block is free (holds nothing), fresh (pinned, being filled, known by its id alone) or stored (full, known
by its hash, reusable). A stored block is in use while it is pinned or one of its children is in use:
a pin on a block pins its ancestors. A stored block that is not in use is cached. Eviction takes cached
blocks, leaves first, so what is held stays prefix-closed; `policy.evict` says in which order.

Several owners may pin one block. Copy-on-write rests on `writable`: an owner that is to write where it may
not takes a fresh block, has the bytes copied, and releases the shared one.

One thread, the event loop's. Knows neither bytes nor messages; AssertionError always means that the
caller broke the contract.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvhash import BlockHash
from kvindex.core import BlockEvent, Tier
from kvindex.inventory import HeldBlock, Inventory
from kvpool.bookkeeping import Block, check_bookkeeping
from kvpool.events import EventLog
from kvpool.evictable import EvictableBlocks
from policy.evict import EvictionCandidate, EvictionOrder


class NoBlocksError(Exception):
    """More blocks were asked for than are free or can be evicted; nothing was given or evicted."""


@dataclass(frozen=True, slots=True)
class PoolStats:
    """free + cached + in_use == blocks."""

    blocks: int
    free: int
    """Blocks that hold nothing."""
    cached: int
    """Reusable blocks nobody is using: given up on demand."""
    in_use: int
    """Pinned blocks and the ancestors of pinned blocks."""


class BlockPool:
    """The blocks 0 … `blocks` - 1 of one tier."""

    def __init__(self, blocks: int, *, eviction: str = "lru", tier: Tier = Tier.DRAM) -> None:
        """ValueError where `blocks` is below 1 or `eviction` is no EvictionOrder."""
        if blocks < 1:
            raise ValueError(f"blocks: {blocks}, at least 1")
        if eviction not in tuple(EvictionOrder):
            raise ValueError(f"eviction: {eviction!r}, one of {', '.join(EvictionOrder)}")
        self._tier = tier
        self._blocks = [Block() for _ in range(blocks)]
        # Taken from the end: the block that was freed last is given first, its pages are warm.
        self._free = list(range(blocks - 1, -1, -1))
        self._id_of: dict[BlockHash, int] = {}
        self._inventory = Inventory()
        self._cached = 0
        self._evictable = EvictableBlocks(EvictionOrder(eviction))
        self._events = EventLog()
        self._uses_seen = 0

    def match(self, hashes: Sequence[BlockHash]) -> int:
        """How many leading blocks of the chain `hashes` are held. O(log n): behind a block that is not held
        none is, what is held is prefix-closed."""
        return bisect_left(hashes, True, key=lambda block_hash: block_hash not in self._id_of)

    def match_in_use(self, hashes: Sequence[BlockHash]) -> int:
        """How many of them are in use: to pin these takes nothing from what is `available`."""
        return bisect_left(hashes, True, key=lambda block_hash: not self._is_in_use(block_hash))

    def acquire(self, hashes: Sequence[BlockHash]) -> list[int]:
        """Pin the leading blocks of the chain `hashes` that are held, each once: their ids, in order."""
        self._uses_seen += 1
        block_ids = []
        for block_hash in hashes:
            block_id = self._id_of.get(block_hash)
            if block_id is None:
                break
            self._pin(block_id)
            block_ids.append(block_id)
        return block_ids

    def allocate(self, count: int) -> list[int]:
        """`count` fresh blocks, each pinned once and of a new generation; evicts what it must.

        All or nothing: NoBlocksError where fewer than `count` are available. The blocks may hold anything.
        """
        if count < 0:
            raise ValueError(f"count: {count}, at least 0")
        if count > self.available():
            raise NoBlocksError(f"{count} blocks asked for, {self.available()} available")
        while len(self._free) < count:
            self._evict(self._evictable.pop())
        block_ids = [self._free.pop() for _ in range(count)]
        for block_id in block_ids:
            block = self._blocks[block_id]
            block.generation += 1
            block.pins = block.holds = 1
        return block_ids

    def store(self, block_id: int, block_hash: BlockHash, parent: BlockHash | None) -> bool:
        """Make a fresh, full block reusable under its hash, as a child of `parent`.

        False, and the block stays fresh, where the hash is held already or `parent` is not held.
        """
        block = self._pinned(block_id)
        if block.block_hash is not None:
            raise AssertionError(f"block {block_id} is stored already")
        if block_hash in self._id_of or (parent is not None and parent not in self._id_of):
            return False
        self._inventory.add(block_hash, parent, self._tier)
        self._id_of[block_hash] = block_id
        block.block_hash = block_hash
        block.used_at = self._uses_seen
        block.uses = 1
        if parent is not None:
            self._hold(self._id_of[parent])
        self._events.stored(block_hash, parent, self._tier)
        return True

    def store_or_share(self, block_id: int, block_hash: BlockHash, parent: BlockHash | None) -> int:
        """As `store`; where the hash is held already, this owner's pin moves to the block that holds it.

        Returns the block that the owner has now. Only for one who alone knows the address of `block_id`.
        """
        if self.store(block_id, block_hash, parent) or block_hash not in self._id_of:
            return block_id
        held_id = self._id_of[block_hash]
        self._pin(held_id)
        self.release((block_id,))
        return held_id

    def writable(self, block_id: int) -> bool:
        """Whether its owner may write to it: nobody else has it pinned, and no hash says what it holds."""
        block = self._pinned(block_id)
        return block.pins == 1 and block.block_hash is None

    def blocks_others_use(self, block_ids: Sequence[int]) -> int:
        """Of a sequence's blocks, how many leading ones stay stored and in use if it gives back its pins."""
        child_id: int | None = None
        for place in range(len(block_ids) - 1, -1, -1):
            block = self._pinned(block_ids[place])
            if block.block_hash is None:
                continue
            of_own_child = (
                child_id is not None and self._parent_id(self._blocks[child_id]) == block_ids[place]
            )
            if block.holds - 1 - of_own_child > 0:
                return place + 1
            child_id = block_ids[place]
        return 0

    def retain(self, block_ids: Iterable[int]) -> None:
        """Pin blocks once more that are pinned; another owner will release them."""
        for block_id in block_ids:
            block = self._pinned(block_id)
            block.pins += 1
            block.holds += 1

    def release(self, block_ids: Iterable[int]) -> None:
        """Take one pin back from each: at none left, a stored block stays cached, a fresh one is free."""
        self._uses_seen += 1
        for block_id in block_ids:
            block = self._pinned(block_id)
            block.pins -= 1
            if block.block_hash is not None:
                block.used_at = self._uses_seen
                self._unhold(block_id)
            else:
                block.holds -= 1
                if not block.pins:
                    self._free.append(block_id)

    def forget(self, block_ids: Sequence[int]) -> None:
        """Throw out the cached blocks of a chain that was just released: what they hold is not to be trusted.

        Blocks that are still in use, or have a child that is not among these, stay.
        """
        for block_id in reversed(block_ids):
            block = self._blocks[block_id]
            stored = block.block_hash
            if stored is not None and not block.holds and self._inventory.is_leaf(stored):
                self._evictable.discard(block_id)
                self._evict(block_id)

    def generation(self, block_id: int) -> int:
        """Grows whenever the block is given to a new owner; 0 before the first."""
        return self._blocks[block_id].generation

    def take_events(self) -> tuple[int, tuple[BlockEvent, ...]]:
        """(number of the first, events) of the inventory since the last call; see `kvpool.events`.

        Where none happened, (the number that the next will have, ()).
        """
        return self._events.take()

    def inventory(self) -> tuple[int, list[HeldBlock]]:
        """(as of this event, taken or not; all stored blocks, parents first). O(blocks)."""
        self._events.seal()
        return self._events.last_number, self._inventory.blocks()

    def stats(self) -> PoolStats:
        blocks, free = len(self._blocks), len(self._free)
        return PoolStats(blocks, free, self._cached, blocks - free - self._cached)

    def available(self) -> int:
        """Blocks that `allocate` could give now: the free and the cached."""
        return len(self._free) + self._cached

    def _is_in_use(self, block_hash: BlockHash) -> bool:
        block_id = self._id_of.get(block_hash)
        return block_id is not None and self._blocks[block_id].holds > 0

    def _pin(self, block_id: int) -> None:
        """One pin more on a stored block, in use or cached."""
        block = self._blocks[block_id]
        block.used_at = self._uses_seen
        block.uses += 1
        block.pins += 1
        self._hold(block_id)

    def _pinned(self, block_id: int) -> Block:
        block = self._blocks[block_id] if block_id >= 0 else None
        if block is None or not block.pins:
            raise AssertionError(f"block {block_id} is not pinned")
        return block

    def _hold(self, block_id: int) -> None:
        """Count one pin or one child in use more; a block that comes into use holds its parent.

        O(1) along a chain that is pinned from its start; O(depth) where a block alone is pinned.
        """
        current: int | None = block_id
        while current is not None:
            block = self._blocks[current]
            block.holds += 1
            if block.holds > 1:
                return
            self._cached -= 1
            self._evictable.discard(current)
            current = self._parent_id(block)

    def _unhold(self, block_id: int) -> None:
        """The inverse of `_hold`; the last block of the chain to fall out of use may be evicted."""
        current: int | None = block_id
        while current is not None:
            block = self._blocks[current]
            block.holds -= 1
            if block.holds:
                return
            self._cached += 1
            self._offer_leaf(current)
            current = self._parent_id(block)

    def _offer_leaf(self, block_id: int) -> None:
        """Make a cached block a candidate for eviction, if it has no child."""
        block = self._blocks[block_id]
        if block.block_hash is not None and self._inventory.is_leaf(block.block_hash):
            self._evictable.add(EvictionCandidate(block_id, block.used_at, block.uses))

    def _evict(self, block_id: int) -> None:
        block = self._blocks[block_id]
        assert block.block_hash is not None
        parent_id = self._parent_id(block)
        self._inventory.remove(block.block_hash)
        del self._id_of[block.block_hash]
        self._events.removed(block.block_hash, self._tier)
        block.block_hash = None
        self._cached -= 1
        self._free.append(block_id)
        if parent_id is not None and not self._blocks[parent_id].holds:
            self._offer_leaf(parent_id)

    def _parent_id(self, block: Block) -> int | None:
        assert block.block_hash is not None
        parent = self._inventory.parent(block.block_hash)
        return None if parent is None else self._id_of[parent]

    def check_integrity(self) -> None:
        """AssertionError where the bookkeeping contradicts itself. Looks at every block; for tests."""
        check_bookkeeping(
            self._blocks, self._free, self._id_of, self._inventory, self._evictable, self._cached
        )
