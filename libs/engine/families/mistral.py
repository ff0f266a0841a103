"""Mistral: Llama with a sliding window in every layer; later versions have none (`sliding_window: null`)."""

from engine.families.decoder import Attention
from engine.families.layer_weights import Take, output, query_key_value
from engine.model_folder import ModelConfig
from engine.ops import Ops


def build_attention(take: Take, ops: Ops, config: ModelConfig, layer: int) -> Attention:
    return Attention(query_key_value(take, ops), output(take, ops), window_tokens=config.windows[layer])
