"""Eviction: which cached block goes first when room is needed.

An order is a key per candidate, smallest goes first, and a key depends on its own candidate alone. A
pool can therefore keep its candidates sorted and pay O(log n) per change: it computes a key when a block
becomes a candidate (a cached leaf that nobody is using) and drops it when the block stops being one; a
candidate's facts do not change in between. `evict` is the same decision over a whole set, for whoever
has no such structure. Who is a candidate (leaves only, unpinned only) is the pool's business.

A fixed key cannot know how old a block will be when room is needed. So the two orders that weigh something
against recency add a credit to the time of the last use: a block worth more counts as used that much later.
A credit is a share of the turnover, the time in which a pool's worth of blocks is brought in: at most
CREDIT_SHARE_MAX of it. Both bounds follow from that: what is worth most and is not used again goes a
share of a turnover later than under LRU, never later; and what is worth least is kept too, however much
comes in that is worth more. For where a share r of what comes in has credit s, and stays that much longer
than the rest, r (t + s) + (1 - r) t = 1 for the rest's time t in turnovers: t = 1 - r s, at least 1 - s.

No order ages frequencies (as LFU-DA does): that takes state of the whole pool beside a candidate's own facts.
Under LFU a block that goes takes its count with it.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from heapq import nsmallest
from typing import TypeAlias, assert_never

from policy.core import CostCoefficients


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
    """How tight a request's targets are; `slo_class` says it."""

    NONE = "none"
    RELAXED = "relaxed"
    TIGHT = "tight"


TIGHT_TTFT_MS_MAX = 2_000.0
TIGHT_TBT_MS_MAX = 50.0
"""A person who reads along sees a slower stream falter."""


def slo_class(ttft_ms_max: float | None, tbt_ms_max: float | None) -> SloClass:
    """The class of a request with these targets; None where it has none."""
    if ttft_ms_max is None and tbt_ms_max is None:
        return SloClass.NONE
    tight_ttft = ttft_ms_max is not None and ttft_ms_max <= TIGHT_TTFT_MS_MAX
    tight_tbt = tbt_ms_max is not None and tbt_ms_max <= TIGHT_TBT_MS_MAX
    return SloClass.TIGHT if tight_ttft or tight_tbt else SloClass.RELAXED


@dataclass(frozen=True, slots=True)
class BlockUse:
    """The request that used a block last, as it was then."""

    priority: int = 0
    """The more the more important, of any size."""
    slo: SloClass = SloClass.NONE
    remaining_tokens: int | None = None
    """How many tokens it could still put out; None where that is not known."""


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
"""Ends with the block's id."""
KeyFunction: TypeAlias = Callable[[EvictionCandidate], EvictionKey]


@dataclass(frozen=True, slots=True)
class EvictionScale:
    """What the credits of an order are measured by; both at least 1."""

    turnover: int = 4096
    """Ticks of the clock of `used_at` in which a pool's worth of blocks is brought in."""
    cost_doubles_at_blocks: int = 1408
    """At this depth a block costs twice what the first of a chain does. Here as for LLaMA2-70B and 16 tokens
    a block."""


DEFAULT_SCALE = EvictionScale()

NEVER_DOUBLES = 2**62
"""A depth in blocks, beyond any chain: for an instance whose cost does not grow with depth."""

LENGTH_SHARE = 0.25
"""For each time that a block costs the price of the first one more."""
LENGTH_SHARE_MAX = 0.5

PRIORITY_SHARE = 0.375
"""From the lowest to the highest priority."""
SLO_SHARE = 0.125
"""For the tightest class."""
NEARNESS_SHARE = 0.25
"""For a request that is all but finished."""
HALF_NEAR_TOKENS = 128
"""With so many left it gets half of that."""

CREDIT_SHARE_MAX = max(LENGTH_SHARE_MAX, PRIORITY_SHARE + SLO_SHARE + NEARNESS_SHARE)
"""Of the turnover: how much longer the most valuable block stays than the least valuable. Below 1."""


def key_function(order: EvictionOrder, scale: EvictionScale = DEFAULT_SCALE) -> KeyFunction:
    """What sorts candidates by who goes first; no two keys of different blocks are equal. O(1) each."""
    match order:
        case EvictionOrder.LRU:
            return _least_recent
        case EvictionOrder.LFU:
            return _least_often
        case EvictionOrder.LENGTH_AWARE:
            return lambda candidate: _credited(candidate, scale.turnover * _length_share(candidate, scale))
        case EvictionOrder.REQUEST_AWARE:
            return lambda candidate: _credited(candidate, scale.turnover * _request_share(candidate.use))
        case _:
            assert_never(order)


def evict(
    order: EvictionOrder,
    candidates: Iterable[EvictionCandidate],
    blocks: int,
    scale: EvictionScale = DEFAULT_SCALE,
) -> tuple[int, ...]:
    """Ids of the first `blocks` candidates to go, in that order; all of them where there are fewer."""
    victims = nsmallest(blocks, candidates, key=key_function(order, scale))
    return tuple(victim.block_id for victim in victims)


def cost_doubles_at_blocks(cost: CostCoefficients, block_tokens: int) -> int:
    """The depth at which a block takes twice the time of the first one: where attention to what lies before
    it costs as much as everything else in it. At least 1; NEVER_DOUBLES where pairs cost nothing."""
    if not cost.prefill_per_token_pair_s:
        return NEVER_DOUBLES
    tokens = cost.prefill_per_token_s / cost.prefill_per_token_pair_s
    return max(1, min(NEVER_DOUBLES, round(tokens / block_tokens)))


def _least_recent(candidate: EvictionCandidate) -> EvictionKey:
    return (candidate.used_at, candidate.block_id)


def _least_often(candidate: EvictionCandidate) -> EvictionKey:
    return (candidate.uses, candidate.used_at, candidate.block_id)


def _credited(candidate: EvictionCandidate, credit: float) -> EvictionKey:
    return (candidate.used_at + int(credit), candidate.used_at, candidate.block_id)


def _length_share(candidate: EvictionCandidate, scale: EvictionScale) -> float:
    """All blocks have the same size, so a byte of a deep one saves more: the cost model's time grows with
    the tokens before it. It is kept that much longer, as GreedyDual does for objects by their cost, but
    with a smaller share and a bound, found on the two traces: a full share keeps what nobody asks for."""
    return min(LENGTH_SHARE_MAX, LENGTH_SHARE * candidate.depth_blocks / scale.cost_doubles_at_blocks)


def _request_share(use: BlockUse) -> float:
    """Priority first, whatever its range: it approaches its share from 0 upwards. Few remaining tokens count
    because the request's next turn, or the request itself where it was preempted, comes the sooner."""
    share = PRIORITY_SHARE * (1 + use.priority / (1 + abs(use.priority))) / 2 + _slo_share(use.slo)
    if use.remaining_tokens is None:
        return share
    return share + NEARNESS_SHARE * HALF_NEAR_TOKENS / (HALF_NEAR_TOKENS + max(0, use.remaining_tokens))


def _slo_share(slo: SloClass) -> float:
    match slo:
        case SloClass.NONE:
            return 0.0
        case SloClass.RELAXED:
            return SLO_SHARE / 2
        case SloClass.TIGHT:
            return SLO_SHARE
        case _:
            assert_never(slo)
