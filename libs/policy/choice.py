"""How one of several nearly equal candidates is chosen, and the tolerances of a placement."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import xxhash

from kvindex.core import InstanceId
from policy.core import RequestId
from policy.view import InstanceView

CandidateT = TypeVar("CandidateT")


@dataclass(frozen=True, slots=True)
class PlacementLimits:
    """Bounds and tolerances of a placement.

    Predictions within `tie_fraction` or `tie_s` of the best are equals: profiles are noisy, and equals
    share the load. Instances silent for `silence_s_max` are used only where no other serves.
    """

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
    least_s = min(value_s(candidate) for candidate in candidates)
    bound_s = least_s + max(limits.tie_s, least_s * limits.tie_fraction)
    if least_s <= target_s:
        bound_s = min(bound_s, target_s)
    return [candidate for candidate in candidates if value_s(candidate) <= bound_s]


def spread(request_id: RequestId, instance: InstanceId) -> int:
    """Rendezvous hash: each request orders equal instances its own way, the same in every process."""
    return xxhash.xxh3_64_intdigest(f"{request_id}/{instance}".encode())


def silent(instance: InstanceView, limits: PlacementLimits, now_s: float) -> bool:
    return now_s - instance.heard_at_s > limits.silence_s_max
