"""A model of Llama 8B's shape with random weights on the GPU, run as the engine runs one."""

import random
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from engine.decode_graphs import DecodeGraphs, Recorder
from engine.draw import Draw, DrawParameters
from engine.families.decoder import DecoderModel
from engine.families.layer_weights import build_layer
from engine.families.llama import build_attention
from engine.layout import KVLayout
from engine.model_families import Family
from engine.model_folder import ModelConfig
from engine.ops import Ops, StepTensors
from engine.paged_cache import PagedCache, to_tensors
from engine.step import SequenceStep, StepLimits, flatten
from engine.tensor_shapes import EMBEDDING, FINAL_NORM, HEAD, layer_prefix, tensor_shapes
from moonpool.benchmarks.attention import BLOCK_TOKENS, DTYPE_BYTES, HEAD_DIM, HEADS, KV_HEADS, ModelCase

DTYPE = torch.bfloat16
WEIGHT_DEVIATION = 0.02
SEED = 1
LLAMA_8B = ModelConfig(
    name="llama-8b-shaped",
    family=Family.LLAMA,
    layers=32,
    hidden_size=4096,
    intermediate_size=14_336,
    heads=HEADS,
    kv_heads=KV_HEADS,
    head_dim=HEAD_DIM,
    vocab_size=128_256,
    context_tokens_max=131_072,
    norm_epsilon=1e-5,
    rope_theta=500_000.0,
    rope_scaling=None,
    windows=(None,) * 32,
    tie_word_embeddings=False,
    eos_token_ids=(),
    dtype="bfloat16",
)


class ModelUnderTest:
    """Greedy; every sequence has its own blocks, with the context's keys and values at random."""

    def __init__(
        self, config: ModelConfig, ops: Ops, recorder: Recorder, *, sequences_max: int, tokens_max: int
    ) -> None:
        self._config = config
        self._ops = ops
        layout = KVLayout.of(config, block_tokens=BLOCK_TOKENS, dtype_name="bfloat16")
        self._token_bytes = layout.token_bytes
        self._sequence_blocks = -(-tokens_max // BLOCK_TOKENS)
        blocks = sequences_max * self._sequence_blocks
        with torch.inference_mode():
            self._model = random_model(config, ops)
            memory = torch.randn(blocks * layout.block_bytes // DTYPE_BYTES, dtype=DTYPE, device=ops.device)
            self._cache = PagedCache(layout, memory)
        self._limits = StepLimits(blocks, BLOCK_TOKENS, config.context_tokens_max, config.vocab_size)
        self._graphs = DecodeGraphs(
            self._logits,
            recorder,
            ops.device,
            blocks_max=self._sequence_blocks,
            vocab_size=config.vocab_size,
        )
        self._table = random.Random(SEED).sample(range(blocks), blocks)

    def rates(self, case: ModelCase, repeats: int) -> list[float]:
        """Tokens a second, of the prompt or of all sequences' outputs, by the clock on the wall.

        Each step ends with its tokens on the CPU, so that nothing is left on the GPU's queue.
        """
        with torch.inference_mode():
            if not case.decode_steps:
                return [case.context / self._prefill_s(case.context) for _ in range(1 + repeats)][1:]
            token_ids, context, rates = [1] * case.sequences, case.context, []
            for _ in range(1 + repeats):
                started_s = time.perf_counter()
                for _ in range(case.decode_steps):
                    token_ids = self._decode(token_ids, context)
                    context += 1
                rates.append(case.sequences * case.decode_steps / (time.perf_counter() - started_s))
            return rates[1:]  # the first one records the graph

    def step_bytes(self, case: ModelCase) -> int:
        """What a decode step reads at least: every weight once, and each sequence's context."""
        shapes = tensor_shapes(self._config)
        del shapes[EMBEDDING]  # one row a sequence: nothing beside the rest
        weights = sum(torch.Size(shape).numel() for shape in shapes.values())
        return DTYPE_BYTES * weights + case.sequences * case.context * self._token_bytes

    def _prefill_s(self, tokens: int) -> float:
        prompt = tuple(random.Random(SEED).choices(range(self._config.vocab_size), k=tokens))
        started_s = time.perf_counter()
        step = to_tensors(
            flatten([SequenceStep(prompt, 0, self._blocks(0), None, 0)], self._limits), self._ops.device
        )
        only = torch.tensor([0], device=self._ops.device)
        hidden = self._model.forward(self._model.embed(step.token_ids), step, self._cache, last_of=only)
        self._draw(self._model.logits(hidden))
        return time.perf_counter() - started_s

    def _decode(self, token_ids: Sequence[int], context: int) -> list[int]:
        steps = [
            SequenceStep((token_id,), context, self._blocks(index), None, 0)
            for index, token_id in enumerate(token_ids)
        ]
        step = to_tensors(flatten(steps, self._limits), self._ops.device)
        return self._draw(self._graphs.run(step))

    def _draw(self, logits: Tensor) -> list[int]:
        parameters = DrawParameters.of([Draw()] * logits.shape[0], self._ops.device)
        drawn: list[int] = self._ops.draw(logits, parameters).tolist()
        return drawn

    def _logits(self, step: StepTensors) -> Tensor:
        hidden = self._model.forward(self._model.embed(step.token_ids), step, self._cache)
        return self._model.logits(hidden)

    def _blocks(self, index: int) -> tuple[int, ...]:
        start = index * self._sequence_blocks
        return tuple(self._table[start : start + self._sequence_blocks])


def random_model(config: ModelConfig, ops: Ops) -> DecoderModel:
    """All weights normal with a small deviation, made where they are used; norms around one."""
    shapes = tensor_shapes(config)

    def take(name: str) -> Tensor:
        weight = torch.empty(shapes[name], dtype=DTYPE, device=ops.device).normal_(0.0, WEIGHT_DEVIATION)
        return weight.add_(1.0) if weight.dim() == 1 else weight

    layers = []
    for layer in range(config.layers):
        prefix = layer_prefix(layer)

        def take_of_layer(name: str, prefix: str = prefix) -> Tensor:
            return take(prefix + name)

        attention = build_attention(take_of_layer, ops, config, layer)
        layers.append(build_layer(take_of_layer, ops, attention))
    return DecoderModel(
        config,
        ops,
        range(config.layers),
        layers,
        embedding=take(EMBEDDING),
        final_norm=take(FINAL_NORM),
        head=ops.pack([take(HEAD)]),
    )
