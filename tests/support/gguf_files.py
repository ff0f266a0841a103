"""Writes a model folder as the GGUF file that llama.cpp's converter would make of it."""

import json
import math
from pathlib import Path

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize
from safetensors.numpy import load_file

from engine.byte_pair_tokenizer import byte_symbols
from engine.gguf_import import ENDINGS, LAYER_TENSORS
from engine.model_families import Family
from engine.model_folder import ModelConfig

Array = npt.NDArray[np.float32]


class GGUFContents:
    """Fields and tensors of a file, to be changed by a test before it is written."""

    def __init__(self, folder: Path) -> None:
        config = ModelConfig.load(folder)
        self.architecture = "llama" if config.family is Family.MISTRAL else config.family.value
        self.fields = {**_hyperparameters(config, self.architecture), **_tokenizer(folder, config)}
        self.tensors: dict[str, Array] = {}
        for name, tensor in load_file(folder / "model.safetensors").items():
            heads = {"q_proj": config.heads, "k_proj": config.kv_heads}.get(name.split(".")[-2])
            reordered = heads is not None and self.architecture == "llama"
            self.tensors[gguf_name(name)] = pairs_from_halves(tensor, heads) if reordered else tensor
        if config.rope_scaling is not None:
            self.tensors["rope_freqs.weight"] = _rope_factors(config)
        self.quantised: dict[str, GGMLQuantizationType] = {}
        self.raw: dict[str, tuple[npt.NDArray[np.uint8], GGMLQuantizationType]] = {}
        """Tensors whose bytes are given as they are."""

    def write(self, path: Path) -> Path:
        writer = GGUFWriter(path, self.architecture)
        for name, value in self.fields.items():
            if isinstance(value, bool):
                writer.add_bool(name, value)
            elif isinstance(value, int):
                writer.add_uint32(name, value)
            elif isinstance(value, float):
                writer.add_float32(name, value)
            elif isinstance(value, str):
                writer.add_string(name, value)
            else:
                writer.add_array(name, value)
        for name, tensor in self.tensors.items():
            kind = self.quantised.get(name)
            if name in self.raw:
                writer.add_tensor(name, self.raw[name][0], raw_dtype=self.raw[name][1])
            elif kind is None:
                writer.add_tensor(name, tensor)
            else:
                writer.add_tensor(name, quantize(tensor, kind), raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path


def gguf_name(name: str) -> str:
    """GGUF's name of a tensor that Hugging Face calls `name`."""
    whole = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    if name in whole:
        return whole[name]
    _, _, layer, module = name.split(".", 3)
    path, ending = module.rsplit(".", 1)
    assert ending in ENDINGS
    (ours,) = [ours for ours, theirs in LAYER_TENSORS.items() if theirs == path]
    return f"blk.{layer}.{ours}.{ending}"


def pairs_from_halves(weight: Array, heads: int) -> Array:
    """llama.cpp's reordering of rotary rows, as its converter does it."""
    split = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return np.ascontiguousarray(split.swapaxes(1, 2).reshape(weight.shape))


def _hyperparameters(config: ModelConfig, architecture: str) -> dict[str, object]:
    fields: dict[str, object] = {
        "block_count": config.layers,
        "context_length": config.context_tokens_max,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.heads,
        "attention.head_count_kv": config.kv_heads,
        "attention.layer_norm_rms_epsilon": config.norm_epsilon,
        "rope.freq_base": config.rope_theta,
        "rope.dimension_count": config.head_dim,
        "vocab_size": config.vocab_size,
    }
    if config.head_dim != config.hidden_size // config.heads:
        fields |= {"attention.key_length": config.head_dim, "attention.value_length": config.head_dim}
    window = config.windows[0]
    if window is not None:
        fields["attention.sliding_window"] = window
    return {f"{architecture}.{name}": value for name, value in fields.items()}


def _tokenizer(folder: Path, config: ModelConfig) -> dict[str, object]:
    """The folder's tokenizer, or where it has none the bytes and as many fillers as are needed."""
    path = folder / "tokenizer.json"
    if path.exists():
        stored = json.loads(path.read_text())
        vocabulary = stored["model"]["vocab"]
        tokens = sorted(vocabulary, key=vocabulary.__getitem__)
        merges = [" ".join(merge) for merge in stored["model"]["merges"]]
        special = {token["id"] for token in stored["added_tokens"]}
    else:
        base = ["<unk>", "<bos>", "<eos>", *byte_symbols()]
        tokens = [*base, *(f"filler{index}" for index in range(config.vocab_size - len(base)))]
        merges, special = ["a b"], {0, 1, 2}
        tokens[-1] = "ab"
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if index in special else 1 for index in range(len(tokens))],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.padding_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": "{{ messages }}",
    }


def _rope_factors(config: ModelConfig) -> Array:
    """What each rotary frequency is divided by, as llama.cpp's converter works it out for Llama 3."""
    rope = config.rope_scaling
    assert rope is not None
    factors = []
    for dimension in range(0, config.head_dim, 2):
        wavelength = 2 * math.pi * config.rope_theta ** (dimension / config.head_dim)
        if wavelength < rope.original_context_tokens / rope.high_frequency_factor:
            factors.append(1.0)
        elif wavelength > rope.original_context_tokens / rope.low_frequency_factor:
            factors.append(rope.factor)
        else:
            smooth = rope.original_context_tokens / wavelength - rope.low_frequency_factor
            smooth /= rope.high_frequency_factor - rope.low_frequency_factor
            factors.append(1 / ((1 - smooth) / rope.factor + smooth))
    return np.asarray(factors, dtype=np.float32)
