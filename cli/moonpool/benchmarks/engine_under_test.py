"""The engine as benchmarks drive it: no pool, no scheduler, an arena of its own and fixed block tables.

Every sequence has its own blocks, so that no two share what the processor's caches hold.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.backend import Backend, choose_ops
from engine.engine import Engine
from engine.layout import KVLayout
from engine.loader import load_model
from engine.model_folder import ModelConfig
from engine.native.packing import WeightDtype
from engine.step import SequenceStep
from engine.tensor_shapes import EMBEDDING, tensor_shapes
from kvpool.arena import Arena
from moonpool.run_folder import moonpool_home
from policy.core import SamplingParams

GREEDY = SamplingParams(output_tokens_max=1_000_000)
"""Without stop tokens: a benchmark's sequences end when it has seen enough."""


@dataclass(slots=True)
class _Sequence:
    block_ids: tuple[int, ...]
    context_tokens: int
    last_token_id: int


class EngineUnderTest:
    """Prefill of one prompt, and decode of a batch that was started; greedy, in float32."""

    def __init__(
        self,
        folder: Path,
        *,
        threads: int,
        backend: str | None,
        sequences_max: int,
        tokens_max: int,
        weight_dtype: WeightDtype = WeightDtype.FLOAT32,
    ) -> None:
        self.config = ModelConfig.load(folder)
        self.layout = KVLayout.of(self.config)
        self._sequence_blocks = -(-tokens_max // self.layout.block_tokens)
        blocks = sequences_max * self._sequence_blocks
        self._arena = Arena.create(blocks, self.layout.block_bytes)
        chosen = choose_ops(
            Backend(backend or Backend.AUTO),
            self.layout.dtype_name,
            moonpool_home() / "kernels",
            weight_dtype,
        )
        model = load_model(folder, chosen.ops)
        self._engine = Engine(model, self.layout, self._arena.buffer, blocks, threads=threads)
        self.backend = chosen.backend
        self._sequences: list[_Sequence] = []

    def prefill(self, prompt: Sequence[int]) -> int:
        """The first output token of a prompt; one step. Forgets the sequences that were started."""
        return self.start([prompt])[0]

    def start(self, prompts: Sequence[Sequence[int]]) -> list[int]:
        """Computes the prompts one after the other; returns the first output token of each."""
        self._sequences = []
        for index, prompt in enumerate(prompts):
            block_ids = self._block_ids(index)
            (token_id,) = self._run([SequenceStep(tuple(prompt), 0, block_ids, GREEDY, 0)])
            self._sequences.append(_Sequence(block_ids, len(prompt), token_id))
        return [sequence.last_token_id for sequence in self._sequences]

    def start_copies(self, prompt: Sequence[int], sequences: int) -> None:
        """As `start` with the same prompt for all, computed once and copied."""
        (token_id,) = self.start([prompt])
        first = self._sequences[0].block_ids
        for index in range(1, sequences):
            block_ids = self._block_ids(index)
            for source, destination in zip(first, block_ids, strict=True):
                self._arena.block(destination)[:] = self._arena.block(source)
            self._sequences.append(_Sequence(block_ids, len(prompt), token_id))

    def decode_step(self) -> list[int]:
        """The next token of every sequence that was started."""
        token_ids = self._run(
            [
                SequenceStep((s.last_token_id,), s.context_tokens, s.block_ids, GREEDY, 1)
                for s in self._sequences
            ]
        )
        for sequence, token_id in zip(self._sequences, token_ids, strict=True):
            sequence.context_tokens += 1
            sequence.last_token_id = token_id
        return token_ids

    def rewind(self, tokens: int) -> None:
        """Forgets the KV of the last `tokens` tokens of every sequence; the next tokens will be others."""
        for sequence in self._sequences:
            sequence.context_tokens -= tokens

    def _block_ids(self, index: int) -> tuple[int, ...]:
        start = index * self._sequence_blocks
        return tuple(range(start, start + self._sequence_blocks))

    def _run(self, steps: Sequence[SequenceStep]) -> list[int]:
        token_ids = self._engine.run(steps).token_ids
        return [token_id for token_id in token_ids if token_id is not None]


def decode_bytes(config: ModelConfig, sequences: int, context_tokens: int) -> int:
    """What a decode step reads at least: every weight once, and each sequence's KV; float32."""
    shapes = tensor_shapes(config)
    if not config.tie_word_embeddings:
        del shapes[EMBEDDING]  # one row a sequence: nothing beside the rest
    numbers = sum(math.prod(shape) for shape in shapes.values())
    return 4 * numbers + sequences * context_tokens * KVLayout.of(config).token_bytes
