"""What sets the supported model families apart in a config.json, as transformers reads it. No torch here.

`engine.families` holds how each of them computes.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from engine.json_fields import Fields

FULL, SLIDING = "full_attention", "sliding_attention"
"""The kinds of layer that `layer_types` may name."""
SLIDING_WINDOW_TOKENS_DEFAULT = 4096
"""What transformers takes for Qwen and Mistral where `sliding_window` is absent; null means no window."""
QWEN_MAX_WINDOW_LAYERS_DEFAULT = 28


class Family(StrEnum):
    """Named as config.json's `model_type`."""

    LLAMA = "llama"
    QWEN2 = "qwen2"
    QWEN3 = "qwen3"
    MISTRAL = "mistral"


@dataclass(frozen=True, slots=True)
class FamilyRules:
    architecture: str
    """The one entry of config.json's `architectures`."""
    qkv_bias: bool = False
    """Whether the query, key and value projections have a bias."""
    head_norm: bool = False
    """Whether each query and key head is normalised before it is rotated."""
    head_dim_default: int | None = None
    """None: hidden_size / heads."""
    must_equal: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    """Fields that, where present, allow only these values, beyond `MUST_EQUAL`."""


MUST_EQUAL: Mapping[str, tuple[object, ...]] = {
    "hidden_act": ("silu",),
    "mlp_bias": (False, None),
    "quantization_config": (None,),
    "compression_config": (None,),
    "num_local_experts": (None, 0),
    "num_experts": (None, 0),
    "n_routed_experts": (None, 0),
    "partial_rotary_factor": (None, 1.0),
    "rope_interleaved": (False, None),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "attention_chunk_size": (None,),
}
"""Fields of any family that, where present, allow only these values."""

NO_ATTENTION_BIAS: Mapping[str, tuple[object, ...]] = {"attention_bias": (False, None)}

RULES: Mapping[Family, FamilyRules] = {
    Family.LLAMA: FamilyRules(
        architecture="LlamaForCausalLM", must_equal={**NO_ATTENTION_BIAS, "sliding_window": (None,)}
    ),
    Family.QWEN2: FamilyRules(
        architecture="Qwen2ForCausalLM",
        qkv_bias=True,
        must_equal={"use_mrope": (False, None), "dual_chunk_attention_config": (None,)},
    ),
    Family.QWEN3: FamilyRules(
        architecture="Qwen3ForCausalLM",
        head_norm=True,
        head_dim_default=128,
        must_equal=NO_ATTENTION_BIAS,
    ),
    Family.MISTRAL: FamilyRules(architecture="MistralForCausalLM", must_equal=NO_ATTENTION_BIAS),
}


def read_family(config: Fields) -> Family:
    """The family of a config; fails where a field says something that it does not compute."""
    architectures = config.get("architectures")
    families = [family for family, rules in RULES.items() if architectures == [rules.architecture]]
    if not families:
        known = ", ".join(rules.architecture for rules in RULES.values())
        raise config.error("architectures", f"{architectures!r} is not supported, only one of {known}")
    (family,) = families
    for name, allowed in {
        "model_type": (family.value,),
        **MUST_EQUAL,
        **RULES[family].must_equal,
    }.items():
        config.require(name, allowed)
    return family


def read_windows(config: Fields, family: Family, layers: int) -> tuple[int | None, ...]:
    """For each layer how many positions a token sees, itself included; None: all."""
    window = _window(config, family)
    kinds = _layer_kinds(config, family, layers, window)
    return tuple(window if kind == SLIDING else None for kind in kinds)


def _window(config: Fields, family: Family) -> int | None:
    """The window of the layers that have one."""
    if family is Family.LLAMA:
        return None
    if family in (Family.QWEN2, Family.QWEN3) and not config.boolean("use_sliding_window", False):
        return None
    if "sliding_window" in config and config.get("sliding_window") is None:
        return None
    return config.integer("sliding_window", SLIDING_WINDOW_TOKENS_DEFAULT)


def _layer_kinds(config: Fields, family: Family, layers: int, window: int | None) -> list[str]:
    stated = config.get("layer_types")
    if stated is None:
        return _default_kinds(config, family, layers, window)
    if not isinstance(stated, list) or len(stated) != layers:
        raise config.error("layer_types", f"must be a list of num_hidden_layers = {layers} kinds")
    for layer, kind in enumerate(stated):
        if kind not in (FULL, SLIDING):
            raise config.error(
                "layer_types", f"{kind!r} of layer {layer} is not supported, only {FULL!r} and {SLIDING!r}"
            )
        if kind == SLIDING and window is None:
            raise config.error("layer_types", f"layer {layer} slides, but the config has no sliding window")
    if family is Family.MISTRAL and window is not None and FULL in stated:
        raise config.error("layer_types", "a Mistral with sliding_window has it in every layer")
    return stated


def _default_kinds(config: Fields, family: Family, layers: int, window: int | None) -> list[str]:
    first_sliding = 0
    if family in (Family.QWEN2, Family.QWEN3):
        first_sliding = config.count("max_window_layers", QWEN_MAX_WINDOW_LAYERS_DEFAULT)
    return [SLIDING if window is not None and layer >= first_sliding else FULL for layer in range(layers)]
