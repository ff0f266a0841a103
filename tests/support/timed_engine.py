"""An engine that takes the time a cost model says, waiting instead of computing.

Its "KV" are the tokens themselves, in the arena, in each layer of each block: what it says next is a digest
of what it reads there, so a block that was moved, shared or given away wrongly changes an answer or fails
its step. It holds an answer to no form and knows no logprobs.
"""

import time
from collections.abc import Callable, Sequence
from zlib import crc32

import numpy as np
import numpy.typing as npt

from engine.errors import StepError
from engine.layout import KVLayout
from engine.step import FlatStep, SequenceStep, StepLimits, StepResult, flatten
from policy.core import CostCoefficients
from policy.cost import step_s
from policy.preempt import HostCopyCost

FIRST_TOKEN_ID, LAST_TOKEN_ID = 300, 499
"""What it says: no special token, no single byte of the tiny model's vocabulary."""
COPY_COST = HostCopyCost(fixed_s=1e-4, bytes_per_s=1e10)
TOKEN_BYTES = 4

Blocks = npt.NDArray[np.int32]


class TimedEngine:
    """Stands in for `engine.engine.Engine`: on the arena itself, of `layout`, with `blocks` blocks."""

    computes_on_arena = True

    def __init__(
        self,
        layout: KVLayout,
        arena_buffer: memoryview,
        blocks: int,
        cost: CostCoefficients,
        *,
        vocab_size: int,
        context_tokens_max: int,
        swap_slots: int = 0,
    ) -> None:
        words = layout.layer_bytes // TOKEN_BYTES
        if words < layout.block_tokens:
            raise ValueError(f"a layer of {layout.layer_bytes} bytes does not hold a block's tokens")
        self._blocks: Blocks = np.frombuffer(
            arena_buffer, np.int32, blocks * layout.block_bytes // TOKEN_BYTES
        ).reshape(blocks, layout.layers, words)
        self._swapped = np.zeros((swap_slots, *self._blocks.shape[1:]), np.int32)
        self._layout = layout
        self._cost = cost
        self._limits = StepLimits(blocks, layout.block_tokens, context_tokens_max, vocab_size)

    def run(
        self, sequences: Sequence[SequenceStep], on_layer: Callable[[int], None] | None = None
    ) -> StepResult:
        """One step, done when its time is over; each layer a share of it."""
        started_s = time.monotonic()
        step = flatten(sequences, self._limits)
        takes_s = timed_step_s(self._cost, sequences)
        self._blocks[step.copy_blocks[:, 1]] = self._blocks[step.copy_blocks[:, 0]]
        self._blocks[step.clear_block_ids] = 0
        for layer in range(self._layout.layers):
            self._write(step, layer)
            if on_layer is not None:
                _wait_until(started_s + takes_s * (layer + 1) / self._layout.layers)
                on_layer(layer)
        token_ids = tuple(self._sampled(sequence) for sequence in sequences)
        _wait_until(started_s + takes_s)
        nothing = (None,) * len(sequences)
        return StepResult(token_ids, time.monotonic() - started_s, nothing, nothing)

    def profile(
        self, block_ids: Sequence[int], *, transfer_fixed_s: float, transfer_bytes_per_s: float
    ) -> CostCoefficients:
        """What it was made with, but for the transfer's two; nothing is measured."""
        cost = self._cost
        return CostCoefficients(
            cost.prefill_fixed_s,
            cost.prefill_per_token_s,
            cost.prefill_per_token_pair_s,
            cost.step_fixed_s,
            cost.step_per_request_s,
            cost.step_per_kv_token_s,
            transfer_fixed_s,
            transfer_bytes_per_s,
        )

    def load_blocks(self, block_ids: Sequence[int]) -> None:
        """Nothing to do: it computes on the arena."""

    def swap_out(self, block_ids: Sequence[int], slots: Sequence[int]) -> None:
        self._swapped[list(slots)] = self._blocks[list(block_ids)]

    def swap_in(self, slots: Sequence[int], block_ids: Sequence[int]) -> None:
        self._blocks[list(block_ids)] = self._swapped[list(slots)]

    def measure_swap(self, block_ids: Sequence[int]) -> HostCopyCost:
        return COPY_COST

    def _write(self, step: FlatStep, layer: int) -> None:
        blocks, offsets = np.divmod(step.slots, self._layout.block_tokens)
        self._blocks[blocks, layer, offsets] = step.token_ids

    def _sampled(self, sequence: SequenceStep) -> int | None:
        if sequence.sampling is None:
            return None
        tokens = sequence.context_tokens + len(sequence.token_ids)
        blocks = list(sequence.block_ids[: -(-tokens // self._layout.block_tokens)])
        layers = self._blocks[blocks, :, : self._layout.block_tokens]
        read = layers.transpose(1, 0, 2).reshape(self._layout.layers, -1)[:, :tokens]
        if (read != read[0]).any():
            raise StepError("a layer holds other tokens than the first")
        return next_token(read[0], sequence.sample)


def next_token(token_ids: Sequence[int] | Blocks, sample: int) -> int:
    """What it says after these."""
    digest = crc32(np.asarray([sample, *token_ids], "<i4").tobytes())
    return FIRST_TOKEN_ID + digest % (LAST_TOKEN_ID - FIRST_TOKEN_ID + 1)


def timed_answer(prompt: Sequence[int], tokens: int, sample: int = 0) -> list[int]:
    """What it answers to a prompt, wherever it is computed."""
    token_ids = list(prompt)
    for _ in range(tokens):
        token_ids.append(next_token(token_ids, sample))
    return token_ids[len(prompt) :]


def timed_step_s(cost: CostCoefficients, sequences: Sequence[SequenceStep]) -> float:
    """Prefill chunks share one fixed part, decodes another."""
    chunks = [sequence for sequence in sequences if len(sequence.token_ids) > 1]
    decodes = [sequence for sequence in sequences if len(sequence.token_ids) == 1]
    takes_s = 0.0
    if chunks:
        new = sum(len(chunk.token_ids) for chunk in chunks)
        pairs = sum(
            len(chunk.token_ids) * (chunk.context_tokens + len(chunk.token_ids) / 2) for chunk in chunks
        )
        takes_s += (
            cost.prefill_fixed_s + cost.prefill_per_token_s * new + cost.prefill_per_token_pair_s * pairs
        )
    if decodes:
        takes_s += step_s(cost, len(decodes), sum(decode.context_tokens + 1 for decode in decodes))
    return takes_s


def _wait_until(at_s: float) -> None:
    """The engine's own thread has nothing else to do."""
    left_s = at_s - time.monotonic()
    if left_s > 0:
        time.sleep(left_s)
