"""Weights from safetensors files into a model.

The files are mapped, not read: float32 weights are used where they lie, so that all processes of a
machine that serve a model share one copy in the page cache. Other dtypes are converted, into memory
of their own.
"""

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.errors import ModelFolderError
from engine.llama import LayerWeights, LlamaModel
from engine.llama_tensors import EMBEDDING, FINAL_NORM, HEAD, layer_prefix, tensor_shapes
from engine.model_folder import ModelConfig, weight_files
from engine.ops import Ops
from engine.torch_ops import TorchOps

SUPPORTED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
IGNORED_SUFFIX = ".rotary_emb.inv_freq"
"""A buffer that old checkpoints carry; it follows from the config."""


def load_model(
    folder: Path, ops: Ops | None = None, *, dtype: str = "float32", layers: range | None = None
) -> LlamaModel:
    """The model in a Hugging Face folder, or the given range of its layers, packed for `ops`.

    Raises ModelFolderError naming the field, file or tensor that is missing, unknown or misshapen.
    """
    if dtype != "float32":
        raise ModelFolderError(f"dtype {dtype!r} is not supported, only 'float32'")
    config = ModelConfig.load(folder)
    ops = TorchOps() if ops is None else ops
    held = _held_layers(config, layers)
    with ExitStack() as stack:
        weights = _Weights(folder, config, stack)
        embedding = weights.take(EMBEDDING) if _needs_embedding(config, held) else None
        is_last = held.stop == config.layers
        head = None
        if is_last:
            matrix = embedding if config.tie_word_embeddings else weights.take(HEAD)
            assert matrix is not None
            head = ops.pack([matrix])
        return LlamaModel(
            config,
            ops,
            held,
            [_layer_weights(weights, ops, layer) for layer in held],
            embedding=embedding if held.start == 0 else None,
            final_norm=weights.take(FINAL_NORM) if is_last else None,
            head=head,
        )


def _held_layers(config: ModelConfig, layers: range | None) -> range:
    held = range(config.layers) if layers is None else layers
    if held.step != 1 or not 0 <= held.start < held.stop <= config.layers:
        raise ModelFolderError(f"layers {held} is not a consecutive range within 0..{config.layers}")
    return held


def _needs_embedding(config: ModelConfig, held: range) -> bool:
    return held.start == 0 or (config.tie_word_embeddings and held.stop == config.layers)


def _layer_weights(weights: "_Weights", ops: Ops, layer: int) -> LayerWeights:
    def take(name: str) -> Tensor:
        return weights.take(f"{layer_prefix(layer)}{name}.weight")

    return LayerWeights(
        attention_norm=take("input_layernorm"),
        query_key_value=ops.pack([take(f"self_attn.{name}_proj") for name in ("q", "k", "v")]),
        output=ops.pack([take("self_attn.o_proj")]),
        mlp_norm=take("post_attention_layernorm"),
        gate_up=ops.pack([take("mlp.gate_proj"), take("mlp.up_proj")]),
        down=ops.pack([take("mlp.down_proj")]),
    )


class _Weights:
    """The tensors of a folder by name, each checked against the config when it is taken."""

    def __init__(self, folder: Path, config: ModelConfig, stack: ExitStack) -> None:
        self._folder = folder
        self._shapes = tensor_shapes(config)
        self._readers: dict[str, Callable[[str], Tensor]] = {}
        for path in weight_files(folder):
            opened = _open(path, stack)
            for name in opened.keys():  # noqa: SIM118 - a safetensors handle is no mapping
                self._readers[name] = opened.get_tensor
        known = {*self._shapes, HEAD}  # a tied head may be stored all the same
        unknown = sorted(
            name for name in self._readers if name not in known and not name.endswith(IGNORED_SUFFIX)
        )
        if unknown:
            raise ModelFolderError(f"{folder}: tensor {unknown[0]} is not supported ({len(unknown)} such)")

    def take(self, name: str) -> Tensor:
        reader = self._readers.get(name)
        if reader is None:
            raise ModelFolderError(f"{self._folder}: tensor {name} is missing")
        tensor = reader(name)
        shape, expected = tuple(tensor.shape), self._shapes[name]
        if shape != expected:
            raise ModelFolderError(
                f"{self._folder}: tensor {name} has shape {shape}, config.json says {expected}"
            )
        if tensor.dtype not in SUPPORTED_DTYPES:
            raise ModelFolderError(f"{self._folder}: tensor {name} has the unsupported dtype {tensor.dtype}")
        return tensor.to(torch.float32)


def _open(path: Path, stack: ExitStack) -> Any:
    try:
        return stack.enter_context(safe_open(path, framework="pt"))
    except (SafetensorError, OSError) as error:
        raise ModelFolderError(f"{path} is not a readable safetensors file: {error}") from error
