"""The simulated caches over the Mooncake paper's traces, beside the table that was published with them."""

from functools import cache

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


@pytest.fixture(params=PUBLISHED)
def name(request: pytest.FixtureRequest) -> str:
    published_trace(request.param)
    return request.param


@cache
def requests_of(name: str) -> list[TracedRequest]:
    return read_trace(published_trace(name))


@cache
def simulated(name: str, kind: CacheKind, order: EvictionOrder, capacity: int) -> CacheHits:
    return simulate_cache(requests_of(name), kind, order, capacity)


def hit_rates(name: str, kind: CacheKind, order: EvictionOrder) -> list[float]:
    """To three digits."""
    capacities = (distinct_blocks(requests_of(name)), *CAPACITIES)
    return [round(simulated(name, kind, order, capacity).hit_rate, 3) for capacity in capacities]


def test_the_trace_is_the_published_one(name: str) -> None:
    requests = requests_of(name)
    block_uses = sum(len(request.block_ids) for request in requests)
    assert (len(requests), block_uses, distinct_blocks(requests)) == COUNTS[name]


@pytest.mark.parametrize("order", [EvictionOrder.LRU, EvictionOrder.LFU])
def test_the_plain_cache_hits_what_was_published(name: str, order: EvictionOrder) -> None:
    assert hit_rates(name, CacheKind.PLAIN, order) == list(PUBLISHED[name][order])


@pytest.mark.parametrize("order", [EvictionOrder.LRU, EvictionOrder.LFU])
def test_keeping_whole_prefixes_costs_no_hits(name: str, order: EvictionOrder) -> None:
    """Of a chain the end goes first, which is not asked for without the rest."""
    plain, closed = (hit_rates(name, kind, order) for kind in CacheKind)
    assert all(found >= without for found, without in zip(closed, plain, strict=True))


@pytest.mark.parametrize("capacity", [30_000, 50_000])
def test_length_aware_saves_more_prefill_time_than_lru(name: str, capacity: int) -> None:
    recent, by_length = (
        simulated(name, CacheKind.CLOSED, order, capacity).saved_s
        for order in (EvictionOrder.LRU, EvictionOrder.LENGTH_AWARE)
    )
    assert recent is not None
    assert by_length is not None
    # Where everything fits there is nothing to save.
    assert by_length > recent or capacity > distinct_blocks(requests_of(name))
