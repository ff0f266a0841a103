"""Which block of the arena is free, cached or in use, and what it holds. Pure bookkeeping.

A block is free (holds nothing), fresh (pinned, being filled, known by its id alone) or stored (full, known
by its hash, reusable). A stored block is in use while it is pinned or one of its children is in use:
a pin on a block pins its ancestors. A stored block that is not in use is cached. Eviction takes cached
blocks, leaves first, so what is held stays prefix-closed; `policy.evict` says in which order.

Several owners may pin one block. Copy-on-write rests on `writable`: an owner that is to write where it may
not takes a fresh block, has the bytes copied, and releases the shared one.

Below the blocks that are computed on there may be further tiers, whose slots keep copies: `tier_stack` says
what that means for what is held, `sinks` what is copied down and when, `rises` how it comes up again.

One thread, the event loop's. Knows neither bytes nor messages; AssertionError always means that the
caller broke the contract.
"""

from collections.abc import Iterable, Sequence

from kvhash import BlockHash
from kvindex.core import BlockEvent, Tier, TierRun
from kvindex.inventory import HeldBlock
from kvindex.runs import InventorySnapshot
from kvpool.compute_tier import ComputeTier, others_hold
from kvpool.lower_tier import LowerTier
from kvpool.rises import Rises
from kvpool.sinks import Sinks
from kvpool.tier_copy import BlockFacts, TierCopy
from kvpool.tier_stack import TierStack, is_faster
from kvpool.tiers import Copy, PoolStats, Rise, Sink
from policy.evict import BlockUse, EvictionOrder, EvictionScale


class NoBlocksError(Exception):
    """More blocks were asked for than are free or can be evicted; nothing was given or evicted."""


class BlockPool:
    """The blocks 0 … `blocks` - 1 of the tier that is computed on, and the slots of the tiers below it."""

    def __init__(
        self,
        blocks: int,
        *,
        eviction: EvictionOrder | str = "lru",
        tier: Tier = Tier.DRAM,
        lower: Sequence[tuple[Tier, int]] = (),
        sink_ahead_blocks: int = 0,
    ) -> None:
        """`lower`: further tiers with their slots, each slower than the one before. `sink_ahead_blocks`: how
        many blocks of a tier should be ready to go without loss. ValueError where these make no pool."""
        if blocks < 1:
            raise ValueError(f"blocks: {blocks}, at least 1")
        if eviction not in tuple(EvictionOrder):
            raise ValueError(f"eviction: {eviction!r}, one of {', '.join(EvictionOrder)}")
        if sink_ahead_blocks < 0:
            raise ValueError(f"sink_ahead_blocks: {sink_ahead_blocks}, at least 0")
        above = tier
        for below, slots in lower:
            if slots < 1 or not is_faster(above, below):
                raise ValueError(
                    f"lower: {slots} slots in {below} below {above}; from 1 on, each tier slower"
                )
            above = below
        order = EvictionOrder(eviction)
        self._compute = ComputeTier(tier, blocks, order)
        self._lower = {below: LowerTier(below, slots, order) for below, slots in lower}
        self._stack = TierStack(self._compute, tuple(self._lower.values()))
        self._inventory = self._stack.inventory
        self._events = self._stack.events
        self._sinks = Sinks(self._stack, sink_ahead_blocks)
        self._rises = Rises(self._stack)
        self._now = 0
        """Ticks once for each block that comes in, and once for each use, which is a few times a request."""

    def set_cost_doubles_at_blocks(self, depth_blocks: int) -> None:
        """At the start, while nothing is stored: at which depth a block costs twice what the first of a chain
        does, as measured (`policy.evict.cost_doubles_at_blocks`); until then it is assumed."""
        for tier in self._stack.tiers:
            tier.tree.weigh_by(EvictionScale(turnover=len(tier), cost_doubles_at_blocks=depth_blocks))

    def match(self, hashes: Sequence[BlockHash]) -> int:
        """How many leading blocks of the chain `hashes` can be computed on. O(log n): behind a block that is
        not held none is, what is held is prefix-closed."""
        return self._compute.tree.match(hashes)

    def match_held(self, hashes: Sequence[BlockHash]) -> int:
        """How many of them are held in any tier. O(log n)."""
        return sum(run.blocks for run in self.tier_runs(hashes))

    def tier_runs(self, hashes: Sequence[BlockHash]) -> tuple[TierRun, ...]:
        """Where these lie, at most one run for each tier, which get slower. O(log n)."""
        return self._stack.tier_runs(hashes)

    def match_in_use(self, hashes: Sequence[BlockHash]) -> int:
        """How many of them are in use: to pin these takes nothing from what is `available`."""
        return self._compute.tree.match_in_use(hashes)

    def acquire(self, hashes: Sequence[BlockHash], use: BlockUse | None = None) -> list[int]:
        """Pin the leading blocks of the chain `hashes` that can be computed on, each once: their ids, in
        order. `use`: what the request is worth that uses them."""
        self._now += 1
        block_ids = []
        for block_hash in hashes:
            copy = self._compute.tree.get(block_hash)
            if copy is None:
                break
            self._share(copy, use)
            block_ids.append(copy.index)
        return block_ids

    def allocate(self, count: int) -> list[int]:
        """`count` fresh blocks, each pinned once and of a new generation; evicts what it must.

        All or nothing: NoBlocksError where fewer than `count` are available. The blocks may hold anything.
        """
        if count < 0:
            raise ValueError(f"count: {count}, at least 0")
        if count > self.available():
            raise NoBlocksError(f"{count} blocks asked for, {self.available()} available")
        while self._compute.free < count:
            self._stack.evict(self._compute)
        self._now += count
        return self._compute.take(count)

    def store(
        self, block_id: int, block_hash: BlockHash, parent: BlockHash | None, use: BlockUse | None = None
    ) -> bool:
        """Make a fresh, full block reusable under its hash, as a child of `parent`.

        False, and the block stays fresh, where the compute tier has the hash already or not `parent`.
        """
        if self._compute.pinned(block_id).copy is not None:
            raise AssertionError(f"block {block_id} is stored already")
        tree = self._compute.tree
        if block_hash in tree or (parent is not None and parent not in tree):
            return False
        facts = self._stack.facts_below(block_hash)
        if facts is None:
            above = None if parent is None else tree.get(parent)
            depth_blocks = 0 if above is None else above.facts.depth_blocks + 1
            facts = BlockFacts(block_hash, parent, depth_blocks, self._now)
        facts.uses += 1
        self._put(block_id, facts, use)
        return True

    def store_or_share(
        self, block_id: int, block_hash: BlockHash, parent: BlockHash | None, use: BlockUse | None = None
    ) -> int:
        """As `store`; where the hash is held already, this owner's pin moves to the block that holds it.

        Returns the block that the owner has now. Only for one who alone knows the address of `block_id`.
        """
        if self.store(block_id, block_hash, parent, use):
            return block_id
        held = self._compute.tree.get(block_hash)
        if held is None:
            return block_id
        self._share(held, use)
        self.release((block_id,))
        return held.index

    def writable(self, block_id: int) -> bool:
        """Whether its owner may write to it: nobody else has it pinned, and no hash says what it holds."""
        block = self._compute.pinned(block_id)
        return block.pins == 1 and block.copy is None

    def blocks_others_use(self, block_ids: Sequence[int]) -> int:
        """Of a sequence's blocks, how many leading ones stay stored and in use if it gives back its pins."""
        return others_hold([self._compute.pinned(block_id) for block_id in block_ids])

    def retain(self, block_ids: Iterable[int]) -> None:
        """Pin blocks once more that are pinned; another owner will release them."""
        for block_id in block_ids:
            self._compute.pinned(block_id)
            self._compute.pin(block_id)

    def release(self, block_ids: Iterable[int], use: BlockUse | None = None) -> None:
        """Take one pin back from each: at none left, a stored block stays cached, a fresh one is free."""
        released = tuple(block_ids)
        self._now += bool(released)
        for block_id in released:
            copy = self._compute.pinned(block_id).copy
            if copy is not None:
                self._used(copy.facts, use)
            self._compute.unpin(block_id)

    def forget(self, block_ids: Sequence[int]) -> None:
        """Throw out the cached blocks of a chain that was just released: what they hold is not to be trusted,
        nor are their copies in other tiers, and what hangs on those there.

        Blocks that are still in use, or have a child that is not among these, stay.
        """
        for block_id in reversed(block_ids):
            copy = self._compute.block(block_id).copy
            if copy is None or copy.holds or copy.children:
                continue
            for tier in reversed(self._lower.values()):
                below = tier.tree.get(copy.facts.block_hash)
                if below is not None:
                    self._stack.lose(tier, below)
            self._stack.remove(self._compute, copy)

    def generation(self, block_id: int) -> int:
        """Grows whenever the block is given to a new owner, before that one has it; 0 before the first. May
        be asked from any thread."""
        return self._compute.generation(block_id)

    def take_sinks(
        self, blocks_max: int, ahead_blocks: int | None = None, into: Tier | None = None
    ) -> tuple[Sink, ...]:
        """What to copy one tier down next, at most so many; the slots are reserved until each is reported by
        `sunk` or `sink_failed`, in this order: a child that is reported before its parent is thrown away.

        Blocks that go next and have no copy below come first, their ancestors before them, until in each
        tier `ahead_blocks` (None: `sink_ahead_blocks`) are free or can go without loss. `into`: only what
        is to be copied to that tier.
        """
        if blocks_max < 1:
            raise ValueError(f"blocks_max: {blocks_max}, at least 1")
        return self._sinks.take(blocks_max, ahead_blocks, into)

    def sunk(self, sink: Sink) -> bool:
        """The copy is complete. False: it is thrown away, because the block it was made of was given up
        meanwhile, or its parent's copy is not there."""
        return self._sinks.end(sink, written=True)

    def sink_failed(self, sink: Sink) -> None:
        """The copy was not made. The block is not tried again before it is used again."""
        self._sinks.end(sink, written=False)

    def tier_fails(self, tier: Tier, fails: bool) -> None:
        """Nothing can be written to a lower tier for now: the one above gives up blocks as if it were the
        lowest, instead of waiting until they are copied down."""
        self._sinks.tier_fails(tier, fails)

    def erasures(self, tier: Tier, slots_max: int) -> tuple[int, ...]:
        """Slots of a lower tier that hold what is not to be trusted, or not to be found again: to be erased
        in this order, and of no use before that is reported by `end_erasure`."""
        return self._lower[tier].erasures(slots_max)

    def end_erasure(self, tier: Tier, slot: int, erased: bool) -> None:
        """The slot was erased, or could not be: then it stays as it is, and the others come first."""
        self._lower[tier].end_erasure(slot, erased)

    def begin_rise(self, hashes: Sequence[BlockHash], blocks_max: int | None = None) -> tuple[Rise, ...]:
        """Copies to read up, for the blocks of the chain `hashes` from `match(hashes)` on: as many as lie
        below and as there are blocks for now. Each pins its slot, and its fresh block for the caller, until
        it is reported by `risen`, in this order, or by `rise_failed`."""
        start = self.match(hashes)
        sources = self._rises.sources(hashes, start, blocks_max)
        prefix = self._compute.tree.get(hashes[start - 1]) if start and sources else None
        if prefix is not None:
            self._compute.pin(prefix.index)
        del sources[self.available() :]
        if not sources:
            if prefix is not None:
                self._compute.unpin(prefix.index)
            return ()
        self._now += 1
        return self._rises.begin(sources, self.allocate(len(sources)), prefix)

    def risen(self, rise: Rise) -> int | None:
        """The fresh block holds what the slot held, verified. Returns the block that the caller has pinned
        now: this one, or the one that was stored under the hash meanwhile. None, and nothing is pinned,
        where the block's parent cannot be computed on, or its copy was given up meanwhile."""
        facts = self._rises.end(rise, lost=False)
        held = self._compute.tree.get(rise.block_hash)
        if held is not None:
            self._compute.pin(held.index)
            self._used(held.facts, None)
            self._compute.unpin(rise.block_id)
            return held.index
        if facts is None or (rise.parent is not None and rise.parent not in self._compute.tree):
            self._compute.unpin(rise.block_id)
            return None
        self._lower[rise.tier].risen_total += 1
        self._put(rise.block_id, facts, None)
        return rise.block_id

    def rise_failed(self, rise: Rise, lost: bool) -> None:
        """The slot was not read; the fresh block is given back. `lost`: what the slot holds is no good, its
        copy is given up with all that hangs on it in that tier."""
        self._rises.end(rise, lost)
        self._compute.unpin(rise.block_id)

    def restore(self, tier: Tier, copies: Iterable[Copy]) -> int:
        """At the start: take in what the store of a lower tier found again, the least recently used first,
        in any order of chains. Left out are copies without an unbroken chain to a first block, second copies
        of a block or a slot, and slots that are not free. Returns how many were taken in. O(n)."""
        found = list(copies)
        taken = self._stack.restore(self._lower[tier], found, self._now + 1)
        self._now += len(found)
        return taken

    def take_events(self) -> tuple[int, tuple[BlockEvent, ...]]:
        """(number of the first, events) of the inventory since the last call; see `kvpool.events`.

        Where none happened, (the number that the next will have, ()).
        """
        return self._events.take()

    def inventory(self) -> tuple[int, list[HeldBlock]]:
        """(as of this event, taken or not; all stored blocks, parents first). O(blocks)."""
        self._events.seal()
        return self._events.last_number, self._inventory.blocks()

    def inventory_snapshot(self) -> tuple[int, InventorySnapshot]:
        """As `inventory`, but packed later: what takes long may be done in another thread."""
        self._events.seal()
        return self._events.last_number, self._inventory.snapshot()

    def stats(self) -> PoolStats:
        blocks, free, cached = len(self._compute), self._compute.free, self._compute.tree.cached
        tiers = tuple(tier.stats(self._inventory.blocks_in(tier.tier)) for tier in self._lower.values())
        dropped, gone = self._stack.dropped_total, self._stack.gone_total
        return PoolStats(blocks, free, cached, blocks - free - cached, tiers, dropped, gone)

    def available(self) -> int:
        """Blocks that `allocate` could give now: the free and the cached."""
        return self._compute.free + self._compute.tree.cached

    def _share(self, copy: TierCopy, use: BlockUse | None) -> None:
        """One pin and one use more of a stored block."""
        copy.facts.uses += 1
        copy.unsinkable = False
        self._compute.pin(copy.index)
        self._used(copy.facts, use)

    def _put(self, block_id: int, facts: BlockFacts, use: BlockUse | None) -> None:
        """A fresh block holds that from now on."""
        self._compute.store(block_id, facts)
        self._used(facts, use)
        self._stack.came(facts, self._compute.tier)

    def _used(self, facts: BlockFacts, use: BlockUse | None) -> None:
        facts.used_at = self._now
        if use is not None:
            facts.use = use
        self._stack.touch(facts)

    def check_integrity(self) -> None:
        """AssertionError where the bookkeeping contradicts itself. Looks at every block; for tests."""
        self._stack.check_integrity()
        self._sinks.check_integrity()
        for tier in self._lower.values():
            readers = self._sinks.readers(tier) + self._rises.readers(tier)
            tier.check_users(readers, self._sinks.awaited(tier))
