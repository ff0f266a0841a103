"""The simulated cluster over the Mooncake paper's traces: the order of strategies, and what reuse is worth.

The first requests of each only: a whole trace takes minutes on a busy machine (`moonpool simulate cluster`).
"""

from functools import cache

import pytest
from tests.support.traces import published_trace

from policy.choice import AdmissionMode, PlacementLimits, Strategy
from simulator.cluster import SimulatedRun, simulate_cluster
from simulator.results import Summary, summary
from simulator.setup import ClusterSetup
from simulator.trace import TracedRequest, read_trace

pytestmark = pytest.mark.sim

REQUESTS = 700


@cache
def requests_of(name: str) -> list[TracedRequest]:
    return read_trace(published_trace(name))[:REQUESTS]


@cache
def simulated(name: str, strategy: Strategy, admission: AdmissionMode, speedup: float) -> SimulatedRun:
    placement = PlacementLimits(strategy=strategy, admission=admission)
    setup = ClusterSetup(prefill=4, decode=4, placement=placement, speedup=speedup)
    return simulate_cluster(requests_of(name), setup)


def told(
    name: str, strategy: Strategy, admission: AdmissionMode = AdmissionMode.NONE, speedup: float = 1.0
) -> Summary:
    return summary(simulated(name, strategy, admission, speedup).results, 30.0, 0.1)


def mean_ttft_s(name: str, strategy: Strategy) -> float:
    found = told(name, strategy).ttft_s
    assert found is not None
    return found.mean


@pytest.mark.parametrize("name", ["conversation", "synthetic"])
def test_what_knows_more_is_faster(name: str) -> None:
    """The order of the paper, with joint beside its KVCache-centric one."""
    random, balanced, aware, centric, joint = (mean_ttft_s(name, strategy) for strategy in Strategy)
    assert random > balanced > aware
    assert min(centric, joint) < aware
    assert max(centric, joint) < balanced


@pytest.mark.parametrize("name", ["conversation", "synthetic"])
def test_no_more_is_reused_than_an_unbounded_cache_would(name: str) -> None:
    requests = requests_of(name)
    seen: set[int] = set()
    reused = 0
    for request in requests:
        reused += sum(block_id in seen for block_id in request.block_ids)
        seen.update(request.block_ids)
    bound = 512 * reused / sum(request.input_tokens for request in requests)
    assert 0 < told(name, Strategy.JOINT).hit_rate <= bound


def test_who_is_admitted_in_overload_keeps_the_first_target() -> None:
    """Twice as fast: with nobody refused, the queue goes past it."""
    admitted = told("conversation", Strategy.JOINT, AdmissionMode.PREDICTIVE, 2.0)
    everyone = told("conversation", Strategy.JOINT, AdmissionMode.NONE, 2.0)
    assert admitted.rejected
    assert admitted.ttft_in_target >= 0.95 * admitted.served
    assert admitted.in_targets > everyone.in_targets
