"""What a conductor counts, beside what every service does."""

from collections.abc import Callable
from enum import StrEnum

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from policy.choice import PlacementLimits

_DECISION_BUCKETS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)


class PrefixSource(StrEnum):
    """Whose cached prefix a prefill starts from."""

    NONE = "none"
    OWN = "own"
    REMOTE = "remote"


class ConductorMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self.decisions = Counter(
            "moonpool_conductor_decisions",
            "Requests decided: placed, or the reason of the rejection",
            ["outcome"],
            registry=registry,
        )
        self.policy = Gauge(
            "moonpool_conductor_policy",
            "1, with the strategy and the admission mode that decide",
            ["strategy", "admission"],
            registry=registry,
        )
        self.tuned = Gauge(
            "moonpool_conductor_tuned",
            "Limits that tune themselves, as they are now, by name",
            ["limit"],
            registry=registry,
        )
        self.decision_s = Histogram(
            "moonpool_conductor_decision_seconds",
            "From a request's arrival to its decision, the prefix match included",
            buckets=_DECISION_BUCKETS_S,
            registry=registry,
        )
        self.matches = Counter(
            "moonpool_conductor_matches",
            "Prefix matches asked of kvmeta: answered, timeout, no_responder, failed",
            ["outcome"],
            registry=registry,
        )
        self.prefixes = Counter(
            "moonpool_conductor_prefixes",
            "Requests placed, by whose cached prefix prefill starts from: none, own, remote",
            ["source"],
            registry=registry,
        )
        self.prefix_blocks = Counter(
            "moonpool_conductor_prefix_blocks",
            "Blocks of those prefixes, prefill's own part of a remote one included",
            ["source"],
            registry=registry,
        )
        self.bookings = Gauge(
            "moonpool_conductor_bookings", "Placements that no load snapshot shows yet", registry=registry
        )
        self.predicted_ttft_s = Histogram(
            "moonpool_conductor_predicted_ttft_seconds",
            "Time to the first token as predicted for placed requests",
            buckets=(0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
            registry=registry,
        )
        self.recording = Gauge(
            "moonpool_conductor_recording",
            "1 while all that decisions are made from is recorded",
            registry=registry,
        )
        self.recorded_bytes = Counter(
            "moonpool_conductor_recorded_bytes", "Written to the recording", registry=registry
        )

    def show_tuned(self, limits: Callable[[], PlacementLimits]) -> None:
        """From now on `limits` is asked whenever somebody looks."""
        self.tuned.labels("work_price").set_function(lambda: limits().work_price)
        self.tuned.labels("compute_weight").set_function(lambda: limits().compute_weight)
        self.tuned.labels("target_share").set_function(lambda: limits().target_share)
        self.tuned.labels("kvcache_balancing_threshold").set_function(
            lambda: limits().kvcache_balancing_threshold
        )
