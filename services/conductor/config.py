"""Settings of a conductor. Those that the cluster's configuration has too are overruled by what it sets."""

from dataclasses import dataclass, field

from cluster.cluster_config import metadata_of
from cluster.context import ServiceConfig
from policy.choice import PlacementLimits

_LIMITS = PlacementLimits()


@dataclass(frozen=True, slots=True, kw_only=True)
class ConductorConfig(ServiceConfig):
    standby: bool = field(
        default=False, metadata={"help": "answer only where no other scheduler does (schedule.standby)"}
    )
    strategy: str = field(default=_LIMITS.strategy, metadata=metadata_of("strategy"))
    admission: str = field(default=_LIMITS.admission, metadata=metadata_of("admission"))
    kvcache_balancing_threshold: float = field(
        default=_LIMITS.kvcache_balancing_threshold, metadata=metadata_of("kvcache_balancing_threshold")
    )
    ttft_ms_default: float = field(default=0.0, metadata=metadata_of("ttft_ms_default"))
    tbt_ms_default: float = field(default=0.0, metadata=metadata_of("tbt_ms_default"))
    decode_horizon_s: float = field(
        default=_LIMITS.decode_horizon_s, metadata=metadata_of("decode_horizon_s")
    )
    target_share: float = field(default=0.95, metadata=metadata_of("target_share"))
    adaptive: bool = field(default=True, metadata=metadata_of("adaptive"))
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
