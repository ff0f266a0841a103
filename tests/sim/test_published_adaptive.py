"""Limits that tune themselves, over the first requests of the Mooncake paper's traces, twice as fast.

The whole traces, five seeds each: docs/reproduction.md.
"""

import pytest
from tests.support.traces import published_trace

from policy.choice import AdmissionMode, PlacementLimits, Strategy
from simulator.cluster import simulate_cluster
from simulator.results import Summary, summary
from simulator.setup import ClusterSetup
from simulator.trace import read_trace

pytestmark = pytest.mark.sim

REQUESTS = 2600
PAPER = PlacementLimits(strategy=Strategy.KVCACHE_CENTRIC, admission=AdmissionMode.SNAPSHOT)
OURS = PlacementLimits(adaptive=True)


def told(name: str, placement: PlacementLimits, instances: int, speedup: float) -> Summary:
    requests = read_trace(published_trace(name))[:REQUESTS]
    setup = ClusterSetup(prefill=instances, decode=instances, placement=placement, speedup=speedup)
    return summary(simulate_cluster(requests, setup).results, setup.ttft_s_max, setup.tbt_s_max)


@pytest.mark.parametrize(("name", "instances"), [("conversation", 2), ("synthetic", 3)])
def test_more_is_served_within_the_targets(name: str, instances: int) -> None:
    paper, ours = (told(name, placement, instances, 2.0) for placement in (PAPER, OURS))
    assert ours.in_targets >= 1.03 * paper.in_targets
    assert ours.in_targets >= 0.98 * ours.served
    assert ours.ttft_s is not None
    assert paper.ttft_s is not None
    assert ours.ttft_s.mean < 0.8 * paper.ttft_s.mean


def test_no_less_at_light_load() -> None:
    fixed, ours = (told("synthetic", placement, 4, 1.0) for placement in (PlacementLimits(), OURS))
    assert ours.in_targets >= fixed.in_targets
