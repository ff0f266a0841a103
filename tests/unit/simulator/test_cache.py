"""The simulated caches against slow models that search for every victim, and against the real pool."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.traces import trace_of

from kvhash import BlockHash
from kvpool import BlockPool
from policy.evict import BlockUse, EvictionCandidate, EvictionOrder, EvictionScale, evict
from simulator.cache import CacheKind, simulate_cache
from simulator.trace import TRACE_BLOCK_TOKENS, TracedRequest, distinct_blocks

pytestmark = pytest.mark.unit

COST_DOUBLES_AT_BLOCKS = 44
"""22,528 tokens, by the formula of DESIGN §9, in blocks of 512."""

orders = st.sampled_from(EvictionOrder)
capacities = st.integers(1, 12)
words = st.lists(st.integers(0, 2), min_size=1, max_size=8)
traces = st.lists(st.tuples(words, st.integers(0, 500)), min_size=1, max_size=25).map(
    lambda requests: trace_of([prompt for prompt, _ in requests], [tokens for _, tokens in requests])
)


class SlowModel:
    """Facts by block, no structure: each victim is searched for among all."""

    def __init__(self, order: EvictionOrder, capacity: int) -> None:
        self.order, self.capacity = order, capacity
        self.scale = EvictionScale(capacity, COST_DOUBLES_AT_BLOCKS)
        self.facts: dict[int, EvictionCandidate] = {}
        self.now = 0

    def used(self, request: TracedRequest, depth: int, used_at: int) -> None:
        block_id = request.block_ids[depth]
        uses = self.facts[block_id].uses if block_id in self.facts else 0
        use = BlockUse(remaining_tokens=request.output_tokens)
        self.facts[block_id] = EvictionCandidate(block_id, used_at, uses + 1, depth, use)

    def drop(self, candidates: Sequence[EvictionCandidate]) -> None:
        (victim,) = evict(self.order, candidates, 1, self.scale)
        del self.facts[victim]

    def plain(self, request: TracedRequest) -> int:
        hits = len(self.facts.keys() & set(request.block_ids))
        for depth, block_id in enumerate(request.block_ids):
            self.now += 1
            if block_id not in self.facts and len(self.facts) == self.capacity:
                self.drop(list(self.facts.values()))
            self.used(request, depth, self.now)
        return hits

    def closed(self, request: TracedRequest, parents: dict[int, int | None]) -> int:
        block_ids = request.block_ids[: self.capacity]
        held = [block_id for block_id in block_ids if block_id in self.facts]
        assert held == list(block_ids[: len(held)]), "a hole"
        new = len(block_ids) - len(held)
        while len(self.facts) + new > self.capacity:
            inner = {parents[block_id] for block_id in self.facts} | set(block_ids)
            self.drop([fact for block_id, fact in self.facts.items() if block_id not in inner])
        self.now += 1 + new
        for depth in range(len(block_ids)):
            self.used(request, depth, self.now)
        return len(held)


def parents_of(requests: Sequence[TracedRequest]) -> dict[int, int | None]:
    return {
        block_id: request.block_ids[depth - 1] if depth else None
        for request in requests
        for depth, block_id in enumerate(request.block_ids)
    }


@given(traces, orders, capacities)
def test_plain_cache_is_the_slow_model(requests, order, capacity):
    model = SlowModel(order, capacity)
    expected = sum(model.plain(request) for request in requests)
    hits = simulate_cache(requests, CacheKind.PLAIN, order, capacity)
    assert hits.hit_blocks == expected
    assert hits.saved_s is None


@given(traces, orders, capacities)
def test_closed_cache_is_the_slow_model(requests, order, capacity):
    model, parents = SlowModel(order, capacity), parents_of(requests)
    expected = sum(model.closed(request, parents) for request in requests)
    hits = simulate_cache(requests, CacheKind.CLOSED, order, capacity)
    assert hits.hit_blocks == expected


@given(traces, st.sampled_from(CacheKind), orders)
def test_a_cache_that_holds_everything_loses_nothing_whatever_the_order(requests, kind, order):
    distinct = distinct_blocks(requests)
    hits = simulate_cache(requests, kind, order, distinct)
    assert hits.evicted_blocks == 0
    assert hits.blocks - hits.hit_blocks == distinct


def test_an_order_makes_the_difference_that_its_name_says():
    # Block 1 is used twice, then 2 and 3 once: there is room for two.
    requests = trace_of([[1], [1], [2], [3], [1]])
    assert simulate_cache(requests, CacheKind.PLAIN, EvictionOrder.LRU, 2).hit_blocks == 1
    assert simulate_cache(requests, CacheKind.PLAIN, EvictionOrder.LFU, 2).hit_blocks == 2


def test_what_is_saved_is_the_time_of_the_cached_prefix():
    # Twice the same two blocks of 512 tokens: with n tokens 22 · 8192 n + 4 n², in units of 80 · 8192.
    hits = simulate_cache(trace_of([[1, 2], [1, 2]]), CacheKind.CLOSED, EvictionOrder.LRU, 9)
    assert hits.saved_rate == pytest.approx(0.5)
    longer = simulate_cache(trace_of([[1], [1, 2]]), CacheKind.CLOSED, EvictionOrder.LRU, 9)

    def work(tokens: int) -> int:
        return 22 * 8192 * tokens + 4 * tokens**2

    one, two = work(TRACE_BLOCK_TOKENS), work(2 * TRACE_BLOCK_TOKENS)
    assert longer.saved_rate == pytest.approx(one / (one + two))
    assert longer.hit_rate == pytest.approx(1 / 3)


def hits_of_the_pool(requests: Sequence[TracedRequest], order: EvictionOrder, capacity: int) -> int:
    pool, hits = BlockPool(capacity, eviction=order), 0
    for request in requests:
        hashes = [BlockHash(block_id.to_bytes(16, "big")) for block_id in request.block_ids[:capacity]]
        held = pool.acquire(hashes)
        fresh = pool.allocate(len(hashes) - len(held))
        for depth, block_id in enumerate(fresh, start=len(held)):
            assert pool.store(block_id, hashes[depth], hashes[depth - 1] if depth else None)
        pool.release(held + fresh)
        hits += len(held)
    return hits


@given(traces, st.sampled_from([EvictionOrder.LRU, EvictionOrder.LFU]), capacities)
def test_closed_cache_hits_what_the_pool_hits(requests, order, capacity):
    hits = simulate_cache(requests, CacheKind.CLOSED, order, capacity)
    assert hits.hit_blocks == hits_of_the_pool(requests, order, capacity)
