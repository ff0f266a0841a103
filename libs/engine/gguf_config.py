"""From a GGUF file's hyperparameters to a config.json. Any of them that is not known is an error."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.gguf_fields import GGUFFields
from engine.model_families import RULES, Family

CONVERSION_VERSION = 1
"""Written to config.json; grows when the same GGUF gives another folder."""
CONVERSION_FIELD = "moonpool_conversion_version"

ARCHITECTURES: Mapping[str, Family] = {
    "llama": Family.LLAMA,
    "qwen2": Family.QWEN2,
    "qwen3": Family.QWEN3,
}
"""By GGUF's name; a llama with a sliding window is a Mistral."""
ROTARY_PAIRS = frozenset({"llama"})
"""Architectures whose query and key rows GGUF reorders: it rotates rows 2i and 2i + 1, not i and i + D/2."""
HYPERPARAMETERS = frozenset(
    {
        "block_count",
        "context_length",
        "embedding_length",
        "feed_forward_length",
        "attention.head_count",
        "attention.head_count_kv",
        "attention.key_length",
        "attention.value_length",
        "attention.layer_norm_rms_epsilon",
        "attention.sliding_window",
        "rope.dimension_count",
        "rope.freq_base",
        "rope.scaling.type",
        "vocab_size",
        "expert_count",
        "expert_used_count",
    }
)
ROPE_FACTORS = "rope_freqs.weight"
"""The tensor in which GGUF keeps Llama 3's stretching: what each frequency is divided by."""
ROPE_FACTOR_ERROR_MAX = 1e-3

Float32Array = npt.NDArray[np.float32]


def hugging_face_config(
    fields: GGUFFields, *, tied: bool, rope_factors: Float32Array | None
) -> dict[str, Any]:
    """Raises ModelFolderError naming the field that is missing or not supported."""
    architecture = fields.text("general.architecture")
    family = _family(fields, architecture)

    def name(hyperparameter: str) -> str:
        return f"{architecture}.{hyperparameter}"

    _check_supported(fields, architecture)
    heads = fields.integer(name("attention.head_count"))
    hidden_size = fields.integer(name("embedding_length"))
    head_dim = fields.integer(name("attention.key_length"), hidden_size // heads)
    for equal in (name("attention.value_length"), name("rope.dimension_count")):
        if fields.integer(equal, head_dim) != head_dim:
            raise fields.error(equal, f"must equal the head's {head_dim} dimensions")
    theta = fields.number(name("rope.freq_base"), 10_000.0)
    config: dict[str, Any] = {
        "architectures": [RULES[family].architecture],
        "model_type": family.value,
        CONVERSION_FIELD: CONVERSION_VERSION,
        **({} if RULES[family].qkv_bias else {"attention_bias": False}),
        "mlp_bias": False,
        "hidden_act": "silu",
        "hidden_size": hidden_size,
        "intermediate_size": fields.integer(name("feed_forward_length")),
        "num_hidden_layers": fields.integer(name("block_count")),
        "num_attention_heads": heads,
        "num_key_value_heads": fields.integer(name("attention.head_count_kv"), heads),
        "head_dim": head_dim,
        "vocab_size": len(fields.texts("tokenizer.ggml.tokens")),
        "max_position_embeddings": fields.integer(name("context_length")),
        "rms_norm_eps": fields.number(name("attention.layer_norm_rms_epsilon")),
        "rope_theta": theta,
        "rope_parameters": _rope(fields, head_dim, theta, rope_factors),
        "tie_word_embeddings": tied,
        "dtype": "float32",
        "torch_dtype": "float32",
    }
    if family is Family.MISTRAL:
        config["sliding_window"] = fields.integer(name("attention.sliding_window"))
    return config


def _family(fields: GGUFFields, architecture: str) -> Family:
    family = ARCHITECTURES.get(architecture)
    if family is None:
        known = ", ".join(ARCHITECTURES)
        raise fields.error("general.architecture", f"{architecture!r} is not supported, only {known}")
    window = f"{architecture}.attention.sliding_window"
    if not fields.has(window) or fields.equals(window, 0):
        return family
    if family is not Family.LLAMA:
        raise fields.error(window, f"is not supported with {architecture}")
    return Family.MISTRAL


def _check_supported(fields: GGUFFields, architecture: str) -> None:
    known = {f"{architecture}.{name}" for name in HYPERPARAMETERS}
    for name in sorted(fields.names()):
        if name.startswith(f"{architecture}.") and name not in known:
            raise fields.error(name, "is not supported")
    for name, only in (("rope.scaling.type", "none"), ("expert_count", 0), ("expert_used_count", 0)):
        if fields.has(f"{architecture}.{name}"):
            fields.require(f"{architecture}.{name}", only)


def _rope(fields: GGUFFields, head_dim: int, theta: float, factors: Float32Array | None) -> dict[str, Any]:
    """rope_parameters; what Llama 3's stretching was made from follows from the factors it gave."""
    if factors is not None and factors.shape != (head_dim // 2,):
        raise fields.tensor_error(ROPE_FACTORS, f"has shape {factors.shape}, not ({head_dim // 2},)")
    if factors is None or (factors == 1.0).all():
        return {"rope_type": "default", "rope_theta": theta}
    stretched = _llama3_rope(factors.astype(np.float64), theta)
    if stretched is None:
        raise fields.tensor_error(ROPE_FACTORS, "is not supported: no stretching of Llama 3's kind")
    return {"rope_type": "llama3", "rope_theta": theta, **stretched}


def _llama3_rope(factors: npt.NDArray[np.float64], theta: float) -> dict[str, Any] | None:
    """Llama 3: 1 / factor = (1 - s) / F + s, where s = (C / wavelength - low) / (high - low) within 0..1.

    Between the ends s is a line in 1 / wavelength, and two points of it tell C / (high - low) and
    low / (high - low). Only ratios of C, low and high matter: low is taken as 1, as in all of Llama 3.
    """
    dimensions = 2 * len(factors)
    turns = theta ** -(np.arange(0, dimensions, 2) / dimensions) / (2 * math.pi)  # 1 / wavelength
    largest = float(factors.max())
    share = (1 / factors - 1 / largest) / (1 - 1 / largest)
    between = (share > ROPE_FACTOR_ERROR_MAX) & (share < 1 - ROPE_FACTOR_ERROR_MAX)
    if largest <= 1 or between.sum() < 2:
        return None
    slope, offset = np.polyfit(turns[between], share[between], 1)
    if slope <= 0 or offset >= 0:
        return None
    high = round(1 - 1 / offset, 3)
    context = round(slope * (high - 1))
    expected = np.clip((context * turns - 1) / (high - 1), 0, 1)
    if np.abs(expected - share).max() > ROPE_FACTOR_ERROR_MAX:
        return None
    return {
        "factor": round(largest, 3),
        "low_freq_factor": 1.0,
        "high_freq_factor": high,
        "original_max_position_embeddings": context,
    }
