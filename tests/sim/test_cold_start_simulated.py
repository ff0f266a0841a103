"""An instance that joins warm traffic, simulated: how soon it is as good as its peers, and what it is spared.

Requests of a few kinds, each with a long beginning that everybody but the newcomer has cached, as many as the
others can just serve without it. What it reaches is printed: `pytest -rP`.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from random import Random
from statistics import fmean, median

import pytest

from kvindex.core import InstanceId
from policy.choice import PlacementLimits, Strategy
from simulator.cluster import SimulatedRun, simulate_cluster
from simulator.setup import REPLICATION_LIMITS, ClusterSetup, NodeJoin
from simulator.trace import TRACE_BLOCK_TOKENS, TracedRequest

pytestmark = pytest.mark.sim

PEERS = ("prefill-0", "prefill-1")
JOINER = "prefill-2"
JOINS_AT_S = 20.0
TRAFFIC_S = 50.0
REQUESTS_PER_S = 16.0
KINDS = 8
BEGINNING_BLOCKS = 16
REST_BLOCKS = 4
WINDOW_S = 5.0
"""Goodput is counted over so long, so nothing is reached sooner."""
GOODPUT_SHARE = 0.9
REACHED_S_MAX = 15.0
OVERLOAD_REQUESTS_PER_S = 30.0
IDLE_S_MAX = 2.0
"""Of a newcomer under overload, between two requests that it is given."""
QUEUE_RATIO_MAX = 4.0
"""Of the newcomer's queue to its peers' median, which counts as one request at least."""


@dataclass(frozen=True, slots=True)
class ColdStart:
    reached_s: float | None
    """After its joining, that its goodput was GOODPUT_SHARE of its peers'."""
    queue_ratio: float
    hit_share: float
    """Of the beginnings that it was asked for in its first window."""
    copied_prefixes: int


def traffic(seed: int, requests_per_s: float = REQUESTS_PER_S) -> Iterator[TracedRequest]:
    random = Random(seed)
    kinds, weights = range(KINDS), [1 / (kind + 1) for kind in range(KINDS)]
    at_s, new_id = 0.0, KINDS * BEGINNING_BLOCKS
    while (at_s := at_s + random.expovariate(requests_per_s)) < TRAFFIC_S:
        (kind,) = random.choices(kinds, weights)
        beginning = range(kind * BEGINNING_BLOCKS, (kind + 1) * BEGINNING_BLOCKS)
        block_ids = (*beginning, *range(new_id, new_id + REST_BLOCKS))
        new_id += REST_BLOCKS
        yield TracedRequest(int(at_s * 1e3), len(block_ids) * TRACE_BLOCK_TOKENS, 32, block_ids)


def measured(run: SimulatedRun, setup: ClusterSetup) -> ColdStart:
    served = [(result, result.served) for result in run.results if result.served is not None]
    waits = {
        name: [
            (result.arrived_s, result.arrived_s + one.ttft_s)
            for result, one in served
            if one.prefill == name and one.ttft_s <= setup.ttft_s_max
        ]
        for name in (*PEERS, JOINER)
    }

    def goodput_share(from_s: float) -> float:
        until_s = from_s + WINDOW_S
        good = {name: sum(from_s <= end < until_s for _, end in spans) for name, spans in waits.items()}
        return good[JOINER] / max(1.0, fmean(good[name] for name in PEERS))

    def queue_ratio(at_s: float) -> float:
        queues = {name: sum(begin <= at_s < end for begin, end in spans) for name, spans in waits.items()}
        return queues[JOINER] / max(1.0, median(queues[name] for name in PEERS))

    moments = [JOINS_AT_S + 0.5 * step for step in range(int(2 * (TRAFFIC_S - WINDOW_S - JOINS_AT_S)))]
    reached_s = next((at_s for at_s in moments if goodput_share(at_s) >= GOODPUT_SHARE), None)
    first = [
        one.cached_tokens / (BEGINNING_BLOCKS * TRACE_BLOCK_TOKENS)
        for result, one in served
        if one.prefill == JOINER and result.arrived_s < JOINS_AT_S + WINDOW_S
    ]
    return ColdStart(
        None if reached_s is None else reached_s + WINDOW_S - JOINS_AT_S,
        max(queue_ratio(at_s) for at_s in moments),
        fmean(first),
        run.copied_prefixes,
    )


def cold_start(strategy: Strategy, replication: bool) -> ColdStart:
    setup = ClusterSetup(
        prefill=3,
        decode=3,
        placement=PlacementLimits(strategy=strategy),
        joins=(NodeJoin(InstanceId(JOINER), JOINS_AT_S),),
        replication=replication,
        # As many as there are instances: who joins is to get one too.
        replication_limits=replace(REPLICATION_LIMITS, copies_max=6),
    )
    found = measured(simulate_cluster(list(traffic(seed=1)), setup), setup)
    print(f"{strategy}, replication {replication}: {found}")
    return found


@pytest.mark.parametrize("replication", [False, True])
def test_who_joins_warm_traffic_is_soon_as_good_as_its_peers_and_not_flooded(replication: bool) -> None:
    found = cold_start(Strategy.JOINT, replication)
    assert found.reached_s is not None
    assert found.reached_s <= REACHED_S_MAX
    assert found.queue_ratio <= QUEUE_RATIO_MAX
    assert found.hit_share > GOODPUT_SHARE
    assert (found.copied_prefixes > 0) == replication


def test_where_nobody_reads_from_others_copies_warm_who_joins() -> None:
    cold, warmed = (cold_start(Strategy.CACHE_AWARE, replication) for replication in (False, True))
    assert warmed.reached_s is not None
    assert cold.reached_s is None or warmed.reached_s < cold.reached_s
    assert warmed.hit_share > cold.hit_share
    assert warmed.queue_ratio <= QUEUE_RATIO_MAX


def test_under_overload_who_joins_is_given_work_at_once() -> None:
    """Its peers' queues want more of the decode's memory than there is, but later than what it is given: that
    has ended by then."""
    setup = ClusterSetup(prefill=3, decode=1, joins=(NodeJoin(InstanceId(JOINER), JOINS_AT_S),))
    run = simulate_cluster(list(traffic(1, OVERLOAD_REQUESTS_PER_S)), setup)
    served = [result for result in run.results if result.served is not None]
    begun_s = [result.arrived_s for result in served if result.served.prefill == JOINER]
    idle_s = [later - before for before, later in pairwise((JOINS_AT_S, *begun_s, TRAFFIC_S))]
    print(
        f"served {len(served)} of {len(run.results)}, {len(begun_s)} by it, idle {max(idle_s):.2f} s at most"
    )
    assert max(idle_s) <= IDLE_S_MAX
