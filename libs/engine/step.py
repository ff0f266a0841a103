"""One step of the engine as data: what each sequence computes, checked and flattened. No torch here.

A step mixes prefill chunks and decodes freely: for the linear layers all new tokens are one list, for
attention every sequence is a span of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.errors import StepError
from policy.core import SamplingParams

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class SequenceStep:
    """One sequence's part in a step.

    `token_ids` are the new tokens to compute, at positions `context_tokens`, `context_tokens + 1`, …;
    the KV of everything before lies in the blocks of `block_ids`, in order, and the new KV is written
    there. Blocks that are written belong to this sequence alone; blocks of the context may be shared.
    """

    token_ids: tuple[int, ...]
    context_tokens: int
    block_ids: tuple[int, ...]
    """Long enough for context and new tokens; further blocks are not touched."""
    sampling: SamplingParams | None
    """None: no token is wanted, as after a middle chunk of a prompt."""
    output_tokens: int
    """Output tokens the sequence has so far: the position that the sampler draws for."""
    clear_block_ids: tuple[int, ...] = ()
    """Freshly given blocks, zeroed before use: unused slots of the last block are sent as zeros."""


@dataclass(frozen=True, slots=True)
class StepResult:
    token_ids: tuple[int | None, ...]
    """One entry a sequence, in the order given; None where no token was wanted."""
    elapsed_s: float


@dataclass(frozen=True, slots=True)
class StepLimits:
    """What a step may refer to."""

    blocks: int
    block_tokens: int
    context_tokens_max: int
    vocab_size: int


@dataclass(frozen=True, slots=True)
class Span:
    """One sequence's place in the flattened step: rows [start, start + tokens)."""

    start: int
    tokens: int
    context_tokens: int
    block_ids: Int64Array
    """Exactly the blocks that hold context and new tokens."""


@dataclass(frozen=True, slots=True)
class FlatStep:
    """A step as arrays; `N` is the number of new tokens over all sequences."""

    token_ids: Int64Array
    """[N]"""
    positions: Int64Array
    """[N]: place of each token in its sequence."""
    slots: Int64Array
    """[N]: block id · block_tokens + offset, where the token's KV goes."""
    spans: tuple[Span, ...]
    sampled_rows: Int64Array
    """Rows whose logits are wanted: the last of each sequence that samples."""
    clear_block_ids: Int64Array


def flatten(sequences: Sequence[SequenceStep], limits: StepLimits) -> FlatStep:
    """The step as arrays; raises StepError naming sequence and field where one is out of bounds."""
    if not sequences:
        raise StepError("a step needs at least one sequence")
    spans: list[Span] = []
    token_ids: list[int] = []
    positions: list[Int64Array] = []
    slots: list[Int64Array] = []
    cleared: list[int] = []
    for index, sequence in enumerate(sequences):
        _check(index, sequence, limits)
        tokens = len(sequence.token_ids)
        end = sequence.context_tokens + tokens
        used_blocks = -(-end // limits.block_tokens)
        block_ids = np.asarray(sequence.block_ids[:used_blocks], dtype=np.int64)
        position = np.arange(sequence.context_tokens, end, dtype=np.int64)
        block_index, offset = np.divmod(position, limits.block_tokens)
        spans.append(Span(len(token_ids), tokens, sequence.context_tokens, block_ids))
        token_ids.extend(sequence.token_ids)
        positions.append(position)
        slots.append(block_ids[block_index] * limits.block_tokens + offset)
        cleared.extend(sequence.clear_block_ids)
    sampled = [
        span.start + span.tokens - 1
        for span, sequence in zip(spans, sequences, strict=True)
        if sequence.sampling is not None
    ]
    return FlatStep(
        token_ids=np.asarray(token_ids, dtype=np.int64),
        positions=np.concatenate(positions),
        slots=np.concatenate(slots),
        spans=tuple(spans),
        sampled_rows=np.asarray(sampled, dtype=np.int64),
        clear_block_ids=np.asarray(cleared, dtype=np.int64),
    )


def _check(index: int, sequence: SequenceStep, limits: StepLimits) -> None:
    def fail(field: str, reason: str) -> StepError:
        return StepError(f"sequence {index}: {field}: {reason}")

    tokens = len(sequence.token_ids)
    if tokens == 0:
        raise fail("token_ids", "a sequence needs at least one new token")
    if sequence.context_tokens < 0:
        raise fail("context_tokens", f"must not be negative, not {sequence.context_tokens}")
    end = sequence.context_tokens + tokens
    if end > limits.context_tokens_max:
        raise fail("context_tokens", f"{end} tokens in all, over the model's {limits.context_tokens_max}")
    if end > len(sequence.block_ids) * limits.block_tokens:
        raise fail(
            "block_ids",
            f"{len(sequence.block_ids)} blocks of {limits.block_tokens} tokens do not hold {end} tokens",
        )
    if not 0 <= min(sequence.token_ids) <= max(sequence.token_ids) < limits.vocab_size:
        raise fail("token_ids", f"a token id is outside 0..{limits.vocab_size - 1}")
    for field, block_ids in (
        ("block_ids", sequence.block_ids),
        ("clear_block_ids", sequence.clear_block_ids),
    ):
        if block_ids and not 0 <= min(block_ids) <= max(block_ids) < limits.blocks:
            raise fail(field, f"a block id is outside 0..{limits.blocks - 1}")
    if sequence.output_tokens < 0:
        raise fail("output_tokens", f"must not be negative, not {sequence.output_tokens}")
