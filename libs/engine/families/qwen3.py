"""Qwen 3: each query and key head is normalised before it is rotated; no biases.

head_dim is a number of its own: heads · head_dim need not be the hidden size.
"""

from engine.families.decoder import Attention, HeadNorm
from engine.families.layer_weights import Take, output, query_key_value
from engine.model_folder import ModelConfig
from engine.ops import Ops


def build_attention(take: Take, ops: Ops, config: ModelConfig, layer: int) -> Attention:
    return Attention(
        query_key_value(take, ops),
        output(take, ops),
        head_norm=HeadNorm(take("self_attn.q_norm.weight"), take("self_attn.k_norm.weight")),
        window_tokens=config.windows[layer],
    )
