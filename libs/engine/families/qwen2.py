"""Qwen 2 and 2.5: Llama with biases on query, key and value.

Where `use_sliding_window` is on, the layers from `max_window_layers` up have a sliding window.
"""

from engine.families.decoder import Attention
from engine.families.layer_weights import Take, output, query_key_value
from engine.model_folder import ModelConfig
from engine.ops import Ops


def build_attention(take: Take, ops: Ops, config: ModelConfig, layer: int) -> Attention:
    return Attention(
        query_key_value(take, ops, bias=True), output(take, ops), window_tokens=config.windows[layer]
    )
