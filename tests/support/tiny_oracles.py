"""Tiny models with random weights, made by transformers, and what transformers answers with them.

Every parameter matters: with the library's own initialisation norms would be one, biases zero and logits
nearly flat. The greedy answer is computed without any cache, so it depends on no cache's code.
"""

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

PROMPT_TOKENS = 48
ANSWER_TOKENS = 24
VOCAB_SIZE = 512
SPECIAL_TOKENS = 3
GAP_MIN = 2e-3
"""Between the two best tokens of every greedy step: rounding must not be able to change the answer."""

COMMON: Mapping[str, object] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
}
LLAMA3_ROPE: Mapping[str, object] = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
NINE_HEADS = {"hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3}
UPPER_LAYER_SLIDES = {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}


@dataclass(frozen=True, slots=True)
class OracleSpec:
    config: type[PretrainedConfig]
    tied: bool
    fields: Mapping[str, object]

    def model(self) -> PreTrainedModel:
        fields = {**COMMON, **self.fields, "tie_word_embeddings": self.tied}
        return AutoModelForCausalLM.from_config(self.config(**fields), attn_implementation="eager").eval()


SPECS: Mapping[str, OracleSpec] = {
    "llama-tied": OracleSpec(LlamaConfig, True, {}),
    "llama-untied": OracleSpec(LlamaConfig, False, {}),
    "llama-llama3-rope": OracleSpec(LlamaConfig, True, {"rope_parameters": LLAMA3_ROPE}),
    "llama-9-heads-3-kv": OracleSpec(LlamaConfig, True, NINE_HEADS),
    "qwen2": OracleSpec(Qwen2Config, True, {}),
    "qwen3": OracleSpec(Qwen3Config, False, {"head_dim": 32}),
    "mistral-sliding": OracleSpec(MistralConfig, False, {"sliding_window": 16, "head_dim": 16}),
    "mistral-full": OracleSpec(MistralConfig, False, {"sliding_window": None, "head_dim": 16}),
    "qwen2-upper-layer-slides": OracleSpec(Qwen2Config, False, UPPER_LAYER_SLIDES),
    "qwen3-tied-slides": OracleSpec(Qwen3Config, True, {**UPPER_LAYER_SLIDES, "head_dim": 8}),
}


@dataclass(frozen=True, slots=True)
class Oracle:
    """A model folder, and what it must answer to `prompt`."""

    folder: Path
    prompt: tuple[int, ...]
    logits: Tensor
    """[prompt, vocabulary] float32"""
    answer: tuple[int, ...]
    """The greedy tokens after the prompt; end tokens do not end it."""


def make_oracle(folder: Path, name: str) -> Oracle:
    """Writes the model of that name into `folder`; the same name always gives the same oracle."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    model = SPECS[name].model()
    _randomise(model, generator)
    model.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=2, pad_token_id=0)
    model.save_pretrained(folder)
    prompt = torch.randint(SPECIAL_TOKENS, VOCAB_SIZE, (1, PROMPT_TOKENS), generator=generator)
    with torch.no_grad():
        logits = model(prompt).logits[0].float()
        tokens = prompt
        for _ in range(ANSWER_TOKENS):
            best = model(tokens).logits[0, -1].topk(2)
            assert float(best.values[0] - best.values[1]) > GAP_MIN, f"{name}: two tokens are nearly equal"
            tokens = torch.cat([tokens, best.indices[:1].unsqueeze(0)], dim=1)
    answer = tokens[0, PROMPT_TOKENS:].tolist()
    return Oracle(folder, tuple(prompt[0].tolist()), logits, tuple(answer))


def _randomise(model: PreTrainedModel, generator: torch.Generator) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 2:
                is_vocabulary = name.endswith(("embed_tokens.weight", "lm_head.weight"))
                deviation = 1.0 if is_vocabulary else 1.2 * parameter.shape[-1] ** -0.5
                parameter.normal_(0.0, deviation, generator=generator)
            elif name.endswith("bias"):
                parameter.normal_(0.0, 0.5, generator=generator)
            else:
                parameter.uniform_(0.5, 1.5, generator=generator)
