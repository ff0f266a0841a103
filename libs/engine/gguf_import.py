"""Turns a GGUF file of the Llama architecture into a Hugging Face folder in float32.

Needs numpy, gguf and tokenizers, neither torch nor transformers. What the file says and this module
does not know fails with the key named: a dropped field would be a model that answers slightly wrong.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, ReaderTensor
from gguf.quants import dequantize

from engine.atomic_folder import atomic_folder
from engine.errors import ModelFolderError
from engine.gguf_fields import GGUFFields
from engine.gguf_tokenizer import read_special_tokens, read_vocabulary
from engine.tensor_shapes import EMBEDDING, FINAL_NORM, HEAD, layer_prefix, tensor_shapes
from engine.model_folder import ModelConfig
from engine.safetensors_file import Float32Array, write_float32
from engine.tokenizer_file import SpecialTokens, write_json, write_tokenizer

CONVERSION_VERSION = 1
"""Written to config.json; grows when the same GGUF gives another folder."""
CONVERSION_FIELD = "moonpool_conversion_version"
PROGRESS_REPORTS = 10
"""How often a conversion says how far it is."""

LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
KNOWN_FIELDS = frozenset(
    {
        "llama.block_count",
        "llama.context_length",
        "llama.embedding_length",
        "llama.feed_forward_length",
        "llama.attention.head_count",
        "llama.attention.head_count_kv",
        "llama.attention.key_length",
        "llama.attention.value_length",
        "llama.attention.layer_norm_rms_epsilon",
        "llama.rope.dimension_count",
        "llama.rope.freq_base",
        "llama.rope.scaling.type",
        "llama.vocab_size",
        "llama.expert_count",
    }
)


def import_gguf(gguf_path: Path, folder: Path, progress: Callable[[str], None]) -> None:
    """Writes `folder` (which must not exist) from `gguf_path`, whole or not at all.

    Holds one tensor in memory at a time. Raises ModelFolderError naming the file and the field or
    tensor that is missing or not supported.
    """
    progress(f"reading {gguf_path.name}")
    fields, tensors = _open(gguf_path)
    config = _hugging_face_config(fields, tied="output.weight" not in tensors)
    special = read_special_tokens(fields)
    vocabulary = read_vocabulary(fields)
    context_tokens_max = fields.integer("llama.context_length")
    with atomic_folder(folder) as partial:
        write_json(partial / "config.json", {**config, **_token_fields(special)})
        write_json(partial / "generation_config.json", _token_fields(special))
        write_tokenizer(
            partial,
            vocabulary,
            special,
            chat_template=fields.optional_text("tokenizer.chat_template"),
            context_tokens_max=context_tokens_max,
        )
        model = ModelConfig.load(partial)
        source = _Source(gguf_path, model, _by_hugging_face_name(gguf_path, model, tensors))
        shapes = tensor_shapes(model)
        write_float32(
            partial / "model.safetensors", list(shapes.items()), _converted(source, shapes, progress)
        )
    progress(f"converted {gguf_path.name} into {folder}")


def _open(gguf_path: Path) -> tuple[GGUFFields, dict[str, ReaderTensor]]:
    try:
        reader = GGUFReader(gguf_path)
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise ModelFolderError(f"{gguf_path} is not a readable GGUF file: {error}") from error
    return GGUFFields(gguf_path, reader.fields), {tensor.name: tensor for tensor in reader.tensors}


def _hugging_face_config(fields: GGUFFields, *, tied: bool) -> dict[str, Any]:
    _check_supported(fields)
    heads = fields.integer("llama.attention.head_count")
    hidden_size = fields.integer("llama.embedding_length")
    head_dim = fields.integer("llama.attention.key_length", hidden_size // heads)
    for name in ("llama.attention.value_length", "llama.rope.dimension_count"):
        if fields.integer(name, head_dim) != head_dim:
            raise fields.error(name, f"must equal the head's {head_dim} dimensions")
    theta = fields.number("llama.rope.freq_base", 10_000.0)
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        CONVERSION_FIELD: CONVERSION_VERSION,
        "attention_bias": False,
        "mlp_bias": False,
        "hidden_act": "silu",
        "hidden_size": hidden_size,
        "intermediate_size": fields.integer("llama.feed_forward_length"),
        "num_hidden_layers": fields.integer("llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": fields.integer("llama.attention.head_count_kv", heads),
        "head_dim": head_dim,
        "vocab_size": len(fields.texts("tokenizer.ggml.tokens")),
        "max_position_embeddings": fields.integer("llama.context_length"),
        "rms_norm_eps": fields.number("llama.attention.layer_norm_rms_epsilon"),
        "rope_theta": theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "tie_word_embeddings": tied,
        "dtype": "float32",
        "torch_dtype": "float32",
    }


def _check_supported(fields: GGUFFields) -> None:
    fields.require("general.architecture", "llama")
    unknown = sorted(
        name for name in fields.names() if name.startswith("llama.") and name not in KNOWN_FIELDS
    )
    if unknown:
        raise fields.error(unknown[0], "is not supported")
    if fields.has("llama.rope.scaling.type"):
        fields.require("llama.rope.scaling.type", "none")
    if fields.has("llama.expert_count"):
        fields.require("llama.expert_count", 0)


def _token_fields(special: SpecialTokens) -> dict[str, int]:
    fields = {"bos_token_id": special.bos, "eos_token_id": special.eos, "pad_token_id": special.padding}
    return {name: token_id for name, token_id in fields.items() if token_id is not None}


def _by_hugging_face_name(
    gguf_path: Path, model: ModelConfig, tensors: dict[str, ReaderTensor]
) -> dict[str, ReaderTensor]:
    names = {"token_embd.weight": EMBEDDING, "output_norm.weight": FINAL_NORM, "output.weight": HEAD}
    for layer in range(model.layers):
        for ours, theirs in LAYER_TENSORS.items():
            names[f"blk.{layer}.{ours}.weight"] = f"{layer_prefix(layer)}{theirs}.weight"
    unknown = sorted(name for name in tensors if name not in names)
    if unknown:
        raise ModelFolderError(f"{gguf_path}: tensor {unknown[0]} is not supported ({len(unknown)} such)")
    return {names[name]: tensor for name, tensor in tensors.items()}


@dataclass(frozen=True, slots=True)
class _Source:
    path: Path
    model: ModelConfig
    tensors: dict[str, ReaderTensor]


def _converted(
    source: _Source, shapes: dict[str, tuple[int, ...]], progress: Callable[[str], None]
) -> Iterator[Float32Array]:
    report_every = max(1, len(shapes) // PROGRESS_REPORTS)
    for done, (name, shape) in enumerate(shapes.items()):
        if done % report_every == 0:
            progress(f"converting {source.path.name}: {100 * done // len(shapes)} %")
        yield _dequantised(source, name, shape)


def _dequantised(source: _Source, name: str, shape: tuple[int, ...]) -> Float32Array:
    stored = source.tensors.get(name)
    if stored is None:
        raise ModelFolderError(f"{source.path}: the tensor for {name} is missing")
    try:
        tensor = dequantize(stored.data, stored.tensor_type)
    except NotImplementedError:
        raise ModelFolderError(
            f"{source.path}: tensor {stored.name} has the unsupported type {stored.tensor_type.name}"
        ) from None
    if tensor.shape != shape:
        raise ModelFolderError(f"{source.path}: tensor {stored.name} has shape {tensor.shape}, not {shape}")
    if name.endswith((".q_proj.weight", ".k_proj.weight")):
        tensor = _halves_from_pairs(tensor, source.model.head_dim)
    return np.asarray(tensor, dtype=np.float32)


def _halves_from_pairs(weight: Float32Array, head_dim: int) -> Float32Array:
    """Undoes GGUF's row order of rotary heads: it pairs rows 2i and 2i+1, Hugging Face i and i + D/2."""
    heads = weight.shape[0] // head_dim
    return weight.reshape(heads, head_dim // 2, 2, -1).swapaxes(1, 2).reshape(weight.shape)
