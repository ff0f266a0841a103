"""Eviction: which cached block goes first when room is needed.

An order is a key per candidate, smallest goes first, and a key depends on its own candidate alone. A
pool can therefore keep its candidates sorted and pay O(log n) per change: it computes a key when a block
becomes a candidate (a cached leaf that nobody is using) and drops it when the block stops being one; a
candidate's facts do not change in between. `evict` is the same decision over a whole set, for whoever
has no such structure. Who is a candidate (leaves only, unpinned only) is the pool's business.
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


@dataclass(frozen=True, slots=True)
class EvictionCandidate:
    """A block that may go, and what was seen of its use."""

    block_id: int
    used_at: int
    """When it was last used, on any clock that only rises."""
    uses: int
    """How many requests have used it, the one that made it included."""


EvictionKey: TypeAlias = tuple[int, ...]


def eviction_key(order: EvictionOrder, candidate: EvictionCandidate) -> EvictionKey:
    """Sorts candidates by who goes first; no two of different block ids are equal."""
    match order:
        case EvictionOrder.LRU:
            return (candidate.used_at, candidate.block_id)
        case EvictionOrder.LFU:
            return (candidate.uses, candidate.used_at, candidate.block_id)
        case _:
            assert_never(order)


def evict(order: EvictionOrder, candidates: Iterable[EvictionCandidate], blocks: int) -> tuple[int, ...]:
    """Ids of the first `blocks` candidates to go, in that order; all of them where there are fewer."""
    victims = nsmallest(blocks, candidates, key=lambda candidate: eviction_key(order, candidate))
    return tuple(victim.block_id for victim in victims)
