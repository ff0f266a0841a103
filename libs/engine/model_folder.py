"""A Hugging Face model folder as data: its config, checked, and where its weights lie. No torch here.

What the engine does not compute exactly fails here, at load, with the field named: a model that is
merely close to supported would answer wrongly without a sign.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.errors import ModelFolderError

SUPPORTED_ARCHITECTURE = "LlamaForCausalLM"
MUST_EQUAL: dict[str, tuple[object, ...]] = {
    "model_type": ("llama",),
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "sliding_window": (None,),
    "quantization_config": (None,),
    "num_local_experts": (None, 0),
    "num_experts": (None, 0),
    "partial_rotary_factor": (None, 1.0),
}
"""Fields that, where present, allow only these values."""


@dataclass(frozen=True, slots=True)
class Llama3Rope:
    """Llama 3.1's stretching of low rotary frequencies."""

    factor: float
    low_frequency_factor: float
    high_frequency_factor: float
    original_context_tokens: int


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """What the engine needs to know of a Llama-family model."""

    name: str
    layers: int
    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    context_tokens_max: int
    norm_epsilon: float
    rope_theta: float
    rope_scaling: Llama3Rope | None
    tie_word_embeddings: bool
    eos_token_ids: tuple[int, ...]
    dtype: str
    """The dtype of the stored weights, as the folder declares it."""

    @classmethod
    def load(cls, folder: Path) -> "ModelConfig":
        """Reads config.json (and generation_config.json for the end tokens).

        Raises ModelFolderError naming the file and field that is missing, wrong or unsupported.
        """
        if not folder.is_dir():
            raise ModelFolderError(f"model folder {folder} does not exist")
        config = Fields(folder / "config.json")
        _check_supported(config)
        heads = config.integer("num_attention_heads")
        kv_heads = config.integer("num_key_value_heads", heads)
        hidden_size = config.integer("hidden_size")
        head_dim = config.integer("head_dim", hidden_size // heads)
        if heads % kv_heads:
            raise config.error(
                "num_key_value_heads", f"{kv_heads} does not divide num_attention_heads {heads}"
            )
        if head_dim % 2:
            raise config.error("head_dim", f"must be even, not {head_dim}")
        theta, scaling = _rope(config)
        vocab_size = config.integer("vocab_size")
        return cls(
            name=folder.resolve().name,
            layers=config.integer("num_hidden_layers"),
            hidden_size=hidden_size,
            intermediate_size=config.integer("intermediate_size"),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            vocab_size=vocab_size,
            context_tokens_max=config.integer("max_position_embeddings"),
            norm_epsilon=config.number("rms_norm_eps", 1e-6),
            rope_theta=theta,
            rope_scaling=scaling,
            tie_word_embeddings=config.boolean("tie_word_embeddings", False),
            eos_token_ids=_eos_token_ids(folder, config, vocab_size),
            dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32"),
        )


class Fields:
    """One JSON file's fields, read with type and range checked."""

    def __init__(self, path: Path, fields: dict[str, Any] | None = None, prefix: str = "") -> None:
        self._path = path
        self._prefix = prefix
        self._fields = read_json_object(path) if fields is None else fields

    def error(self, field: str, reason: str) -> ModelFolderError:
        return ModelFolderError(f"{self._path}: field {self._prefix}{field}: {reason}")

    def get(self, field: str) -> Any:
        return self._fields.get(field)

    def __contains__(self, field: str) -> bool:
        return field in self._fields

    def nested(self, field: str) -> "Fields | None":
        value = self._fields.get(field)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.error(field, f"must be an object, not {value!r}")
        return Fields(self._path, value, f"{self._prefix}{field}.")

    def number(self, field: str, default: float | None = None) -> float:
        value = self._fields.get(field)
        if value is None:
            value = default
        if value is None:
            raise self.error(field, "is missing")
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise self.error(field, f"must be a positive number, not {value!r}")
        return float(value)

    def integer(self, field: str, default: int | None = None) -> int:
        value = self.number(field, default)
        if value != int(value):
            raise self.error(field, f"must be a whole number, not {value!r}")
        return int(value)

    def boolean(self, field: str, default: bool) -> bool:
        value = self._fields.get(field, default)
        if not isinstance(value, bool):
            raise self.error(field, f"must be true or false, not {value!r}")
        return value


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in `path`, or ModelFolderError."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelFolderError(f"{path} is missing") from None
    except (OSError, ValueError) as error:
        raise ModelFolderError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ModelFolderError(f"{path} must hold a JSON object")
    return value


def weight_files(folder: Path) -> tuple[Path, ...]:
    """The safetensors files of a folder: the shards its index names, or model.safetensors."""
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        single = folder / "model.safetensors"
        if not single.exists():
            raise ModelFolderError(f"{folder} has neither {single.name} nor {index.name}")
        return (single,)
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelFolderError(f"{index}: field weight_map is missing or empty")
    shards = []
    for name in sorted({str(shard) for shard in weight_map.values()}):
        if Path(name).name != name:
            raise ModelFolderError(
                f"{index}: field weight_map names {name!r}, which is not a plain file name"
            )
        if not (folder / name).exists():
            raise ModelFolderError(f"{folder / name} is missing, but {index.name} names it")
        shards.append(folder / name)
    return tuple(shards)


def _check_supported(config: Fields) -> None:
    architectures = config.get("architectures")
    if architectures != [SUPPORTED_ARCHITECTURE]:
        raise config.error(
            "architectures", f"{architectures!r} is not supported, only [{SUPPORTED_ARCHITECTURE!r}]"
        )
    for field, allowed in MUST_EQUAL.items():
        if field in config and config.get(field) not in allowed:
            raise config.error(field, f"{config.get(field)!r} is not supported, only {allowed[0]!r}")


def _rope(config: Fields) -> tuple[float, Llama3Rope | None]:
    """(theta, scaling), from the field of transformers 5 or those before it."""
    field = "rope_parameters" if config.get("rope_parameters") is not None else "rope_scaling"
    rope = config.nested(field)
    top_level_theta = config.number("rope_theta", 10_000.0)
    if rope is None:
        return top_level_theta, None
    theta = rope.number("rope_theta", top_level_theta)
    rope_type = rope.get("rope_type") or rope.get("type") or "default"
    if rope_type == "default":
        return theta, None
    if rope_type != "llama3":
        raise rope.error("rope_type", f"{rope_type!r} is not supported, only 'default' and 'llama3'")
    return theta, Llama3Rope(
        factor=rope.number("factor"),
        low_frequency_factor=rope.number("low_freq_factor"),
        high_frequency_factor=rope.number("high_freq_factor"),
        original_context_tokens=rope.integer("original_max_position_embeddings"),
    )


def _eos_token_ids(folder: Path, config: Fields, vocab_size: int) -> tuple[int, ...]:
    path = folder / "generation_config.json"
    source = Fields(path) if path.exists() else config
    if source.get("eos_token_id") is None:
        source = config
    value = source.get("eos_token_id")
    token_ids = () if value is None else tuple(value) if isinstance(value, list) else (value,)
    for token_id in token_ids:
        if not isinstance(token_id, int) or not 0 <= token_id < vocab_size:
            raise source.error("eos_token_id", f"{token_id!r} is not a token id below {vocab_size}")
    return token_ids
