"""A Hugging Face model folder as data: its config, checked, and where its weights lie. No torch here.

What the engine does not compute exactly fails here, at load, with the field named: a model that is
merely close to supported would answer wrongly without a sign.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from engine.errors import ModelFolderError
from engine.json_fields import Fields, read_json_object
from engine.model_families import RULES, Family, read_family, read_windows

LAYERS_MAX = 10_000
"""Far beyond any model; a damaged number must not become a list of billions."""
COMMON_ROPE_FIELDS = frozenset({"rope_type", "type", "rope_theta", "partial_rotary_factor"})
LLAMA3_ROPE_FIELDS = frozenset(
    {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}
)
ROPE_FIELDS: Mapping[str, frozenset[str]] = {
    "default": COMMON_ROPE_FIELDS,
    "llama3": COMMON_ROPE_FIELDS | LLAMA3_ROPE_FIELDS,
}
"""The supported rope types, and the fields that each may have."""


@dataclass(frozen=True, slots=True)
class Llama3Rope:
    """Llama 3.1's stretching of low rotary frequencies."""

    factor: float
    low_frequency_factor: float
    high_frequency_factor: float
    original_context_tokens: int


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """What the engine needs to know of a model."""

    name: str
    family: Family
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
    windows: tuple[int | None, ...]
    """For each layer how many positions a token sees, itself included; None: all of its context."""
    tie_word_embeddings: bool
    eos_token_ids: tuple[int, ...]
    dtype: str
    """The dtype of the stored weights, as the folder declares it."""

    @property
    def qkv_bias(self) -> bool:
        """Whether the query, key and value projections have a bias."""
        return RULES[self.family].qkv_bias

    @property
    def head_norm(self) -> bool:
        """Whether each query and key head is normalised before it is rotated."""
        return RULES[self.family].head_norm

    @classmethod
    def load(cls, folder: Path) -> "ModelConfig":
        """Reads config.json (and generation_config.json for the end tokens).

        Raises ModelFolderError naming the file and field that is missing, wrong or unsupported.
        """
        if not folder.is_dir():
            raise ModelFolderError(f"model folder {folder} does not exist")
        config = Fields(folder / "config.json")
        family = read_family(config)
        heads = config.integer("num_attention_heads")
        kv_heads = config.integer("num_key_value_heads", heads)
        hidden_size = config.integer("hidden_size")
        head_dim = config.integer("head_dim", RULES[family].head_dim_default or hidden_size // heads)
        if heads % kv_heads:
            raise config.error(
                "num_key_value_heads", f"{kv_heads} does not divide num_attention_heads {heads}"
            )
        if head_dim % 2:
            raise config.error("head_dim", f"must be even, not {head_dim}")
        theta, scaling = _rope(config)
        vocab_size = config.integer("vocab_size")
        layers = config.integer("num_hidden_layers")
        if layers > LAYERS_MAX:
            raise config.error("num_hidden_layers", f"must be at most {LAYERS_MAX}, not {layers}")
        return cls(
            name=folder.resolve().name,
            family=family,
            layers=layers,
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
            windows=read_windows(config, family, layers),
            tie_word_embeddings=config.boolean("tie_word_embeddings", False),
            eos_token_ids=_eos_token_ids(folder, config, vocab_size),
            dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32"),
        )


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


def _rope(config: Fields) -> tuple[float, Llama3Rope | None]:
    """(theta, scaling), from the field of transformers 5 or those before it."""
    theta, scaling = config.number("rope_theta", 10_000.0), None
    current, former = config.nested("rope_parameters"), config.nested("rope_scaling")
    if current is not None:
        theta, scaling = _rope_of(current, theta)
    if former is not None:
        stated = _rope_of(former, theta)
        if current is not None and stated != (theta, scaling):
            raise config.error("rope_scaling", "says something else than rope_parameters")
        theta, scaling = stated
    return theta, scaling


def _rope_of(rope: Fields, theta_default: float) -> tuple[float, Llama3Rope | None]:
    theta = rope.number("rope_theta", theta_default)
    rope_type = rope.get("rope_type") or rope.get("type") or "default"
    known_fields = ROPE_FIELDS.get(rope_type) if isinstance(rope_type, str) else None
    if known_fields is None:
        raise rope.error("rope_type", f"{rope_type!r} is not supported, only {' and '.join(ROPE_FIELDS)}")
    for name in rope.names():
        if name not in known_fields:
            raise rope.error(name, f"is not supported with rope type {rope_type!r}")
    rope.require("partial_rotary_factor", (1.0, None))
    return theta, _llama3_rope(rope) if rope_type == "llama3" else None


def _llama3_rope(rope: Fields) -> Llama3Rope:
    factor = rope.number("factor")
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    if high <= low:
        raise rope.error("high_freq_factor", f"must be above low_freq_factor {low}, not {high}")
    return Llama3Rope(
        factor=factor,
        low_frequency_factor=low,
        high_frequency_factor=high,
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
        if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id < vocab_size:
            raise source.error("eos_token_id", f"{token_id!r} is not a token id below {vocab_size}")
    return token_ids
