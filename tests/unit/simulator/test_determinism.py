"""The same arguments give the same run in every process, with all that a cluster can do."""

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.unit

SCRIPT = """
from dataclasses import replace
from hashlib import sha256
from kvindex.core import InstanceId
from policy.choice import PlacementLimits
from policy.replicate import ReplicationLimits
from simulator.cluster import simulate_cluster
from simulator.setup import ClusterSetup, NodeFailure, NodeJoin, NodeShape
from simulator.trace import TracedRequest

setup = ClusterSetup(
    prefill=3, decode=3, coupled=1, conductors=3, replication=True, tbt_s_max=1.0, seed=7,
    node=NodeShape(pool_blocks=40, ssd_blocks=60, device_blocks=80),
    placement=PlacementLimits(adaptive=True),
    replication_limits=ReplicationLimits(requests_min=2, copies_max=7, bytes_per_s=1e10, burst_bytes=1e10),
    joins=(NodeJoin(InstanceId("prefill-2"), 5.0),),
    failures=(NodeFailure(InstanceId("decode-3"), 4.0, 12.0), NodeFailure(InstanceId("prefill-0"), 6.0)),
)
requests = [
    TracedRequest(100 * place, 512 * 8, 300 + place % 50, (*range(place % 4 * 6, place % 4 * 6 + 6),
                  100 + 2 * place, 101 + 2 * place), place % 3)
    for place in range(200)
]
run = simulate_cluster(requests, setup)
assert run.copied_prefixes and sum(result.losses for result in run.results)
print(sha256(repr(run).encode()).hexdigest())
"""


def printed(hash_seed: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", SCRIPT],
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
    ).stdout


def test_the_same_bytes_whatever_the_hash_seed() -> None:
    assert printed("1") == printed("2")
