"""Small simulated clusters with round numbers, whose times can be computed by hand."""

from dataclasses import replace

from policy.choice import AdmissionMode, PlacementLimits
from policy.core import CostCoefficients
from simulator.setup import ClusterSetup, NodeShape

ROUND_COST = CostCoefficients(
    prefill_fixed_s=0.0,
    prefill_per_token_s=1e-3,
    prefill_per_token_pair_s=0.0,
    step_fixed_s=0.01,
    step_per_request_s=0.001,
    step_per_kv_token_s=0.0,
    transfer_fixed_s=0.0,
    transfer_bytes_per_s=1e9,
)
ROUND_NODE = NodeShape(
    cost=ROUND_COST,
    kv_bytes_per_token=1_000_000,
    card_bytes_per_s=1e9,
    host_bytes_per_s=1e12,
    layers=4,
    device_blocks=100,
    pool_blocks=100,
    prefill_step_tokens_max=4096,
    coupled_step_tokens_max=512,
    batch_requests_max=16,
)
"""A token takes 1 ms to compute and 1 ms to send."""

ROUND_SETUP = ClusterSetup(
    prefill=1,
    decode=1,
    node=ROUND_NODE,
    placement=PlacementLimits(admission=AdmissionMode.NONE),
    message_s=0.0,
)


def round_setup(**changes: object) -> ClusterSetup:
    """ROUND_SETUP with other values; those of a node are given as `node`."""
    return replace(ROUND_SETUP, **changes)
