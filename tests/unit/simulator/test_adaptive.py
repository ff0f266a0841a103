"""Limits that tune themselves, in a simulated overload: more is served in time, and nobody starves."""

from functools import cache
from itertools import count, groupby

import pytest

from policy.choice import PlacementLimits
from simulator.cluster import simulate_cluster
from simulator.results import RequestResult, Summary, summary
from simulator.setup import ClusterSetup
from simulator.trace import TRACE_BLOCK_TOKENS, TracedRequest

pytestmark = pytest.mark.unit

TTFT_S_MAX = 2.0
LIGHT_TOKENS = 1000
"""About 0.05 s of work; 25 a second are more than one instance can do."""
HEAVY_TOKENS = 16_000
"""About 1 s."""
TRIES_MAX = 40
"""In a row. One in twenty pays no price, and of those some come when they do not fit all the same."""
SECONDS = 30


def overload(seconds: int, light_per_s: int, heavy_per_s: int) -> list[TracedRequest]:
    block_ids = count()

    def request(arrived_ms: int, tokens: int) -> TracedRequest:
        blocks = -(-tokens // TRACE_BLOCK_TOKENS)
        return TracedRequest(arrived_ms, tokens, 2, tuple(next(block_ids) for _ in range(blocks)))

    light = [request(n * 1000 // light_per_s, LIGHT_TOKENS) for n in range(seconds * light_per_s)]
    heavy = [request(n * 1000 // heavy_per_s, HEAVY_TOKENS) for n in range(seconds * heavy_per_s)]
    return sorted(light + heavy, key=lambda one: one.arrived_ms)


@cache
def overloaded(adaptive: bool, conductors: int = 1) -> tuple[RequestResult, ...]:
    return simulated(overload(SECONDS, 18, 2), adaptive, conductors)


def simulated(
    requests: list[TracedRequest], adaptive: bool, conductors: int = 1
) -> tuple[RequestResult, ...]:
    setup = ClusterSetup(
        prefill=1,
        decode=1,
        placement=PlacementLimits(adaptive=adaptive),
        ttft_s_max=TTFT_S_MAX,
        seed=3,
        conductors=conductors,
    )
    return simulate_cluster(requests, setup).results


def told(results: tuple[RequestResult, ...]) -> Summary:
    return summary(results, TTFT_S_MAX, 0.1)


def heavy(results: tuple[RequestResult, ...]) -> list[RequestResult]:
    return [result for result in results if result.prompt_tokens == HEAVY_TOKENS]


def test_more_is_served_in_time_and_sooner():
    fixed, tuned = told(overloaded(False)), told(overloaded(True))
    assert fixed.in_targets < 0.9 * fixed.requests, "no overload"
    assert tuned.in_targets > fixed.in_targets
    assert fixed.ttft_s is not None
    assert tuned.ttft_s is not None
    assert tuned.ttft_s.mean < 0.7 * fixed.ttft_s.mean


def test_several_conductors_find_the_same():
    """Each hears all loads and all outcomes."""
    alone, three = told(overloaded(True)), told(overloaded(True, 3))
    assert three.in_targets == pytest.approx(alone.in_targets, rel=0.03)


def test_who_brings_much_and_asks_again_is_served_within_bounded_tries():
    """Each heavy request is the one before it, asking again."""
    tries = heavy(overloaded(True))
    refused = [
        len(list(group)) for served, group in groupby(one.served is not None for one in tries) if not served
    ]
    assert any(one.served for one in tries[len(tries) // 2 :])
    assert 1 < max(refused) <= TRIES_MAX


def test_without_pressure_nothing_is_decided_otherwise():
    light = overload(SECONDS, 5, 1)[:-1:4]
    fixed, tuned = simulated(light, adaptive=False), simulated(light, adaptive=True)
    assert tuned == fixed
    assert told(fixed).in_targets == len(light)
