"""Eviction: which cached block goes first when room is needed.

An order is a key per candidate, smallest goes first, and a key depends on its own candidate alone. A
pool can therefore keep its candidates sorted and pay O(log n) per change: it computes a key when a block
becomes a candidate (a cached leaf that nobody is using) and drops it when the block stops being one; a
candidate's facts do not change in between. `evict` is the same decision over a whole set, for whoever
has no such structure. Who is a candidate (leaves only, unpinned only) is the pool's business.

A fixed key cannot know how old a block will be when room is needed. The orders that weigh something
against recency therefore add a credit to the time of the last use: a block that is worth more counts as
used that much later. A credit is bounded by a share of `turnover`, the ticks of the pool's clock in which
a pool's worth of blocks is brought in. So whatever is worth least still outlives what is a turnover older,
and whatever is worth most goes at last where nobody uses it.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from heapq import nsmallest
from typing import TypeAlias, assert_never


class EvictionOrder(StrEnum):
    LRU = "lru"
    """Least recently used first."""

    LFU = "lfu"
    """Least often used first, among equals the least recently used."""

    LENGTH_AWARE = "length_aware"
    """Least recently used first, with a credit for what computing the block again would cost."""

    REQUEST_AWARE = "request_aware"
    """Least recently used first, with a credit for what the request that used it last is worth."""


class SloClass(StrEnum):
    """How tight a request's targets are; see `slo_class`."""

    NONE = "none"
    RELAXED = "relaxed"
    TIGHT = "tight"


@dataclass(frozen=True, slots=True)
class BlockUse:
    """The request that used a block last."""

    priority: int = 0
    slo: SloClass = SloClass.NONE
    remaining_tokens: int | None = None
    """How many more it might have put out then; None where that is not known."""


UNKNOWN_USE = BlockUse()


@dataclass(frozen=True, slots=True)
class EvictionCandidate:
    """A block that may go, and what was seen of its use."""

    block_id: int
    used_at: int
    """When it was last used, on any clock that only rises."""
    uses: int
    """How many requests have used it, the one that made it included."""
    depth_blocks: int = 0
    """Blocks before it in its chain."""
    use: BlockUse = UNKNOWN_USE


EvictionKey: TypeAlias = tuple[int, ...]

TURNOVER_DEFAULT = 4096

PAIRS_DOUBLE_AT_BLOCKS = 1408
"""Depth at which the attention to what lies before a block costs as much as all else in it."""
LENGTH_CREDIT_SHARE = 0.5
"""Of the turnover, for a block that costs twice what the first of a chain does; more is not given."""

PRIORITY_MAX = 4
"""A priority beyond it, and below its negative, counts as that much."""
REMAINING_TOKENS_NEAR = 256
"""With so many left, a request gets half the credit of one that is all but finished."""
PRIORITY_CREDIT_SHARE = 0.5
SLO_CREDIT_SHARE = {SloClass.NONE: 0.0, SloClass.RELAXED: 0.125, SloClass.TIGHT: 0.25}
NEARNESS_CREDIT_SHARE = 0.25


def eviction_key(
    order: EvictionOrder, candidate: EvictionCandidate, turnover: int = TURNOVER_DEFAULT
) -> EvictionKey:
    """Sorts candidates by who goes first; no two of different block ids are equal.

    `turnover`: ticks of the clock of `used_at` in which about as many blocks are brought in as the pool has.
    """
    match order:
        case EvictionOrder.LRU:
            return (candidate.used_at, candidate.block_id)
        case EvictionOrder.LFU:
            return (candidate.uses, candidate.used_at, candidate.block_id)
        case EvictionOrder.LENGTH_AWARE:
            credit = int(turnover * length_credit_share(candidate.depth_blocks))
            return (candidate.used_at + credit, candidate.used_at, candidate.block_id)
        case EvictionOrder.REQUEST_AWARE:
            credit = int(turnover * request_credit_share(candidate.use))
            return (candidate.used_at + credit, candidate.used_at, candidate.block_id)
        case _:
            assert_never(order)


def length_credit_share(depth_blocks: int) -> float:
    """0 … LENGTH_CREDIT_SHARE of a turnover: by what the block costs more than the first of its chain."""
    return LENGTH_CREDIT_SHARE * min(1.0, depth_blocks / PAIRS_DOUBLE_AT_BLOCKS)


def request_credit_share(use: BlockUse) -> float:
    """-0.5 … 1 of a turnover: priority for the greater part, then the SLO class, then how near its end is."""
    priority = max(-PRIORITY_MAX, min(PRIORITY_MAX, use.priority)) / PRIORITY_MAX
    nearness = (
        0.0
        if use.remaining_tokens is None
        else REMAINING_TOKENS_NEAR / (REMAINING_TOKENS_NEAR + max(0, use.remaining_tokens))
    )
    return PRIORITY_CREDIT_SHARE * priority + SLO_CREDIT_SHARE[use.slo] + NEARNESS_CREDIT_SHARE * nearness


def evict(
    order: EvictionOrder,
    candidates: Iterable[EvictionCandidate],
    blocks: int,
    turnover: int = TURNOVER_DEFAULT,
) -> tuple[int, ...]:
    """Ids of the first `blocks` candidates to go, in that order; all of them where there are fewer."""
    victims = nsmallest(blocks, candidates, key=lambda candidate: eviction_key(order, candidate, turnover))
    return tuple(victim.block_id for victim in victims)
