"""How one of several nearly equal candidates is chosen, and the settings of a placement."""

from dataclasses import dataclass
from enum import StrEnum

import xxhash

from kvindex.core import InstanceId
from policy.core import RequestId
from policy.view import ClusterView


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

    adaptive: bool = False
    """Whether these tune themselves (`policy.adapt`), from what they are set to."""
    work_price: float = 1.0
    """At least 1. A request whose computing takes the share s of its target may use 1 / (price * s) of what
    it could wait, where that is below 1: the dearer work is, the less waits before what needs much of it."""
    compute_weight: float = 1.0
    """joint: what a second of computing counts, beside one of waiting or moving."""

    tie_fraction: float = 0.1
    tie_s: float = 0.005
    silence_s_max: float = 5.0
    retry_after_s_min: float = 1.0
    retry_after_s_max: float = 30.0


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


def spread(request_id: RequestId, instance: InstanceId) -> int:
    """Rendezvous hash: each request orders equal instances its own way, the same in every process."""
    return xxhash.xxh3_64_intdigest(f"{request_id}/{instance}".encode())
