"""Settings of a conductor."""

from dataclasses import dataclass, field

from cluster.context import ServiceConfig
from policy.choice import AdmissionMode, PlacementLimits, Strategy

_LIMITS = PlacementLimits()


@dataclass(frozen=True, slots=True, kw_only=True)
class ConductorConfig(ServiceConfig):
    standby: bool = field(
        default=False, metadata={"help": "answer only where no other scheduler does (schedule.standby)"}
    )
    strategy: str = field(
        default=_LIMITS.strategy, metadata={"help": "how instances are chosen", "choices": tuple(Strategy)}
    )
    admission: str = field(
        default=_LIMITS.admission,
        metadata={"help": "what is refused before any work is done for it", "choices": tuple(AdmissionMode)},
    )
    kvcache_balancing_threshold: float = field(
        default=_LIMITS.kvcache_balancing_threshold,
        metadata={
            "help": "kvcache_centric: another's prefix counts where it is this many times the own one",
            "min": 1.0,
            "max": 1e6,
        },
    )
    ttft_ms_default: float = field(
        default=0.0,
        metadata={"help": "target of requests that name none; 0: no target", "min": 0.0, "max": 3.6e6},
    )
    tbt_ms_default: float = field(
        default=0.0,
        metadata={"help": "target of requests that name none; 0: no target", "min": 0.0, "max": 60_000.0},
    )
    decode_horizon_s: float = field(
        default=_LIMITS.decode_horizon_s,
        metadata={"help": "how far ahead predictive admission looks", "min": 1.0, "max": 3600.0},
    )
    match_timeout_ms: float = field(
        default=100.0,
        metadata={"help": "wait for kvmeta, then place without prefixes", "min": 1.0, "max": 10_000.0},
    )
    booking_ttl_s: float = field(
        default=2.0,
        metadata={"help": "life of a booking that no load snapshot lists", "min": 0.1, "max": 60.0},
    )
    describe_timeout_s: float = field(
        default=1.0, metadata={"help": "wait for the load of a new instance", "min": 0.05, "max": 10.0}
    )
    silence_s_max: float = field(
        default=5.0,
        metadata={
            "help": "silent for longer, an instance is a last resort",
            "min": 1.0,
            "max": 600.0,
        },
    )
    decisions_in_flight_max: int = field(
        default=256, metadata={"help": "requests decided at once; others wait", "min": 1, "max": 65_536}
    )
    decisions_pending_max: int = field(
        default=4096,
        metadata={
            "help": "more waiting requests than these are dropped",
            "min": 1,
            "max": 1_000_000,
        },
    )
    record_folder: str = field(
        default="",
        metadata={"help": "folder for a recording of all that decisions are made from; empty: none"},
    )
    record_bytes_max: int = field(
        default=1 << 30,
        metadata={"help": "a recording that gets longer ends", "min": 4096, "max": 1 << 44},
    )


def placement_limits(config: ConductorConfig) -> PlacementLimits:
    return PlacementLimits(
        strategy=Strategy(config.strategy),
        admission=AdmissionMode(config.admission),
        kvcache_balancing_threshold=config.kvcache_balancing_threshold,
        ttft_ms_default=config.ttft_ms_default or None,
        tbt_ms_default=config.tbt_ms_default or None,
        decode_horizon_s=config.decode_horizon_s,
        silence_s_max=config.silence_s_max,
    )
