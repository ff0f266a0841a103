"""From a checkpoint's tensors to a layer's weights: what the families have in common."""

from collections.abc import Callable

from torch import Tensor

from engine.families.decoder import Attention, DecoderLayer
from engine.model_folder import ModelConfig
from engine.ops import Linear, Ops

Take = Callable[[str], Tensor]
"""A tensor of one layer by its name within the layer, checked, on the backend's device."""
BuildAttention = Callable[[Take, Ops, ModelConfig, int], Attention]
"""What a family's module offers: the attention of layer number `int`, counted over the whole model."""


def build_layer(take: Take, ops: Ops, attention: Attention) -> DecoderLayer:
    return DecoderLayer(
        attention_norm=take("input_layernorm.weight"),
        attention=attention,
        mlp_norm=take("post_attention_layernorm.weight"),
        gate_up=ops.pack([take("mlp.gate_proj.weight"), take("mlp.up_proj.weight")]),
        down=ops.pack([take("mlp.down_proj.weight")]),
    )


def query_key_value(take: Take, ops: Ops, *, bias: bool = False) -> Linear:
    names = [f"self_attn.{name}_proj" for name in ("q", "k", "v")]
    biases = [take(f"{name}.bias") for name in names] if bias else None
    return ops.pack([take(f"{name}.weight") for name in names], biases)


def output(take: Take, ops: Ops) -> Linear:
    return ops.pack([take("self_attn.o_proj.weight")])
