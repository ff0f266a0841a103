"""Continuous batching: which sequences an engine's next step computes, and how much of each.

Owns the choice, not the sequences: block tables, tokens and waiting queues are the worker's.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from policy.core import RequestId


@dataclass(frozen=True, slots=True)
class StepLimits:
    """`tokens_max` new tokens and `requests_max` sequences at most in one step, both at least 1."""

    tokens_max: int
    requests_max: int

    def __post_init__(self) -> None:
        if self.tokens_max < 1 or self.requests_max < 1:
            raise ValueError(f"tokens_max and requests_max must be at least 1, not {self}")


@dataclass(frozen=True, slots=True)
class PrefillWork:
    """`new_tokens` still to compute, at least 1; the blocks for them are allocated."""

    request_id: RequestId
    new_tokens: int


@dataclass(frozen=True, slots=True)
class DecodeWork:
    """`needs_block`: the sequence's next token starts a new block."""

    request_id: RequestId
    needs_block: bool


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    request_id: RequestId
    tokens: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """`preempted`, the latest arrival first, give their blocks back before the decodes get theirs."""

    decodes: tuple[RequestId, ...]
    prefills: tuple[PrefillChunk, ...]
    preempted: tuple[RequestId, ...]


def plan_step(
    waiting: Sequence[PrefillWork], running: Sequence[DecodeWork], free_blocks: int, limits: StepLimits
) -> StepPlan:
    """All running decodes first, prefill chunks in what is left of the limits; both in arrival order.

    `free_blocks` counts evictable ones. Where they do not suffice, the latest arrivals among `running`
    are preempted. Each of them closes the gap by at least one block: either it needed one itself, or
    its last block is partial and hence its own. A lone sequence too large for the pool is preempted
    too: whoever admits requests keeps such a one out.
    """
    gap_blocks = sum(work.needs_block for work in running) - free_blocks
    kept = len(running) - max(0, min(gap_blocks, len(running)))
    decodes = running[: min(kept, limits.tokens_max, limits.requests_max)]
    return StepPlan(
        decodes=tuple(work.request_id for work in decodes),
        prefills=_fill(waiting, limits.tokens_max - len(decodes), limits.requests_max - len(decodes)),
        preempted=tuple(work.request_id for work in reversed(running[kept:])),
    )


def _fill(waiting: Sequence[PrefillWork], tokens: int, requests: int) -> tuple[PrefillChunk, ...]:
    chunks: list[PrefillChunk] = []
    for work in waiting[: max(0, requests)]:
        if tokens <= 0:
            break
        chunk = PrefillChunk(work.request_id, min(work.new_tokens, tokens))
        chunks.append(chunk)
        tokens -= chunk.tokens
    return tuple(chunks)
