"""How one of several nearly equal candidates is chosen, and the settings of a placement."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

import xxhash

from kvindex.core import InstanceId
from policy.core import RequestId
from policy.view import InstanceView

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


def spread(request_id: RequestId, instance: InstanceId) -> int:
    """Rendezvous hash: each request orders equal instances its own way, the same in every process."""
    return xxhash.xxh3_64_intdigest(f"{request_id}/{instance}".encode())


def silent(instance: InstanceView, limits: PlacementLimits, now_s: float) -> bool:
    return now_s - instance.heard_at_s > limits.silence_s_max
