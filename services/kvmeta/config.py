"""Settings of a kvmeta."""

from dataclasses import dataclass, field

from cluster.context import ServiceConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class KvmetaConfig(ServiceConfig):
    chunk_timeout_s: float = field(
        default=5.0, metadata={"help": "wait for each chunk of an inventory", "min": 0.1, "max": 60.0}
    )
    sync_wait_s_max: float = field(
        default=10.0,
        metadata={
            "help": "at start, wait for the inventories of registered instances; then serve without the rest",
            "min": 0.1,
            "max": 600.0,
        },
    )
    matches_in_flight_max: int = field(
        default=256, metadata={"help": "lookups answered at once; others wait", "min": 1, "max": 65_536}
    )
