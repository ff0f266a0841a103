"""The simulated caches over the Mooncake paper's traces, beside the table that was published with them."""

import pytest
from tests.support.traces import published_trace

from policy.evict import EvictionOrder
from simulator.cache import CacheHits, CacheKind, simulate_cache
from simulator.trace import TracedRequest, distinct_blocks, read_trace

pytestmark = pytest.mark.sim

CAPACITIES = (100_000, 50_000, 30_000, 10_000, 1_000)
PUBLISHED = {
    "conversation": {
        EvictionOrder.LRU: (0.366, 0.364, 0.355, 0.326, 0.212, 0.045),
        EvictionOrder.LFU: (0.366, 0.363, 0.344, 0.276, 0.132, 0.048),
    },
    "synthetic": {
        EvictionOrder.LRU: (0.640, 0.640, 0.640, 0.624, 0.424, 0.084),
        EvictionOrder.LFU: (0.640, 0.640, 0.640, 0.626, 0.361, 0.042),
    },
}
"""Hit rates of a plain cache: without a bound, then by capacity."""
COUNTS = {"conversation": (12_031, 288_500, 182_790), "synthetic": (3_993, 121_877, 43_924)}
"""Requests, block uses, distinct blocks."""


@pytest.fixture(scope="module", params=PUBLISHED)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def requests(name: str) -> list[TracedRequest]:
    return read_trace(published_trace(name))


def simulate(requests: list[TracedRequest], kind: CacheKind, order: EvictionOrder) -> list[CacheHits]:
    capacities = (distinct_blocks(requests), *CAPACITIES)
    return [simulate_cache(requests, kind, order, capacity) for capacity in capacities]


def test_the_trace_is_the_published_one(name: str, requests: list[TracedRequest]) -> None:
    block_uses = sum(len(request.block_ids) for request in requests)
    assert (len(requests), block_uses, distinct_blocks(requests)) == COUNTS[name]


@pytest.mark.parametrize("order", [EvictionOrder.LRU, EvictionOrder.LFU])
def test_the_plain_cache_hits_what_was_published(
    name: str, requests: list[TracedRequest], order: EvictionOrder
) -> None:
    found = simulate(requests, CacheKind.PLAIN, order)
    assert [round(hits.hit_rate, 3) for hits in found] == list(PUBLISHED[name][order])


def test_keeping_whole_prefixes_costs_no_hits(name: str, requests: list[TracedRequest]) -> None:
    """Of a chain the end goes first, which under LRU is not worse than any other block of it."""
    plain, closed = (simulate(requests, kind, EvictionOrder.LRU) for kind in CacheKind)
    for without, with_prefixes in zip(plain, closed, strict=True):
        assert with_prefixes.hit_rate > without.hit_rate - 0.001


@pytest.mark.parametrize("capacity", [30_000, 50_000])
def test_length_aware_saves_more_prefill_time_than_lru(requests: list[TracedRequest], capacity: int) -> None:
    recent, by_length = (
        simulate_cache(requests, CacheKind.CLOSED, order, capacity).saved_s
        for order in (EvictionOrder.LRU, EvictionOrder.LENGTH_AWARE)
    )
    assert recent is not None
    assert by_length is not None
    assert by_length >= recent
