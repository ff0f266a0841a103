"""Continuous batching: which sequences an engine's next step computes, and how much of each.

Owns the choice, not the sequences: block tables, tokens and waiting queues are the worker's. The same plan
serves an engine that only prefills, one that only decodes, and one that does both (coupled).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from policy.core import RequestId

PREFILL_WAIT_STEPS_MAX = 16
"""Where decodes fill every step, the oldest prefill gets a place in one step after so many."""


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
    """`new_tokens` still to compute, at least 1; the blocks for them are allocated.

    `waited_steps`: how many steps there were since it came, or since it was last in one.
    """

    request_id: RequestId
    new_tokens: int
    waited_steps: int = 0


@dataclass(frozen=True, slots=True)
class DecodeWork:
    """A sequence that has its prompt behind it. `new_tokens` is 1, or more where tokens were forced.

    `blocks_needed`: blocks to allocate before all of them can be written, copies of shared blocks included.
    `turn`: its place among all parts of all steps so far, when it was last in one.
    """

    request_id: RequestId
    blocks_needed: int = 0
    new_tokens: int = 1
    turn: int = 0


@dataclass(frozen=True, slots=True)
class StepPart:
    """`tokens` of a sequence's new tokens, from the first on."""

    request_id: RequestId
    tokens: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Parts in the order in which they take their turns. `preempted`, the latest arrival first, give their
    blocks back before the decodes get theirs: as many as that takes at most. Who plans again after the first
    may find that it was enough."""

    decodes: tuple[StepPart, ...]
    prefills: tuple[StepPart, ...]
    preempted: tuple[RequestId, ...]


def plan_step(
    waiting: Sequence[PrefillWork], running: Sequence[DecodeWork], free_blocks: int, limits: StepLimits
) -> StepPlan:
    """All running decodes first, prefill chunks in what is left of the limits; both given in arrival order.

    `free_blocks` counts evictable ones. Where they do not suffice, the latest arrivals among `running`
    are preempted. Each of them closes the gap by at least one block: either it needed one itself, or
    its last block is partial and its own. A lone sequence too large for the pool is preempted too:
    whoever admits requests keeps such a one out.

    Where more decodes run than a step takes, those go whose turn was longest ago: of `r` with `l` places each
    is in one of any ceil(r / l) steps. A prefill that waited PREFILL_WAIT_STEPS_MAX takes one place of one
    step from them.
    """
    kept = _kept(running, free_blocks)
    decodes = _decodes(running[:kept], waiting, limits)
    tokens = limits.tokens_max - sum(part.tokens for part in decodes)
    return StepPlan(
        decodes=decodes,
        prefills=_fill(waiting, tokens, limits.requests_max - len(decodes)),
        preempted=tuple(work.request_id for work in reversed(running[kept:])),
    )


def _kept(running: Sequence[DecodeWork], free_blocks: int) -> int:
    """How many of the earliest arrivals keep their blocks."""
    gap_blocks = sum(work.blocks_needed for work in running) - free_blocks
    kept = len(running)
    while gap_blocks > 0 and kept:
        kept -= 1
        gap_blocks -= max(1, running[kept].blocks_needed)
    return kept


def _decodes(
    running: Sequence[DecodeWork], waiting: Sequence[PrefillWork], limits: StepLimits
) -> tuple[StepPart, ...]:
    """One token for each that has a place, then the forced ones of those that come first."""
    left_to_prefill = 1 if waiting and waiting[0].waited_steps >= PREFILL_WAIT_STEPS_MAX else 0
    places = min(limits.tokens_max, limits.requests_max) - left_to_prefill
    chosen = sorted(running, key=lambda work: work.turn)[:places]
    spare_tokens = limits.tokens_max - left_to_prefill - len(chosen)
    parts: list[StepPart] = []
    for work in chosen:
        tokens = min(work.new_tokens, 1 + spare_tokens)
        spare_tokens -= tokens - 1
        parts.append(StepPart(work.request_id, tokens))
    return tuple(parts)


def _fill(waiting: Sequence[PrefillWork], tokens: int, requests: int) -> tuple[StepPart, ...]:
    chunks: list[StepPart] = []
    for work in waiting[: max(0, requests)]:
        if tokens <= 0:
            break
        chunk = StepPart(work.request_id, min(work.new_tokens, tokens))
        chunks.append(chunk)
        tokens -= chunk.tokens
    return tuple(chunks)
