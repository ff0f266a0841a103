"""Weights from safetensors files into a model.

The files are mapped, not read: on the CPU weights of the asked dtype are used where they lie, so that
all processes of a machine that serve a model share one copy in the page cache. Other dtypes are
converted, into memory of their own.
"""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.dtypes import TORCH_DTYPES
from engine.errors import ModelFolderError
from engine.families import llama, mistral, qwen2, qwen3
from engine.families.decoder import DecoderLayer, DecoderModel
from engine.families.layer_weights import BuildAttention, build_layer
from engine.model_families import Family
from engine.model_folder import ModelConfig, weight_files
from engine.ops import Ops
from engine.tensor_shapes import EMBEDDING, FINAL_NORM, HEAD, layer_prefix, tensor_shapes
from engine.torch_ops import TorchOps

IGNORED_SUFFIX = ".rotary_emb.inv_freq"
"""A buffer that old checkpoints carry; it follows from the config."""

FAMILIES: Mapping[Family, BuildAttention] = {
    Family.LLAMA: llama.build_attention,
    Family.QWEN2: qwen2.build_attention,
    Family.QWEN3: qwen3.build_attention,
    Family.MISTRAL: mistral.build_attention,
}


def load_model(
    folder: Path, ops: Ops | None = None, *, dtype: str = "float32", layers: range | None = None
) -> DecoderModel:
    """The model in a Hugging Face folder, or the given range of its layers, packed for `ops`.

    Without `ops` it computes in plain torch on the CPU. Raises ModelFolderError naming the field, file
    or tensor that is missing, unknown or misshapen.
    """
    if dtype not in TORCH_DTYPES:
        raise ModelFolderError(f"dtype {dtype!r} is not supported, only {', '.join(TORCH_DTYPES)}")
    config = ModelConfig.load(folder)
    ops = TorchOps() if ops is None else ops
    held = _held_layers(config, layers)
    with ExitStack() as stack:
        weights = _Weights(folder, config, ops.device, TORCH_DTYPES[dtype], stack)
        embedding = weights.take(EMBEDDING) if _needs_embedding(config, held) else None
        final_norm, head = None, None
        if held.stop == config.layers:
            final_norm = weights.take(FINAL_NORM)
            matrix = embedding if config.tie_word_embeddings else weights.take(HEAD)
            assert matrix is not None
            head = ops.pack([matrix])
        return DecoderModel(
            config,
            ops,
            held,
            [_layer(weights, ops, config, layer) for layer in held],
            embedding=embedding if held.start == 0 else None,
            final_norm=final_norm,
            head=head,
        )


def _held_layers(config: ModelConfig, layers: range | None) -> range:
    held = range(config.layers) if layers is None else layers
    if held.step != 1 or not 0 <= held.start < held.stop <= config.layers:
        raise ModelFolderError(f"layers {held} is not a consecutive range within 0..{config.layers}")
    return held


def _needs_embedding(config: ModelConfig, held: range) -> bool:
    return held.start == 0 or (config.tie_word_embeddings and held.stop == config.layers)


def _layer(weights: "_Weights", ops: Ops, config: ModelConfig, layer: int) -> DecoderLayer:
    def take(name: str) -> Tensor:
        return weights.take(layer_prefix(layer) + name)

    return build_layer(take, ops, FAMILIES[config.family](take, ops, config, layer))


class _Weights:
    """The tensors of a folder by name, each checked against the config when it is taken."""

    def __init__(
        self, folder: Path, config: ModelConfig, device: torch.device, dtype: torch.dtype, stack: ExitStack
    ) -> None:
        self._folder = folder
        self._device = device
        self._dtype = dtype
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
        if tensor.dtype not in TORCH_DTYPES.values():
            raise ModelFolderError(f"{self._folder}: tensor {name} has the unsupported dtype {tensor.dtype}")
        return tensor.to(device=self._device, dtype=self._dtype)


def _open(path: Path, stack: ExitStack) -> Any:
    try:
        return stack.enter_context(safe_open(path, framework="pt"))
    except (SafetensorError, OSError) as error:
        raise ModelFolderError(f"{path} is not a readable safetensors file: {error}") from error
