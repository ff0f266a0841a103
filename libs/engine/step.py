"""One step of the engine as data: what each sequence computes, checked and flattened. No torch here.

A step mixes prefill chunks and decodes freely: for the linear layers all new tokens are one list, for
attention every sequence is a span of it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.errors import StepError
from policy.core import SamplingParams, TokenLogprobs
from structures.masks import TokenMask

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
TokenIds = Int32Array | tuple[int, ...]


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
    copy_blocks: tuple[tuple[int, int], ...] = ()
    """(from, to) of whole blocks: copy-on-write. All are read before any is written or cleared."""
    sample: int = 0
    """Which of the request's samples this is: each draws its own random numbers."""
    prompt_token_ids: TokenIds = ()
    """With `output_token_ids` all tokens so far; wanted only where `sampling.needs_history`."""
    output_token_ids: TokenIds = ()
    allowed: Callable[[], TokenMask] | None = None
    """Says which tokens may come next; None: all of them. It is called once, on the engine's thread, when
    the forward pass is under way."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """One entry a sequence in each tuple, in the order given."""

    token_ids: tuple[int | None, ...]
    """None where no token was wanted, or the sequence failed."""
    elapsed_s: float
    logprobs: tuple[TokenLogprobs | None, ...]
    """None where none were wanted."""
    failures: tuple[str | None, ...]
    """Why a sequence alone came to nothing in a step that did its work; None where all is well."""


@dataclass(frozen=True, slots=True)
class StepLimits:
    """What a step may refer to."""

    blocks: int
    block_tokens: int
    context_tokens_max: int
    vocab_size: int


@dataclass(frozen=True, slots=True)
class FlatStep:
    """A step as arrays, N new tokens of S sequences; the sequences with a single new token come first."""

    token_ids: Int64Array
    """[N]"""
    positions: Int64Array
    """[N]: place of each token in its sequence."""
    slots: Int64Array
    """[N]: block id · block_tokens + offset, where the token's KV goes."""
    query_starts: Int32Array
    """[S + 1]: rows of each sequence."""
    kv_tokens: Int32Array
    """[S]: context and new tokens."""
    block_table: Int32Array
    """[S, most blocks of one sequence]: exactly the blocks that hold context and new tokens, then 0."""
    decodes: int
    """How many sequences have a single new token."""
    sampling: Int64Array
    """Numbers of the sequences whose last token samples, in the order given."""
    clear_block_ids: Int64Array
    copy_blocks: Int64Array
    """[copies, 2]: from and to."""

    def written_blocks(self, block_tokens: int) -> Int64Array:
        """The blocks that get new KV, each once."""
        return np.unique(self.slots // block_tokens)

    def full_blocks(self, block_tokens: int) -> Int64Array:
        """The blocks whose last slot is filled."""
        blocks, offsets = np.divmod(self.slots, block_tokens)
        full: Int64Array = blocks[offsets == block_tokens - 1]
        return full


def flatten(sequences: Sequence[SequenceStep], limits: StepLimits) -> FlatStep:
    """The step as arrays; raises StepError naming sequence and field where one is out of bounds."""
    if not sequences:
        raise StepError("a step needs at least one sequence")
    for index, sequence in enumerate(sequences):
        _check(index, sequence, limits)
    order = sorted(range(len(sequences)), key=lambda index: len(sequences[index].token_ids) > 1)
    ordered = [sequences[index] for index in order]
    new_tokens = np.fromiter((len(s.token_ids) for s in ordered), np.int32, len(ordered))
    query_starts = np.zeros(len(ordered) + 1, np.int32)
    np.cumsum(new_tokens, out=query_starts[1:])
    kv_tokens = np.fromiter((s.context_tokens for s in ordered), np.int32, len(ordered)) + new_tokens
    used_blocks = -(-kv_tokens // limits.block_tokens)
    block_table = np.zeros((len(ordered), int(used_blocks.max())), np.int32)
    for row, (sequence, blocks) in enumerate(zip(ordered, used_blocks.tolist(), strict=True)):
        block_table[row, :blocks] = sequence.block_ids[:blocks]
    row_of_token = np.repeat(np.arange(len(ordered)), new_tokens)
    first_positions = (kv_tokens - new_tokens).astype(np.int64)
    positions = np.arange(int(query_starts[-1])) + (first_positions - query_starts[:-1])[row_of_token]
    block_index, offset = np.divmod(positions, limits.block_tokens)
    numbers = np.empty(len(ordered), np.int64)
    numbers[order] = np.arange(len(ordered))
    return FlatStep(
        token_ids=np.fromiter((t for s in ordered for t in s.token_ids), np.int64, len(positions)),
        positions=positions,
        slots=block_table[row_of_token, block_index] * np.int64(limits.block_tokens) + offset,
        query_starts=query_starts,
        kv_tokens=kv_tokens,
        block_table=block_table,
        decodes=int((new_tokens == 1).sum()),
        sampling=numbers[[s.sampling is not None for s in sequences]],
        clear_block_ids=np.asarray([block for s in ordered for block in s.clear_block_ids], np.int64),
        copy_blocks=np.asarray([copy for s in ordered for copy in s.copy_blocks], np.int64).reshape(-1, 2),
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
        ("copy_blocks", tuple(block_id for copy in sequence.copy_blocks for block_id in copy)),
    ):
        if block_ids and not 0 <= min(block_ids) <= max(block_ids) < limits.blocks:
            raise fail(field, f"a block id is outside 0..{limits.blocks - 1}")
    if sequence.output_tokens < 0:
        raise fail("output_tokens", f"must not be negative, not {sequence.output_tokens}")
    if sequence.sampling is not None and sequence.sampling.needs_history:
        for field, history in (
            ("prompt_token_ids", np.asarray(sequence.prompt_token_ids)),
            ("output_token_ids", np.asarray(sequence.output_token_ids)),
        ):
            if history.size and not 0 <= history.min() <= history.max() < limits.vocab_size:
                raise fail(field, f"a token id is outside 0..{limits.vocab_size - 1}")
