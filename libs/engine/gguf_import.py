"""Turns a GGUF file of Llama, Mistral, Qwen2 or Qwen3 into a Hugging Face folder in float32.

Needs numpy, gguf and tokenizers, neither torch nor transformers. What the file says and this module
does not know fails with the key named: a dropped field would be a model that answers slightly wrong.
"""

import math
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from gguf import GGUFReader, ReaderTensor
from gguf.quants import dequantize

from engine.atomic_folder import atomic_folder
from engine.errors import ModelFolderError
from engine.gguf_config import ROPE_FACTORS, ROTARY_PAIRS, hugging_face_config
from engine.gguf_fields import GGUFFields
from engine.gguf_tokenizer import read_tokenizer
from engine.model_folder import ModelConfig
from engine.safetensors_file import Float32Array, write_float32
from engine.tensor_shapes import EMBEDDING, FINAL_NORM, HEAD, layer_prefix, tensor_shapes
from engine.tokenizer_file import SpecialTokens, write_json, write_tokenizer

PROGRESS_REPORTS = 10
"""How often a conversion says how far it is."""

LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""By GGUF's name within `blk.<layer>`, without the ending."""
ENDINGS = ("weight", "bias")


def import_gguf(gguf_path: Path, folder: Path, progress: Callable[[str], None]) -> None:
    """Writes `folder` (which must not exist) from `gguf_path`, whole or not at all.

    Holds one tensor in memory at a time. Raises ModelFolderError naming the file and the field or
    tensor that is missing or not supported.
    """
    progress(f"reading {gguf_path.name}")
    fields, tensors = _open(gguf_path)
    rope_factors = tensors.pop(ROPE_FACTORS, None)
    config = hugging_face_config(
        fields,
        tied="output.weight" not in tensors,
        rope_factors=None if rope_factors is None else _dequantised(gguf_path, rope_factors),
    )
    read = read_tokenizer(fields)
    with atomic_folder(folder) as partial:
        write_json(partial / "config.json", {**config, **_token_fields(read.special)})
        write_json(partial / "generation_config.json", _token_fields(read.special))
        write_tokenizer(
            partial,
            read.tokenizer,
            read.vocabulary,
            read.special,
            chat_template=fields.optional_text("tokenizer.chat_template"),
            context_tokens_max=config["max_position_embeddings"],
        )
        model = ModelConfig.load(partial)
        source = _Source(
            path=gguf_path,
            tensors=_by_hugging_face_name(gguf_path, model, tensors),
            head_dim=model.head_dim,
            rotary_pairs=fields.text("general.architecture") in ROTARY_PAIRS,
        )
        shapes = tensor_shapes(model)
        _check_room(partial, shapes)
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


def _token_fields(special: SpecialTokens) -> dict[str, int | list[int]]:
    ends = list(special.ends)
    fields = {
        "bos_token_id": special.bos,
        "eos_token_id": ends if len(ends) > 1 else special.eos,
        "pad_token_id": special.padding,
    }
    return {name: value for name, value in fields.items() if value is not None}


def _by_hugging_face_name(
    gguf_path: Path, model: ModelConfig, tensors: dict[str, ReaderTensor]
) -> dict[str, ReaderTensor]:
    names = {"token_embd.weight": EMBEDDING, "output_norm.weight": FINAL_NORM, "output.weight": HEAD}
    for layer in range(model.layers):
        for ours, theirs in LAYER_TENSORS.items():
            for ending in ENDINGS:
                names[f"blk.{layer}.{ours}.{ending}"] = f"{layer_prefix(layer)}{theirs}.{ending}"
    shapes = tensor_shapes(model)
    unknown = sorted(name for name in tensors if names.get(name) not in shapes)
    if unknown:
        raise ModelFolderError(f"{gguf_path}: tensor {unknown[0]} is not supported ({len(unknown)} such)")
    return {names[name]: tensor for name, tensor in tensors.items()}


@dataclass(frozen=True, slots=True)
class _Source:
    path: Path
    tensors: dict[str, ReaderTensor]
    """By Hugging Face's name."""
    head_dim: int
    rotary_pairs: bool
    """Whether rows of query and key are in GGUF's own order."""


def _check_room(folder: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    needed = sum(np.dtype(np.float32).itemsize * math.prod(shape) for shape in shapes.values())
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise ModelFolderError(f"{folder.parent} has {free} bytes free, the float32 weights need {needed}")


def _converted(
    source: _Source, shapes: dict[str, tuple[int, ...]], progress: Callable[[str], None]
) -> Iterator[Float32Array]:
    report_every = max(1, len(shapes) // PROGRESS_REPORTS)
    for done, (name, shape) in enumerate(shapes.items()):
        if done % report_every == 0:
            progress(f"converting {source.path.name}: {100 * done // len(shapes)} %")
        yield _tensor(source, name, shape)


def _tensor(source: _Source, name: str, shape: tuple[int, ...]) -> Float32Array:
    stored = source.tensors.get(name)
    if stored is None:
        raise ModelFolderError(f"{source.path}: the tensor for {name} is missing")
    tensor = _dequantised(source.path, stored)
    if tensor.shape != shape:
        raise ModelFolderError(f"{source.path}: tensor {stored.name} has shape {tensor.shape}, not {shape}")
    if source.rotary_pairs and name.endswith((".q_proj.weight", ".k_proj.weight")):
        tensor = _halves_from_pairs(tensor, source.head_dim)
    return tensor


def _dequantised(path: Path, stored: ReaderTensor) -> Float32Array:
    try:
        return np.asarray(dequantize(stored.data, stored.tensor_type), dtype=np.float32)
    except NotImplementedError:
        raise ModelFolderError(
            f"{path}: tensor {stored.name} has the unsupported type {stored.tensor_type.name}"
        ) from None


def _halves_from_pairs(weight: Float32Array, head_dim: int) -> Float32Array:
    """Undoes GGUF's row order of rotary heads: it pairs rows 2i and 2i+1, Hugging Face i and i + D/2."""
    heads = weight.shape[0] // head_dim
    return weight.reshape(heads, head_dim // 2, 2, -1).swapaxes(1, 2).reshape(weight.shape)
