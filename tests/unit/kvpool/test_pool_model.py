"""BlockPool against a model that searches where the pool keeps counts, under random operations."""

from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.support.prompt_tree import chain, node_hash, parent_of, path_of

from kvhash import BlockHash
from kvindex.core import BlockAction, HeldRun, InstanceId, Tier
from kvindex.directory import Directory
from kvpool import BlockPool, NoBlocksError, PoolStats
from policy.evict import EvictionCandidate, EvictionOrder, evict

pytestmark = pytest.mark.unit

BLOCKS = 12
POOL = InstanceId("pool")


@dataclass
class ModelBlock:
    pins: int = 0
    block_hash: BlockHash | None = None
    parent: BlockHash | None = None
    used_at: int = 0
    uses: int = 0


class PoolModel:
    """The contract of BlockPool in its plainest form: it looks at every block at every question."""

    def __init__(self, order: EvictionOrder) -> None:
        self.order = order
        self.blocks: dict[int, ModelBlock] = {}
        self.clock = 0

    def id_of(self, block_hash: BlockHash | None) -> int | None:
        return next((i for i, b in self.blocks.items() if block_hash and b.block_hash == block_hash), None)

    def children(self, block: ModelBlock) -> list[ModelBlock]:
        return [b for b in self.blocks.values() if block.block_hash and b.parent == block.block_hash]

    def in_use(self, block: ModelBlock) -> bool:
        return block.pins > 0 or any(self.in_use(child) for child in self.children(block))

    def cached(self) -> list[int]:
        return [i for i, block in self.blocks.items() if not self.in_use(block)]

    def store(self, block_id: int, path: tuple[int, ...]) -> None:
        block = self.blocks[block_id]
        block.block_hash, block.parent = node_hash(path), parent_of(path)
        block.used_at, block.uses = self.clock, 1

    def evict_one(self) -> int:
        candidates = [
            EvictionCandidate(block_id, self.blocks[block_id].used_at, self.blocks[block_id].uses)
            for block_id in self.cached()
            if not self.children(self.blocks[block_id])
        ]
        (victim,) = evict(self.order, candidates, 1)
        del self.blocks[victim]
        return victim


paths = st.lists(st.integers(0, 2), min_size=1, max_size=5).map(tuple)


class PoolMachine(RuleBasedStateMachine):
    @initialize(order=st.sampled_from(EvictionOrder))
    def start(self, order):
        self.pool = BlockPool(BLOCKS, eviction=order)
        self.model = PoolModel(order)
        self.directory = Directory()
        self.next_number = 1
        self.generations = [0] * BLOCKS

    def pinned(self) -> list[int]:
        return sorted(i for i, block in self.model.blocks.items() if block.pins)

    def fresh(self) -> list[int]:
        return sorted(i for i in self.pinned() if self.model.blocks[i].block_hash is None)

    @rule(count=st.integers(0, BLOCKS + 1))
    def allocate(self, count):
        self.allocate_blocks(count)

    def allocate_blocks(self, count):
        free = BLOCKS - len(self.model.blocks)
        if count > free + len(self.model.cached()):
            with pytest.raises(NoBlocksError, match=f"^{count} blocks"):
                self.pool.allocate(count)
            return []
        for _ in range(count - free):
            self.model.evict_one()
        block_ids = self.pool.allocate(count)
        assert len(set(block_ids)) == count
        assert not set(block_ids) & set(self.model.blocks)
        for block_id in block_ids:
            self.model.blocks[block_id] = ModelBlock(pins=1)
            assert self.pool.generation(block_id) > self.generations[block_id]
        return block_ids

    @precondition(lambda self: self.fresh())
    @rule(data=st.data(), token=st.integers(0, 2), path=paths)
    def store(self, data, token, path):
        """Mostly a child of a block that is held, sometimes anything."""
        held = sorted(path_of(block.block_hash) for block in self.model.blocks.values() if block.block_hash)
        extensions = [(token,), *((*path, token) for path in held if len(path) < 5)]
        block_id = data.draw(st.sampled_from(self.fresh()))
        self.store_block(block_id, data.draw(st.sampled_from([*extensions, path])))

    def store_block(self, block_id, path):
        block_hash, parent = node_hash(path), parent_of(path)
        expected = self.model.id_of(block_hash) is None and (
            parent is None or self.model.id_of(parent) is not None
        )
        assert self.pool.store(block_id, block_hash, parent) is expected
        if expected:
            self.model.store(block_id, path)

    @precondition(lambda self: self.fresh())
    @rule(data=st.data(), token=st.integers(0, 2))
    def store_or_share(self, data, token):
        """Of two who computed the same block, the later one gives its own up for the one that is held."""
        block_id = data.draw(st.sampled_from(self.fresh()))
        held = sorted(path_of(block.block_hash) for block in self.model.blocks.values() if block.block_hash)
        path = data.draw(st.sampled_from([(token,), *held, *((*p, token) for p in held if len(p) < 5)]))
        block_hash, parent = node_hash(path), parent_of(path)
        twin_id = self.model.id_of(block_hash)
        if twin_id is None:
            assert self.pool.store_or_share(block_id, block_hash, parent) == block_id
            self.model.store(block_id, path)
            return
        twin = self.model.blocks[twin_id]
        twin.pins, twin.uses, twin.used_at = twin.pins + 1, twin.uses + 1, self.model.clock
        assert self.pool.store_or_share(block_id, block_hash, parent) == twin_id
        self.forget_pins([block_id])

    @precondition(lambda self: self.pinned())
    @rule(data=st.data())
    def write(self, data):
        """Copy-on-write: who may not write gets a fresh block, and the others keep theirs."""
        block_id = data.draw(st.sampled_from(self.pinned()))
        block = self.model.blocks[block_id]
        assert self.pool.writable(block_id) is (block.pins == 1 and block.block_hash is None)
        if not self.pool.writable(block_id):
            for private_id in self.allocate_blocks(1):
                assert self.pool.writable(private_id)
                self.release_blocks([block_id])

    @rule(path=paths)
    def ask_what_others_use(self, path):
        """The answer is what is in use once this owner has gone, and stored."""
        block_ids = [*self.acquire_blocks(path), *self.allocate_blocks(1)]
        answer = self.pool.blocks_others_use(block_ids)
        self.release_blocks(block_ids)
        still = [i in self.model.blocks and self.model.in_use(self.model.blocks[i]) for i in block_ids]
        assert answer == sum(still)
        assert all(still[:answer])

    @rule(path=paths, pinned=st.integers(0, 5))
    def serve(self, path, pinned):
        """One request: what is held of its prompt is pinned, the rest computed and stored, most released."""
        cached_ids = self.acquire_blocks(path)
        fresh_ids = self.allocate_blocks(len(path) - len(cached_ids))
        for depth, block_id in enumerate(fresh_ids, len(cached_ids) + 1):
            self.store_block(block_id, path[:depth])
        self.release_blocks([*cached_ids, *fresh_ids][pinned:])

    @rule(path=paths)
    def acquire(self, path):
        self.acquire_blocks(path)

    def acquire_blocks(self, path):
        self.model.clock += 1
        expected = []
        for block_hash in chain(path):
            block_id = self.model.id_of(block_hash)
            if block_id is None:
                break
            expected.append(block_id)
        assert self.pool.match(chain(path)) == len(expected)
        taken = len(expected) - self.pool.match_in_use(chain(path))
        available = self.pool.available()
        assert self.pool.acquire(chain(path)) == expected
        assert available - self.pool.available() == taken
        for block_id in expected:
            block = self.model.blocks[block_id]
            block.pins, block.uses, block.used_at = block.pins + 1, block.uses + 1, self.model.clock
        return expected

    @precondition(lambda self: self.pinned())
    @rule(data=st.data())
    def retain(self, data):
        block_ids = data.draw(st.lists(st.sampled_from(self.pinned()), max_size=3))
        self.pool.retain(block_ids)
        for block_id in block_ids:
            self.model.blocks[block_id].pins += 1

    @precondition(lambda self: self.pinned())
    @rule(data=st.data())
    def release(self, data):
        self.release_blocks(data.draw(st.lists(st.sampled_from(self.pinned()), unique=True)))

    def release_blocks(self, block_ids):
        self.pool.release(block_ids)
        self.forget_pins(block_ids)

    def forget_pins(self, block_ids):
        self.model.clock += 1
        for block_id in block_ids:
            block = self.model.blocks[block_id]
            block.pins -= 1
            block.used_at = self.model.clock
            if not block.pins and block.block_hash is None:
                del self.model.blocks[block_id]

    @rule(path=paths)
    def distrust(self, path):
        """One owner's blocks hold nonsense: they are given back, and nobody finds those that nobody uses."""
        block_ids = [*self.acquire_blocks(path), *self.allocate_blocks(1)]
        self.release_blocks(block_ids)
        self.pool.forget(block_ids)
        for block_id in reversed(block_ids):
            block = self.model.blocks.get(block_id)
            if block and not block.pins and not self.model.children(block):
                del self.model.blocks[block_id]

    @rule()
    def follow_events(self):
        first_number, events = self.pool.take_events()
        assert first_number == self.next_number
        self.next_number += len(events)
        for event in events:
            self.directory.apply(POOL, event)
        replica = Directory()
        as_of, blocks = self.pool.inventory()
        replica.replace(POOL, self.packed_inventory())
        assert as_of == self.next_number - 1
        assert self.directory.blocks_of(POOL) == replica.blocks_of(POOL) == len(blocks)
        for block_hash, _, _ in blocks:
            assert self.directory.match(self.path_to(block_hash)) == replica.match(self.path_to(block_hash))

    def packed_inventory(self) -> list[HeldRun]:
        _, snapshot = self.pool.inventory_snapshot()
        return [part.pack() for part in snapshot.parts(4)]

    def path_to(self, block_hash: BlockHash) -> bytes:
        return b"".join(chain(path_of(block_hash)))

    @rule()
    def take_inventory_between_events(self):
        """A follower that starts from an inventory and applies what comes after it misses nothing."""
        as_of, _ = self.pool.inventory()
        self.directory.replace(POOL, self.packed_inventory())
        first_number, events = self.pool.take_events()
        assert as_of == first_number + len(events) - 1
        self.next_number = first_number + len(events)

    @invariant()
    def agrees_with_the_model(self):
        self.pool.check_integrity()
        cached = len(self.model.cached())
        free = BLOCKS - len(self.model.blocks)
        assert self.pool.stats() == PoolStats(BLOCKS, free, cached, BLOCKS - free - cached)
        assert self.pool.available() == free + cached
        held = {block.block_hash: block.parent for block in self.model.blocks.values() if block.block_hash}
        blocks = self.pool._inventory.blocks()
        assert {block_hash: parent for block_hash, parent, _ in blocks} == held
        assert {tier for _, _, tier in blocks} <= {Tier.DRAM}
        generations = [self.pool.generation(block_id) for block_id in range(BLOCKS)]
        assert all(new >= old for new, old in zip(generations, self.generations, strict=True))
        self.generations = generations

    def teardown(self):
        """Once everybody has released, everything is available, and can be given to one owner."""
        if not hasattr(self, "pool"):
            return
        for block_id in self.pinned():
            self.pool.release([block_id] * self.model.blocks[block_id].pins)
        assert self.pool.stats().in_use == 0
        self.pool.allocate(BLOCKS)
        self.pool.check_integrity()
        _, events = self.pool.take_events()
        for event in events:
            self.directory.apply(POOL, event)
        assert self.directory.blocks_of(POOL) == 0
        assert all(event.action is not BlockAction.MOVED for event in events)


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
TestPool = PoolMachine.TestCase
