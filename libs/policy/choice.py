"""How one of several nearly equal candidates is chosen, and the settings of a placement."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from heapq import nsmallest
from typing import TypeVar

import xxhash

from kvindex.core import InstanceId
from policy.core import RequestId
from policy.view import ClusterView, InstanceView

CandidateT = TypeVar("CandidateT")


class Strategy(StrEnum):
    """How instances are chosen: see `policy.strategies`."""

    RANDOM = "random"
    LOAD_BALANCE = "load_balance"
    CACHE_AWARE = "cache_aware"
    KVCACHE_CENTRIC = "kvcache_centric"
    JOINT = "joint"


class AdmissionMode(StrEnum):
    """What is turned away before any work is done for it: see `policy.admit`."""

    NONE = "none"
    SNAPSHOT = "snapshot"
    PREDICTIVE = "predictive"


@dataclass(frozen=True, slots=True)
class PlacementLimits:
    """Settings, bounds and tolerances of a placement.

    Predictions within `tie_fraction` or `tie_s` of the best are equals: profiles are noisy, and equals
    share the load. Instances silent for `silence_s_max` are used only where no other serves.
    """

    strategy: Strategy = Strategy.JOINT
    admission: AdmissionMode = AdmissionMode.PREDICTIVE
    kvcache_balancing_threshold: float = 2.0
    """kvcache_centric: another's prefix is considered where it is this many times as long as the own one."""
    kvcache_local_share_min: float = 1.0
    """kvcache_centric: an own prefix of at least this share of the prompt is used without looking further."""
    ttft_ms_default: float | None = None
    tbt_ms_default: float | None = None
    """The cluster's targets, for requests that name none; None: no target."""
    target_share: float = 1.0
    """Predictions are held to this share of the targets. Admitted up to the target itself, requests would
    miss it wherever something takes a little longer than predicted: half of them, under overload."""
    decode_horizon_s: float = 60.0
    """How far ahead `predictive` admission looks at a decode."""

    tie_fraction: float = 0.1
    tie_s: float = 0.005
    silence_s_max: float = 5.0
    retry_after_s_min: float = 1.0
    retry_after_s_max: float = 30.0


def nearly_least(
    candidates: Sequence[CandidateT],
    value_s: Callable[[CandidateT], float],
    limits: PlacementLimits,
    target_s: float,
) -> list[CandidateT]:
    """The equals of the best. One that misses the target is no equal of one that meets it."""
    values_s = [value_s(candidate) for candidate in candidates]
    least_s = min(values_s)
    bound_s = equals_bound_s(least_s, limits)
    if least_s <= target_s:
        bound_s = min(bound_s, target_s)
    return [candidate for candidate, one_s in zip(candidates, values_s, strict=True) if one_s <= bound_s]


def equals_bound_s(least_s: float, limits: PlacementLimits) -> float:
    """What is predicted up to here counts as equal to `least_s`; it grows with it."""
    return least_s + max(limits.tie_s, least_s * limits.tie_fraction)


DECISION_LAG_S = 0.01
"""Until other conductors' decisions are heard of, generously."""
UNHEARD_MAX = 32
"""Decisions elsewhere that one decision allows for."""


def turn_of(request_id: RequestId, view: ClusterView, now_s: float) -> int:
    """How many requests that we have not heard of yet are taken to be placed just before this one.

    Conductors that decide at the same moment see the same instance free, and would all take it. As many
    decisions as were heard of lately are taken to be under way; which of them this one is, its name says.
    So together they share what is free as one conductor would. With one conductor it is always 0.
    """
    heard = sum(
        booking.elsewhere and booking.booked_at_s > now_s - DECISION_LAG_S
        for booking in view.bookings.values()
    )
    return xxhash.xxh3_64_intdigest(f"turn/{request_id}".encode()) % (1 + min(heard, UNHEARD_MAX))


def in_turn(
    candidates: Sequence[CandidateT],
    turn: int,
    choose: Callable[[Sequence[CandidateT]], CandidateT],
    taken: Callable[[CandidateT], CandidateT],
    value_s: Callable[[CandidateT], float],
    target_s: float,
) -> CandidateT:
    """What `choose` chooses once `turn` others have each chosen; `taken(candidate)` is it with one more
    request. Others are only taken to be there: nobody is sent where the target is missed for them."""
    if not turn:
        return choose(candidates)
    # No more than these can be the best of anybody.
    near = nsmallest(UNHEARD_MAX + 1, enumerate(candidates), key=lambda numbered: value_s(numbered[1]))
    numbers = [number for number, _ in sorted(near)]
    left = [candidates[number] for number in numbers]
    for _ in range(turn):
        won = choose(left)
        left = [taken(candidate) if candidate is won else candidate for candidate in left]
    won = choose(left)
    found = candidates[numbers[next(number for number, other in enumerate(left) if other is won)]]
    return found if value_s(found) <= target_s else choose(candidates)


def spread(request_id: RequestId, instance: InstanceId) -> int:
    """Rendezvous hash: each request orders equal instances its own way, the same in every process."""
    return xxhash.xxh3_64_intdigest(f"{request_id}/{instance}".encode())


def silent(instance: InstanceView, limits: PlacementLimits, now_s: float) -> bool:
    return now_s - instance.heard_at_s > limits.silence_s_max
