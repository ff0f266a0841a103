"""The reference hardware, for what is simulated without a measured instance.

LLaMA2-70B (80 layers, width 8,192, 8 of 64 heads hold keys and values) on 8 A800, everything at the full rate
of the data sheet. Prefill of n tokens takes 80 (4 n² · 8192 + 22 n · 8192²) operations, which is the cost
model's form. A decode step reads all weights once (2 bytes each), the KV of every sequence once, and computes
what a prefill of one token does: that is the roofline with nothing overlapped.
"""

from policy.core import CostCoefficients

LAYERS = 80
WIDTH = 8192
FLOPS = 8 * 312e12
NODE_BYTES_PER_S = 100e9
"""800 Gbps."""
HOST_BYTES_PER_S = 128e9
"""Between DRAM and device memory."""
SSD_BYTES_PER_S = 3e9
"""Of a node, read: what Mooncake's authors take for theirs."""

WEIGHTS = 68_976_648_192
"""Of LLaMA2-70B, as published."""
WEIGHTS_BYTES = 2 * WEIGHTS
KV_BYTES_PER_TOKEN = 327_680
DEVICE_BYTES = 8 * 80 * 10**9
DEVICE_BYTES_PER_S = 8 * 2039e9
"""NVIDIA's data sheet of the A800 80GB SXM: 2,039 GB/s each."""
DEVICE_USED_SHARE = 0.9
"""Of the device memory, by weights and KV; the rest is for activations. vLLM's default."""
KV_TOKENS_MAX = int((DEVICE_USED_SHARE * DEVICE_BYTES - WEIGHTS_BYTES) / KV_BYTES_PER_TOKEN)
POOL_TOKENS = 3_000_000
"""About 1 TB of DRAM a node, as FAST'25 has it."""

_LINEAR_FLOPS_PER_TOKEN = LAYERS * 22 * WIDTH**2
_FLOPS_PER_TOKEN_PAIR = LAYERS * 8 * WIDTH
"""4 n² is 8 n (n / 2), and n² / 2 the number of pairs."""


def reference_cost(efficiency: float = 1.0) -> CostCoefficients:
    """`efficiency`, above 0 and at most 1, is the share of the data sheet's rates that is reached, in
    computing and in reading device memory alike. The network is not slowed by it."""
    flops, bytes_per_s = FLOPS * efficiency, DEVICE_BYTES_PER_S * efficiency
    return CostCoefficients(
        prefill_fixed_s=0.0,
        prefill_per_token_s=_LINEAR_FLOPS_PER_TOKEN / flops,
        prefill_per_token_pair_s=_FLOPS_PER_TOKEN_PAIR / flops,
        step_fixed_s=WEIGHTS_BYTES / bytes_per_s,
        step_per_request_s=_LINEAR_FLOPS_PER_TOKEN / flops,
        step_per_kv_token_s=KV_BYTES_PER_TOKEN / bytes_per_s,
        transfer_fixed_s=0.0,
        transfer_bytes_per_s=NODE_BYTES_PER_S,
        ssd_bytes_per_s=SSD_BYTES_PER_S,
    )


REFERENCE_COST = reference_cost()
