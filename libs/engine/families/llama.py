"""Llama 2 and 3, and what has their shape (SmolLM2, TinyLlama): grouped heads over the whole context.

Llama 3.1's stretched rotary frequencies come from the config (`engine.rotary`).
"""

from engine.families.decoder import Attention
from engine.families.layer_weights import Take, output, query_key_value
from engine.model_folder import ModelConfig
from engine.ops import Ops


def build_attention(take: Take, ops: Ops, config: ModelConfig, layer: int) -> Attention:
    return Attention(query_key_value(take, ops), output(take, ops))
