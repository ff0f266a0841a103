"""Metrics of a worker, all in one place; beside `cluster.metrics`, which every service has."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from kvpool import PoolStats

_STEP_BUCKETS_S = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)


class WorkerMetrics:
    """Registered on the service's own registry, once per process."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.step_s = Histogram(
            "moonpool_step_seconds", "Engine time of a step", buckets=_STEP_BUCKETS_S, registry=registry
        )
        self.prefill_tokens = Counter(
            "moonpool_prefill_tokens", "Prompt tokens computed (not cached)", registry=registry
        )
        self.decode_tokens = Counter("moonpool_decode_tokens", "Tokens decoded", registry=registry)
        self.forced_tokens = Counter(
            "moonpool_forced_tokens", "Output tokens that a structure left no choice for", registry=registry
        )
        self.cached_tokens = Counter(
            "moonpool_cached_tokens", "Prompt tokens taken from the pool", registry=registry
        )
        self.preemptions = Counter(
            "moonpool_preemptions", "Sequences that gave their blocks back", ["way"], registry=registry
        )
        self.prefills = Counter(
            "moonpool_prefills", "Requests that left prefill", ["result"], registry=registry
        )
        self.reservations = Counter(
            "moonpool_reservations", "Reserve messages answered", ["outcome"], registry=registry
        )
        self.handover_bytes = Counter(
            "moonpool_handover_bytes", "KV bytes written to decode", registry=registry
        )
        self.handover_wait_s = Histogram(
            "moonpool_handover_wait_seconds",
            "From the first token to the last acknowledged write",
            buckets=_STEP_BUCKETS_S,
            registry=registry,
        )
        self.read_pins = Counter(
            "moonpool_read_pins", "Blocks that others asked to read", ["outcome"], registry=registry
        )
        self._blocks = Gauge("moonpool_blocks", "Blocks by state", ["state"], registry=registry)

    def show_pool(self, stats: PoolStats) -> None:
        for state, blocks in (("free", stats.free), ("cached", stats.cached), ("in_use", stats.in_use)):
            self._blocks.labels(state).set(blocks)
