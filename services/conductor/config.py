"""Settings of a conductor."""

from dataclasses import dataclass, field

from cluster.context import ServiceConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ConductorConfig(ServiceConfig):
    standby: bool = field(
        default=False, metadata={"help": "answer only where no other scheduler does (schedule.standby)"}
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
