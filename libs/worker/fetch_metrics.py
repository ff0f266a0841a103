"""Metrics of what is brought into an instance's compute tier: from its own lower tiers and from others."""

from enum import StrEnum

from prometheus_client import CollectorRegistry, Counter, Histogram

from kvindex.core import Tier

REMOTE = "remote"
"""Where blocks came from, beside `local_<tier>`."""
_FETCH_BUCKETS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)


class FetchFailure(StrEnum):
    """Why blocks that were to be brought in are computed instead."""

    UNREGISTERED = "unregistered"
    UNANSWERED = "unanswered"
    """The source is away, did not answer in time, or its handler broke."""
    NONSENSE = "nonsense"
    """It answered what it may not answer."""
    REFUSED = "refused"
    GONE = "gone"
    """It held them, or was thought to."""
    SHORT = "short"
    """It had some of them; only those behind are computed."""
    TRANSFER = "transfer"
    CHECKSUM = "checksum"
    TIMEOUT = "timeout"
    """The time that the fetch is worth was over before all was read."""
    NO_BLOCKS = "no_blocks"
    """Not here: nothing to read into."""
    LOCAL = "local"
    """Our own lower tiers did not bring up what lay there."""


class FetchMetrics:
    """Registered on the service's own registry, once per process."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._blocks = Counter(
            "moonpool_fetched_blocks", "Blocks brought in to be computed on", ["source"], registry=registry
        )
        self._bytes = Counter(
            "moonpool_fetched_bytes",
            "Bytes of blocks brought in to be computed on",
            ["source"],
            registry=registry,
        )
        self._failures = Counter(
            "moonpool_fetch_failures",
            "Times that blocks were computed because they could not be brought in",
            ["reason"],
            registry=registry,
        )
        self.fetch_s = Histogram(
            "moonpool_fetch_seconds",
            "Time to bring in a prefix, waiting for others who bring the same included",
            buckets=_FETCH_BUCKETS_S,
            registry=registry,
        )

    def rose(self, tier: Tier, blocks: int, block_bytes: int) -> None:
        self._count(f"local_{tier}", blocks, block_bytes)

    def read(self, blocks: int, block_bytes: int) -> None:
        self._count(REMOTE, blocks, block_bytes)

    def failed(self, reason: FetchFailure) -> None:
        self._failures.labels(reason).inc()

    def _count(self, source: str, blocks: int, block_bytes: int) -> None:
        self._blocks.labels(source).inc(blocks)
        self._bytes.labels(source).inc(blocks * block_bytes)
