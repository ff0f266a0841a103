"""Hot prefixes are copied in the simulated cluster, within what may flow, and outlive their first holder."""

from dataclasses import replace

import pytest
from tests.support.simulated_clusters import ROUND_NODE, round_setup

from policy.replicate import ReplicationLimits
from simulator.cluster import SimulatedRun, simulate_cluster
from simulator.setup import NodeFailure
from simulator.trace import TracedRequest

pytestmark = pytest.mark.unit

LIMITS = ReplicationLimits(requests_min=4, copies_max=2, bytes_per_s=1e9, burst_bytes=2e9)
"""The prefix has 2,048 MB: two seconds' worth."""
PREFIX = (1, 2, 3, 4)


def run_of(**changes: object) -> SimulatedRun:
    """A prompt of five blocks, four of which are always the same, every four seconds; whoever holds them
    prefills, and at 41 s that one fails. Answers of one token: no decode comes to hold anything."""
    requests = [TracedRequest(4_000 * place, 2560, 1, (*PREFIX, 10 + place)) for place in range(16)]
    setup = round_setup(prefill=3, node=replace(ROUND_NODE, card_bytes_per_s=1e10), **changes)
    holder = simulate_cluster(requests[:1], setup).results[0].served
    assert holder is not None
    return simulate_cluster(requests, replace(setup, failures=(NodeFailure(holder.prefill, 41.0),)))


def cached_after_failure(run: SimulatedRun) -> int:
    served = run.results[11].served
    assert served is not None
    return served.cached_tokens


def test_a_hot_prefix_is_copied_and_outlives_its_holder() -> None:
    run = run_of(replication=True, replication_limits=LIMITS)
    assert run.copied_prefixes >= 1
    assert run.moved_bytes == pytest.approx(2048e6 * run.copied_prefixes)
    assert cached_after_failure(run) == 2048


def test_without_replication_it_is_computed_again() -> None:
    run = run_of()
    assert (run.copied_prefixes, run.moved_bytes) == (0, 0.0)
    assert cached_after_failure(run) == 0


def test_what_is_not_hot_is_not_copied() -> None:
    run = run_of(replication=True, replication_limits=replace(LIMITS, requests_min=100))
    assert run.copied_prefixes == 0


def test_copies_keep_to_their_bandwidth() -> None:
    """The second copy waits until the first is paid off, which takes longer than the prefix is hot."""
    slow = replace(LIMITS, bytes_per_s=0.03e9, copies_max=3)
    quick = replace(LIMITS, copies_max=3)
    copied = [run_of(replication=True, replication_limits=limits).copied_prefixes for limits in (slow, quick)]
    assert copied[0] < copied[1]
