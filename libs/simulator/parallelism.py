"""The reference hardware with other numbers of GPUs an instance: tensor parallelism inside a node and beyond.

Compute, memory and its bandwidth, the network and the DRAM of the pool come in proportion to the GPUs; what
does not are the all-reduces, two a layer. Inside a node each GPU sends over NVLink, between nodes each over
its share of the network. Without them more GPUs an instance would always be better. Beyond KV_HEADS GPUs keys
and values are held several times, so that the rate at which they are read grows no further.

`reference_hardware.reference_cost`, one node without all-reduces, is what the paper's figures are compared
with; instances of different sizes are compared with each other by this module alone.
"""

from dataclasses import replace

from policy.core import CostCoefficients
from simulator.reference_hardware import (
    DEVICE_BYTES,
    DEVICE_USED_SHARE,
    KV_BYTES_PER_TOKEN,
    LAYERS,
    WEIGHTS_BYTES,
    WIDTH,
    reference_cost,
)
from simulator.setup import NodeShape, SetupError
from simulator.trace import TRACE_BLOCK_TOKENS

NODE_GPUS = 8
KV_HEADS = 8
GPUS_AN_INSTANCE = (1, 2, 4, 8, 16, 32, 64)
"""Which 64 attention heads can be split among."""
NVLINK_BYTES_PER_S = 200e9
"""Of one A800, each way (400 GB/s both ways, by the data sheet)."""
GPU_NETWORK_BYTES_PER_S = 12.5e9
"""800 Gbps a node, each way, shared by its GPUs."""
ALL_REDUCES = 2 * LAYERS
ALL_REDUCE_S = 10e-6
"""Of a small one inside a node: assumed, no data sheet tells it."""
ALL_REDUCE_BETWEEN_NODES_S = 30e-6
"""The same where nodes take part: assumed."""


def instance_of(gpus: int, node: NodeShape, efficiency: float) -> NodeShape:
    """`node`, which is one of NODE_GPUS, with so many. SetupError where the weights do not fit."""
    if gpus not in GPUS_AN_INSTANCE:
        allowed = ", ".join(map(str, GPUS_AN_INSTANCE))
        raise SetupError(f"GPUs an instance: {gpus}, must be one of {allowed}")
    device_blocks = kv_tokens_max(gpus) // TRACE_BLOCK_TOKENS
    if not device_blocks:
        fewest = next(number for number in GPUS_AN_INSTANCE if kv_tokens_max(number) >= TRACE_BLOCK_TOKENS)
        weights = f"{WEIGHTS_BYTES / 1e9:.0f} GB of weights"
        raise SetupError(f"GPUs an instance: {gpus}, must be at least {fewest} to hold {weights}")
    share = gpus / NODE_GPUS
    return replace(
        node,
        cost=parallel_cost(gpus, efficiency),
        card_bytes_per_s=node.card_bytes_per_s * share,
        host_bytes_per_s=node.host_bytes_per_s * share,
        device_blocks=device_blocks,
        pool_blocks=max(1, int(node.pool_blocks * share)),
    )


def kv_tokens_max(gpus: int) -> int:
    """Tokens whose KV has room beside the weights, 0 where not even these have."""
    gpu_bytes = DEVICE_USED_SHARE * DEVICE_BYTES / NODE_GPUS - WEIGHTS_BYTES / gpus
    return max(0, int(gpu_bytes * min(gpus, KV_HEADS) / KV_BYTES_PER_TOKEN))


def parallel_cost(gpus: int, efficiency: float) -> CostCoefficients:
    """Of one instance; `efficiency` is as in `reference_cost`, and does not slow what connects the GPUs."""
    node = reference_cost(efficiency)
    share = gpus / NODE_GPUS
    token_s, fixed_s = all_reduce_per_token_s(gpus), ALL_REDUCES * all_reduce_fixed_s(gpus)
    return replace(
        node,
        prefill_fixed_s=node.prefill_fixed_s + fixed_s,
        prefill_per_token_s=node.prefill_per_token_s / share + token_s,
        prefill_per_token_pair_s=node.prefill_per_token_pair_s / share,
        step_fixed_s=node.step_fixed_s / share + fixed_s,
        step_per_request_s=node.step_per_request_s / share + token_s,
        step_per_kv_token_s=node.step_per_kv_token_s * NODE_GPUS / min(gpus, KV_HEADS),
        transfer_bytes_per_s=node.transfer_bytes_per_s * share,
    )


def all_reduce_fixed_s(gpus: int) -> float:
    """Of one all-reduce, however little it adds up."""
    if gpus == 1:
        return 0.0
    return ALL_REDUCE_S if gpus <= NODE_GPUS else ALL_REDUCE_BETWEEN_NODES_S


def all_reduce_per_token_s(gpus: int) -> float:
    """Of all layers together: rings inside each node, and between nodes among the GPUs that hold the same
    part of what their node has added up."""
    token_bytes = ALL_REDUCES * WIDTH * 2
    inside, nodes = min(gpus, NODE_GPUS), -(-gpus // NODE_GPUS)
    inside_bytes = 2 * (inside - 1) / inside * token_bytes
    between_bytes = 2 * (nodes - 1) / nodes * token_bytes / inside
    return inside_bytes / NVLINK_BYTES_PER_S + between_bytes / GPU_NETWORK_BYTES_PER_S
