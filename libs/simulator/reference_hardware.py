"""The instance that DESIGN §9 describes, for what is simulated without a measured one.

LLaMA2-70B (80 layers, width 8,192, 8 of 64 heads hold keys and values) on 8 A800. Prefill of n tokens takes
80 (4 n² · 8192 + 22 n · 8192²) operations, which is the cost model's form.
"""

from policy.core import CostCoefficients

LAYERS = 80
WIDTH = 8192
FLOPS = 8 * 312e12
NODE_BYTES_PER_S = 100e9

_LINEAR_FLOPS_PER_TOKEN = LAYERS * 22 * WIDTH**2
_FLOPS_PER_TOKEN_PAIR = LAYERS * 8 * WIDTH
"""4 n² is 8 n (n / 2), and n² / 2 the number of pairs."""

REFERENCE_COST = CostCoefficients(
    prefill_fixed_s=0.0,
    prefill_per_token_s=_LINEAR_FLOPS_PER_TOKEN / FLOPS,
    prefill_per_token_pair_s=_FLOPS_PER_TOKEN_PAIR / FLOPS,
    step_fixed_s=0.0,
    step_per_request_s=0.0,
    step_per_kv_token_s=0.0,
    transfer_fixed_s=0.0,
    transfer_bytes_per_s=NODE_BYTES_PER_S,
)
"""Prefill at the full rate of the hardware. Steps are not told there, and are not simulated yet."""
