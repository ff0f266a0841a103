"""Several conductors of a simulated cluster: each has its own view, and hears what the others decide."""

from collections import Counter
from dataclasses import replace

import pytest
from tests.support.simulated_clusters import ROUND_NODE, round_setup

from simulator.cluster import simulate_cluster
from simulator.setup import ClusterSetup
from simulator.trace import TracedRequest

pytestmark = pytest.mark.unit

INSTANCES = 8


def fleet(conductors: int, **changes: object) -> ClusterSetup:
    node = replace(ROUND_NODE, prefill_step_tokens_max=1024, device_blocks=1000, batch_requests_max=256)
    return round_setup(
        prefill=INSTANCES, decode=2, node=node, conductors=conductors, message_s=0.0005, **changes
    )


@pytest.mark.parametrize("conductors", [1, 2, 8])
@pytest.mark.parametrize("gap_ms", [0, 1, 20])
def test_an_idle_fleet_shares_what_comes_however_many_decide(conductors: int, gap_ms: int) -> None:
    requests = [
        TracedRequest(place * gap_ms, 1024, 1, (2 * place, 2 * place + 1)) for place in range(16 * INSTANCES)
    ]
    run = simulate_cluster(requests, fleet(conductors))
    load = Counter(result.served.prefill for result in run.results if result.served is not None)
    assert sum(load.values()) == len(requests)
    assert max(load.values()) <= 1.3 * len(requests) / INSTANCES


def test_what_others_decided_is_heard_after_a_message() -> None:
    """Prompts that take a second come every 50 ms, half a load interval apart: who did not hear of the last
    decision would put two of them behind each other."""
    requests = [TracedRequest(place * 50, 1024, 1, (2 * place, 2 * place + 1)) for place in range(8)]
    alone = simulate_cluster(requests, fleet(1))
    shared = simulate_cluster(requests, fleet(4))
    ttfts_s = [
        [result.served.ttft_s for result in run.results if result.served is not None]
        for run in (alone, shared)
    ]
    assert ttfts_s[1] == pytest.approx(ttfts_s[0])
