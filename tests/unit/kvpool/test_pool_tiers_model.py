"""BlockPool over two and three tiers under random histories, against sets of blocks and real bytes.

The model keeps what each tier holds, what the bytes of every block and slot are, and what a disk remembers.
What is evicted is seen from the pool, and checked; everything else is foretold.
"""

from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.support.prompt_tree import chain, node_hash, parent_of, path_of

from kvhash import BlockHash, unpack
from kvindex.core import BlockAction, BlockEvent, Tier
from kvindex.inventory import Inventory
from kvpool import BlockPool, Copy, NoBlocksError, Rise, Sink
from policy.evict import BlockUse, EvictionOrder, SloClass

pytestmark = pytest.mark.unit

TIERS = tuple(Tier)
GARBAGE = b"garbage"

paths = st.lists(st.sampled_from([0, 0, 1, 2]), min_size=1, max_size=6).map(tuple)
uses = st.builds(BlockUse, st.integers(-2, 2), st.sampled_from(SloClass), st.none() | st.integers(0, 99))


@dataclass
class SinkUnderWay:
    sink: Sink
    stored: int
    """Which of the times that a block was stored the source was."""
    copied: bytes | None = None


@dataclass
class RiseUnderWay:
    rise: Rise
    copy_made: int
    """Which of the times that a copy came to a slot this one was."""
    prefix: BlockHash | None
    """What the first of several follows, which the pool keeps meanwhile."""
    copied: bytes | None = None


def copies_of(pool: BlockPool, tier: Tier) -> dict[BlockHash, int]:
    (tree,) = (found.tree for found in pool._stack.tiers if found.tier is tier)
    return {copy.facts.block_hash: copy.index for copy in tree}


def follow(inventory: Inventory, event: BlockEvent) -> None:
    """Apply one event; along every chain tiers only get slower after each of its blocks."""
    parent = BlockHash(event.parent) if event.parent else None
    for block_hash in unpack(event.block_hashes):
        match event.action:
            case BlockAction.STORED:
                inventory.add(block_hash, parent, event.tier)
                parent = block_hash
            case BlockAction.MOVED:
                assert inventory.tier(block_hash) is not event.tier
                inventory.move(block_hash, event.tier)
            case BlockAction.REMOVED:
                assert inventory.tier(block_hash) is event.tier
                inventory.remove(block_hash)
        for held, above, tier in inventory.blocks():
            if above is not None:
                assert TIERS.index(inventory.tier(above)) <= TIERS.index(tier), path_of(held)


def closed_part(copies: list[Copy]) -> dict[BlockHash, int]:
    """What can be restored of copies, by looking again and again until nothing more is found."""
    found: dict[BlockHash, int] = {}
    seen: set[BlockHash] = set()
    slots: set[int] = set()
    usable = []
    for copy in copies:
        if copy.block_hash not in seen and copy.slot not in slots:
            seen.add(copy.block_hash)
            slots.add(copy.slot)
            usable.append(copy)
    while True:
        more = [c for c in usable if c.block_hash not in found and (c.parent is None or c.parent in found)]
        if not more:
            return found
        found |= {copy.block_hash: copy.slot for copy in more}


class TieredPoolMachine(RuleBasedStateMachine):
    lower_tiers = 1

    @initialize(
        order=st.sampled_from(EvictionOrder),
        blocks=st.integers(3, 10),
        slots=st.lists(st.integers(1, 14), min_size=2, max_size=2),
        ahead=st.integers(0, 10).map(lambda missing: 10 - missing),
        eager=st.booleans(),
    )
    def start(self, order, blocks, slots, ahead, eager):
        tiers = TIERS[2 - self.lower_tiers :]
        self.blocks, self.compute, self.eager = blocks, tiers[0], eager
        self.slots = dict(zip(tiers[1:], slots, strict=False))
        self.settings = {
            "eviction": order,
            "tier": tiers[0],
            "lower": list(self.slots.items()),
            "sink_ahead_blocks": ahead,
        }
        self.disk: dict[int, tuple[BlockHash, BlockHash | None]] = {}
        self.times = 0
        self.start_process()

    def start_process(self):
        self.pool = BlockPool(self.blocks, **self.settings)
        self.pins: Counter[int] = Counter()
        self.held: dict[Tier, dict[BlockHash, int]] = {tier: {} for tier in (self.compute, *self.slots)}
        self.made: dict[tuple[Tier, int], int] = {}
        self.bytes: dict[tuple[Tier, int], bytes] = {}
        self.spoiled: dict[Tier, set[int]] = {tier: set() for tier in self.slots}
        self.sinks: list[SinkUnderWay] = []
        self.rises: list[RiseUnderWay] = []
        self.replica = Inventory()
        self.next_number = 1

    # What the model knows.

    def put(self, tier: Tier, index: int, block_hash: BlockHash) -> None:
        self.times += 1
        self.held[tier][block_hash] = index
        self.made[tier, index] = self.times

    def drop(self, tier: Tier, block_hash: BlockHash) -> None:
        del self.made[tier, self.held[tier].pop(block_hash)]

    def below(self, block_hash: BlockHash, other: BlockHash) -> bool:
        path, start = path_of(other), path_of(block_hash)
        return path[: len(start)] == start

    def in_use(self) -> set[BlockHash]:
        pinned = {h for h, i in self.held[self.compute].items() if self.pins[i]}
        pinned |= {flight.prefix for flight in self.rises if flight.prefix is not None}
        return {h for h in self.held[self.compute] if any(self.below(h, p) for p in pinned)}

    def free(self) -> int:
        fresh = {i for i, pins in self.pins.items() if pins} | set(self.held[self.compute].values())
        return self.blocks - len(fresh)

    def fresh(self) -> list[int]:
        stored = set(self.held[self.compute].values())
        rising = {flight.rise.block_id for flight in self.rises}
        return sorted(i for i, pins in self.pins.items() if pins and i not in stored and i not in rising)

    def pinned(self) -> list[int]:
        rising = {flight.rise.block_id for flight in self.rises}
        return sorted(i for i, pins in self.pins.items() if pins and i not in rising)

    def see_evictions(self, tier: Tier) -> set[BlockHash]:
        """What the pool evicted from a tier: only that is not foretold."""
        now = copies_of(self.pool, tier)
        gone = self.held[tier].keys() - now.keys()
        for block_hash in gone:
            self.drop(tier, block_hash)
        assert now == self.held[tier]
        return gone

    # What owners of blocks do.

    def allocate_blocks(self, count: int) -> list[int]:
        in_use, free, before = self.in_use(), self.free(), len(self.held[self.compute])
        block_ids = self.pool.allocate(count)
        gone = self.see_evictions(self.compute)
        assert len(gone) == max(0, count - free)
        assert before - len(self.held[self.compute]) == len(gone)
        assert not gone & in_use
        for block_id in block_ids:
            assert not self.pins[block_id]
            self.pins[block_id] = 1
            self.bytes[self.compute, block_id] = GARBAGE
        return block_ids

    @rule(data=st.data())
    def allocate(self, data):
        available = self.free() + len(self.held[self.compute]) - len(self.in_use())
        assert self.pool.available() == available
        with pytest.raises(NoBlocksError):
            self.pool.allocate(available + 1)
        self.allocate_blocks(data.draw(st.integers(0, available)))

    def store_block(self, block_id: int, path, use=None) -> None:
        block_hash, parent = node_hash(path), parent_of(path)
        here = self.held[self.compute]
        expected = block_hash not in here and (parent is None or parent in here)
        self.bytes[self.compute, block_id] = block_hash
        assert self.pool.store(block_id, block_hash, parent, use) is expected
        if expected:
            self.put(self.compute, block_id, block_hash)

    @precondition(lambda self: self.fresh())
    @rule(data=st.data(), path=paths, use=st.none() | uses)
    def store(self, data, path, use):
        """A block that nobody has, one that lies below, or one that is held already."""
        known = sorted({path_of(h) for held in self.held.values() for h in held})
        path = data.draw(st.sampled_from([path, *known]))
        self.store_block(data.draw(st.sampled_from(self.fresh())), path, use)

    @rule(prompts=st.lists(paths, min_size=1, max_size=4), pinned=st.integers(0, 12), use=st.none() | uses)
    def serve(self, prompts, pinned, use):
        """Requests one after the other, the last of which may go on using its blocks."""
        for path in prompts[:-1]:
            self.serve_one(path, 0, use)
        self.serve_one(prompts[-1], max(0, pinned - 6), use)

    def serve_one(self, path, pinned, use):
        """What can be computed on is pinned, the rest computed, the last of it still used."""
        block_ids = self.acquire_blocks(path, use)
        missing = len(path) - len(block_ids)
        for block_id in self.allocate_blocks(min(missing, self.pool.available())):
            block_ids.append(block_id)
            self.store_block(block_id, path[: len(block_ids)], use)
        self.release_blocks(block_ids[pinned:], use)

    def acquire_blocks(self, path, use) -> list[int]:
        here = self.held[self.compute]
        block_ids = self.pool.acquire(chain(path), use)
        assert block_ids == [here[h] for h in chain(path)[: len(block_ids)]]
        assert len(block_ids) == len(path) or node_hash(path[: len(block_ids) + 1]) not in here
        self.pins.update(block_ids)
        return block_ids

    @precondition(lambda self: self.pinned())
    @rule(data=st.data(), use=st.none() | uses)
    def release(self, data, use):
        self.release_blocks(data.draw(st.lists(st.sampled_from(self.pinned()), unique=True)), use)

    def release_blocks(self, block_ids, use=None) -> None:
        self.pool.release(block_ids, use)
        self.pins.subtract(block_ids)

    @rule(path=paths)
    def distrust(self, path):
        """A chain that nobody uses is thrown out of all tiers, with what hangs on it in the lower ones."""
        block_ids = self.pool.acquire(chain(path))
        self.pool.release(block_ids)
        self.pool.forget(block_ids)
        in_use = self.in_use()
        for block_hash in reversed(chain(path)[: len(block_ids)]):
            has_child = sum(self.below(block_hash, other) for other in self.held[self.compute]) > 1
            if block_hash not in in_use and not has_child:
                self.drop(self.compute, block_hash)
                for tier in self.slots:
                    self.lose(tier, block_hash)

    def lose(self, tier: Tier, block_hash: BlockHash) -> None:
        if block_hash in self.held[tier]:
            for other in [other for other in self.held[tier] if self.below(block_hash, other)]:
                self.spoiled[tier].add(self.held[tier][other])
                self.drop(tier, other)

    # What the mover does.

    @rule(blocks_max=st.integers(1, 6), ahead=st.none() | st.integers(0, 20))
    def take_sinks(self, blocks_max, ahead):
        self.take(blocks_max, ahead)

    def take(self, blocks_max, ahead) -> tuple[Sink, ...]:
        read = {(flight.rise.tier, flight.rise.slot) for flight in self.rises}
        read |= {(flight.sink.source, flight.sink.source_index) for flight in self.sinks}
        before = {tier: dict(held) for tier, held in self.held.items()}
        sinks = self.pool.take_sinks(blocks_max, ahead)
        assert len(sinks) <= blocks_max
        assert copies_of(self.pool, self.compute) == self.held[self.compute]
        for tier in self.slots:
            gone = self.see_evictions(tier)
            assert len(gone) <= sum(sink.tier is tier for sink in sinks)
            assert not {(tier, before[tier][block_hash]) for block_hash in gone} & read
        for sink in sinks:
            assert self.held[sink.source][sink.block_hash] == sink.source_index
            assert sink.block_hash not in self.held[sink.tier]
            assert sink.parent == parent_of(path_of(sink.block_hash))
            ahead_of_it = {flight.sink.block_hash for flight in self.sinks if flight.sink.tier is sink.tier}
            assert sink.block_hash not in ahead_of_it
            assert sink.parent is None or sink.parent in ahead_of_it | self.held[sink.tier].keys()
            assert 0 <= sink.slot < self.slots[sink.tier]
            assert sink.slot not in self.spoiled[sink.tier]
            generation = self.pool.generation(sink.source_index) if sink.source is self.compute else 0
            assert sink.generation == generation
            self.sinks.append(SinkUnderWay(sink, self.made[sink.source, sink.source_index]))
        return sinks

    @rule(prompts=st.lists(paths, min_size=2, max_size=6), blocks_max=st.integers(1, 6))
    def serve_and_sink(self, prompts, blocks_max):
        """The mover keeps up."""
        for path in prompts:
            self.serve_one(path, 0, None)
            while self.take(blocks_max, None):
                for flight in self.sinks:
                    self.report_sunk(flight)
                self.sinks.clear()

    @precondition(lambda self: self.sinks or self.rises)
    @rule(data=st.data())
    def copy(self, data):
        """The bytes are read at some moment while the copy is under way, whatever they are by then."""
        flight = data.draw(st.sampled_from([*self.sinks, *self.rises]))
        if isinstance(flight, SinkUnderWay):
            self.copy_sink(flight)
        else:
            self.copy_rise(flight)

    def copy_sink(self, flight: SinkUnderWay) -> None:
        """As the mover does it: what is another's by its generation does not even reach the disk."""
        sink = flight.sink
        flight.copied = self.bytes.get((sink.source, sink.source_index), GARBAGE)
        if sink.source is self.compute and self.pool.generation(sink.source_index) != sink.generation:
            return
        self.bytes[sink.tier, sink.slot] = flight.copied
        assert flight.copied == sink.block_hash, "another block's bytes would outlive a crash"
        if sink.tier is Tier.SSD:
            self.disk[sink.slot] = (sink.block_hash, sink.parent)

    @precondition(lambda self: self.sinks)
    @rule(data=st.data(), written=st.sampled_from([True, True, True, False]))
    def end_sink(self, data, written):
        """Mostly in order, as promised; a late or an early report does no harm either."""
        flight = self.sinks.pop(data.draw(st.just(0) | st.integers(0, len(self.sinks) - 1)))
        if written:
            self.report_sunk(flight)
        else:
            self.pool.sink_failed(flight.sink)

    def report_sunk(self, flight: SinkUnderWay) -> None:
        sink = flight.sink
        if flight.copied is None:
            self.copy_sink(flight)
        is_there = (
            self.held[sink.source].get(sink.block_hash) == sink.source_index
            and self.made[sink.source, sink.source_index] == flight.stored
        )
        expected = is_there and (sink.parent is None or sink.parent in self.held[sink.tier])
        assert self.pool.sunk(sink) is expected
        if expected:
            assert flight.copied == sink.block_hash, "another block's bytes were kept under this hash"
            self.put(sink.tier, sink.slot, sink.block_hash)
        else:
            self.spoiled[sink.tier].add(sink.slot)

    @precondition(lambda self: any(self.spoiled.values()))
    @rule(slots_max=st.integers(1, 4), erased=st.booleans())
    def erase(self, slots_max, erased):
        """What is not to be trusted is not found again after a crash, once that is done."""
        for tier in self.slots:
            self.erase_in(tier, slots_max, erased)

    def erase_in(self, tier: Tier, slots_max: int, erased: bool) -> bool:
        slots = self.pool.erasures(tier, slots_max)
        read = {flight.rise.slot for flight in self.rises if flight.rise.tier is tier}
        read |= {flight.sink.source_index for flight in self.sinks if flight.sink.source is tier}
        assert set(slots) <= self.spoiled[tier] - read
        assert len(slots) == min(slots_max, len(self.spoiled[tier] - read))
        for slot in slots:
            self.pool.end_erasure(tier, slot, erased)
            if erased:
                self.spoiled[tier].remove(slot)
                if tier is Tier.SSD:
                    self.disk.pop(slot, None)
        return bool(slots)

    def lying_below(self) -> list[tuple[int, ...]]:
        held = {h for tier in self.slots for h in self.held[tier]} - self.held[self.compute].keys()
        return sorted(map(path_of, held))

    @precondition(lambda self: self.lying_below())
    @rule(data=st.data())
    def rise(self, data):
        """A hit below is brought up before anything else happens."""
        before = len(self.rises)
        self.begin(data.draw(st.sampled_from(self.lying_below())), None)
        while len(self.rises) > before:
            self.report_risen(self.rises.pop(before))

    @rule(data=st.data(), path=paths, blocks_max=st.none() | st.integers(0, 4))
    def begin_rise(self, data, path, blocks_max):
        self.begin(data.draw(st.sampled_from(self.lying_below() or [path])), blocks_max)

    def begin(self, path, blocks_max):
        hashes = chain(path)
        start = self.pool.match(hashes)
        held = self.pool.match_held(hashes)
        prefix = {h: self.held[self.compute][h] for h in hashes[:start]}
        rises = self.pool.begin_rise(hashes, blocks_max)
        self.see_evictions(self.compute)
        assert prefix.items() <= self.held[self.compute].items(), "the prefix went to make room"
        wanted = held - start if blocks_max is None else min(blocks_max, held - start)
        assert len(rises) <= wanted
        assert len(rises) == wanted or self.pool.available() == 0 or not rises
        for rise, block_hash in zip(rises, hashes[start:], strict=False):
            fastest = next(tier for tier in self.slots if block_hash in self.held[tier])
            assert (rise.block_hash, rise.tier) == (block_hash, fastest)
            assert rise.slot == self.held[fastest][block_hash]
            assert rise.parent == parent_of(path_of(block_hash))
            assert not self.pins[rise.block_id]
            self.pins[rise.block_id] = 1
            self.bytes[self.compute, rise.block_id] = GARBAGE
            is_first = block_hash == hashes[start]
            prefix = rise.parent if is_first else None
            self.rises.append(RiseUnderWay(rise, self.made[fastest, rise.slot], prefix))

    def copy_rise(self, flight: RiseUnderWay) -> None:
        flight.copied = self.bytes[flight.rise.tier, flight.rise.slot]
        self.bytes[self.compute, flight.rise.block_id] = flight.copied

    @precondition(lambda self: self.rises)
    @rule(data=st.data(), outcome=st.sampled_from(["risen", "risen", "failed", "lost"]))
    def end_rise(self, data, outcome):
        flight = self.rises.pop(data.draw(st.just(0) | st.integers(0, len(self.rises) - 1)))
        if outcome == "risen":
            self.report_risen(flight)
        else:
            self.report_failed(flight, outcome == "lost")

    def report_risen(self, flight: RiseUnderWay) -> None:
        rise, here = flight.rise, self.held[self.compute]
        if flight.copied is None:
            self.copy_rise(flight)
        assert flight.copied == rise.block_hash, "the slot was given to another block while it was read"
        kept = (
            self.held[rise.tier].get(rise.block_hash) == rise.slot
            and self.made[rise.tier, rise.slot] == flight.copy_made
        )
        block_id = self.pool.risen(rise)
        if rise.block_hash in here:
            assert block_id == here[rise.block_hash] != rise.block_id
            self.pins[block_id] += 1
            self.pins[rise.block_id] -= 1
        elif kept and (rise.parent is None or rise.parent in here):
            assert block_id == rise.block_id
            self.put(self.compute, block_id, rise.block_hash)
        else:
            assert block_id is None
            self.pins[rise.block_id] -= 1

    def report_failed(self, flight: RiseUnderWay, lost: bool) -> None:
        rise = flight.rise
        kept = self.made.get((rise.tier, rise.slot)) == flight.copy_made
        self.pool.rise_failed(rise, lost)
        self.pins[rise.block_id] -= 1
        if lost and kept:
            self.lose(rise.tier, rise.block_hash)

    @rule(data=st.data())
    def crash(self, data):
        """All but the disk is lost; what it remembers comes in any order, old records among it."""
        records = [Copy(slot, block_hash, parent) for slot, (block_hash, parent) in self.disk.items()]
        copies = data.draw(st.permutations(records))
        self.start_process()
        taken = closed_part(copies)
        assert self.pool.restore(Tier.SSD, copies) == len(taken)
        for block_hash, slot in taken.items():
            self.put(Tier.SSD, slot, block_hash)
            self.bytes[Tier.SSD, slot] = block_hash

    @rule()
    def follow_events(self):
        first_number, events = self.pool.take_events()
        assert first_number == self.next_number
        self.next_number += len(events)
        for event in events:
            follow(self.replica, event)
        as_of, blocks = self.pool.inventory()
        assert as_of == self.next_number - 1
        assert sorted(self.replica.blocks()) == sorted(blocks)
        Inventory(blocks)

    def compare_matches(self, path):
        hashes = chain(path)
        ends = [sum(h in held for h in hashes) for held in self.held.values()]
        assert self.pool.match(hashes) == ends[0]
        assert self.pool.match_held(hashes) == max(ends)
        runs = {run.tier: run.blocks for run in self.pool.tier_runs(hashes)}
        expected, end = {}, 0
        for tier, matched in zip(self.held, ends, strict=True):
            if matched > end:
                expected[tier], end = matched - end, matched
        assert runs == expected

    @invariant()
    def agrees_with_the_model(self):
        if self.eager:
            self.follow_events()
        self.pool.check_integrity()
        for tier, held in self.held.items():
            assert copies_of(self.pool, tier) == held
            assert all(parent_of(path_of(h)) is None or parent_of(path_of(h)) in held for h in held)
            for block_hash in held:
                self.compare_matches((*path_of(block_hash), 2, 1))
        fastest = {h: tier for tier, held in reversed(self.held.items()) for h in held}
        inventory = {h: (parent, tier) for h, parent, tier in self.pool._inventory.blocks()}
        assert inventory == {h: (parent_of(path_of(h)), tier) for h, tier in fastest.items()}
        stats = self.pool.stats()
        cached = len(self.held[self.compute]) - len(self.in_use())
        assert (stats.free, stats.cached) == (self.free(), cached)
        assert stats.free + stats.cached + stats.in_use == stats.blocks == self.blocks
        for tier in stats.tiers:
            assert tier.free + tier.copies + tier.moving == tier.blocks == self.slots[tier.tier]
            assert tier.copies == len(self.held[tier.tier])
            assert tier.moving >= len(self.spoiled[tier.tier])
            assert tier.lying == list(fastest.values()).count(tier.tier)

    def teardown(self):
        """Once everybody is done, all that the slowest tier has room for survives giving up every block."""
        if not hasattr(self, "pool"):
            return
        for flight in self.sinks:
            self.report_sunk(flight)
        for flight in self.rises:
            self.report_failed(flight, lost=False)
        self.sinks, self.rises = [], []
        for block_id in self.pinned():
            self.release_blocks([block_id] * self.pins[block_id])
        for pins in self.pins.values():
            assert not pins
        for block_hash in list(self.held[self.compute]):
            self.release_blocks(self.acquire_blocks(path_of(block_hash), None))
        self.drain()
        self.agrees_with_the_model()
        below = next(iter(self.slots))
        has_room = len(self.held[below]) < self.slots[below]
        assert not has_room or self.held[self.compute].keys() <= self.held[below].keys()
        assert self.pool.available() == self.blocks
        held = len(self.pool.inventory()[1])
        self.allocate_blocks(self.blocks)
        assert not has_room or len(self.pool.inventory()[1]) == held
        self.follow_events()
        self.pool.check_integrity()

    def drain(self):
        """Sinking comes to an end, and leaves out nothing but what failed before or is worth too little."""
        for tier in self.slots:
            while self.erase_in(tier, 4, erased=True):
                pass
        rounds_max = 4 * (self.blocks + sum(self.slots.values()))
        for _ in range(rounds_max):
            sinks = self.take(4, self.blocks + sum(self.slots.values()))
            if not sinks:
                return
            for flight in self.sinks:
                self.report_sunk(flight)
            self.sinks = []
        raise AssertionError("sinking goes round in circles")


class ThreeTierPoolMachine(TieredPoolMachine):
    lower_tiers = 2


TieredPoolMachine.TestCase.settings = settings(max_examples=50, stateful_step_count=40)
ThreeTierPoolMachine.TestCase.settings = settings(max_examples=50, stateful_step_count=40)
TestTwoTiers = TieredPoolMachine.TestCase
TestThreeTiers = ThreeTierPoolMachine.TestCase
