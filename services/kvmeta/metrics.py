"""What a kvmeta counts, beside what every service does."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_MATCH_BUCKETS_S = (0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.05)


class KvmetaMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self.blocks = Gauge(
            "moonpool_kvmeta_blocks", "Blocks in the directory, over all instances", registry=registry
        )
        self.instances = Gauge(
            "moonpool_kvmeta_instances",
            "Instances followed, by whether the directory is true to them",
            ["state"],
            registry=registry,
        )
        self.events = Counter("moonpool_kvmeta_events", "Block events applied", registry=registry)
        self.inventories = Counter(
            "moonpool_kvmeta_inventories", "Inventories asked for, by outcome", ["outcome"], registry=registry
        )
        self.contradictions = Counter(
            "moonpool_kvmeta_contradictions",
            "Events or inventories that contradict what the instance said before",
            registry=registry,
        )
        self.match_s = Histogram(
            "moonpool_kvmeta_match_seconds", "Lookups", buckets=_MATCH_BUCKETS_S, registry=registry
        )
        self.replication_duty = Gauge(
            "moonpool_kvmeta_replication_duty", "1 where this kvmeta copies hot prefixes", registry=registry
        )
        self.hot_prefixes = Gauge(
            "moonpool_kvmeta_hot_prefixes",
            "Prefixes asked for often enough to be copied, as the holder of the duty sees them",
            registry=registry,
        )
        self.replications = Counter(
            "moonpool_kvmeta_replications",
            "Copies of hot prefixes asked for: done, partial (the target holds less than it was to), failed "
            "(no answer, or the duty was lost)",
            ["outcome"],
            registry=registry,
        )
        self.replicated_bytes = Counter(
            "moonpool_kvmeta_replicated_bytes", "Read by the targets of those copies", registry=registry
        )
        self.replication_rounds = Counter(
            "moonpool_kvmeta_replication_rounds",
            "Times that the holder of the duty looked at what is hot",
            registry=registry,
        )
