"""Settings of a kvmeta. Those that the cluster's configuration has too are overruled by what it sets."""

from dataclasses import dataclass, field

from cluster.cluster_config import metadata_of
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
    replication: bool = field(
        default=True, metadata={"help": "count hot prefixes and stand for the duty of copying them"}
    )
    heat_interval_s: float = field(
        default=1.0,
        metadata={
            "help": "how often kvmetas tell each other what is hot, and the duty's holder copies",
            "min": 0.01,
            "max": 60.0,
        },
    )
    replication_requests_min: int = field(default=8, metadata=metadata_of("replication_requests_min"))
    replication_window_s: float = field(default=30.0, metadata=metadata_of("replication_window_s"))
    replication_copies_max: int = field(default=3, metadata=metadata_of("replication_copies_max"))
    replication_in_flight_max: int = field(
        default=2, metadata={"help": "copies made at once", "min": 1, "max": 64}
    )
    replication_bytes_per_s: float = field(
        default=200e6, metadata={"help": "bandwidth of all copies together", "min": 1.0, "max": 1e12}
    )
    replication_burst_bytes: float = field(
        default=1e9, metadata={"help": "copied at once after a quiet time", "min": 1.0, "max": 1e13}
    )
    replication_cached_share: float = field(
        default=0.5,
        metadata={
            "help": "share of a target's cached blocks that a copy may displace",
            "min": 0.0,
            "max": 1.0,
        },
    )
    replication_deadline_s: float = field(
        default=20.0, metadata={"help": "time that a target gets for a copy", "min": 0.1, "max": 600.0}
    )
    replication_pause_s: float = field(
        default=60.0,
        metadata={"help": "until the same copy is tried again", "min": 1.0, "max": 86_400.0},
    )
    silence_s_max: float = field(
        default=5.0,
        metadata={"help": "silent for longer, an instance is no source or target", "min": 1.0, "max": 600.0},
    )
