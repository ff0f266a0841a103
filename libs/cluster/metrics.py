"""The metrics that every service has, named in one place, on a registry of its own.

A service adds its own to `ServiceMetrics.registry`. Labels take values from small fixed sets only: no
instance, request or subject ever becomes one (see `subjects.family`).
"""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

CONTENT_TYPE = CONTENT_TYPE_LATEST

_REQUEST_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


class ServiceMetrics:
    """One per process; tests make as many as they like."""

    def __init__(self) -> None:
        registry = CollectorRegistry()
        self.registry = registry
        self.bus_sent = Counter(
            "moonpool_bus_sent_messages",
            "Messages published, requests and replies",
            ["family"],
            registry=registry,
        )
        self.bus_received = Counter(
            "moonpool_bus_received_messages", "Well-formed messages received", ["family"], registry=registry
        )
        self.bus_dropped = Counter(
            "moonpool_bus_dropped_messages",
            "Messages dropped: malformed, unknown, too many waiting",
            ["family", "reason"],
            registry=registry,
        )
        self.bus_handler_failures = Counter(
            "moonpool_bus_handler_failures", "Handlers that raised", ["family"], registry=registry
        )
        self.bus_request_s = Histogram(
            "moonpool_bus_request_seconds",
            "Requests on the bus until the first reply or error",
            ["family", "outcome"],
            buckets=_REQUEST_BUCKETS_S,
            registry=registry,
        )
        self.bus_connected = Gauge(
            "moonpool_bus_connected", "1 while the bus is connected", registry=registry
        )
        self.bus_connection_losses = Counter(
            "moonpool_bus_connection_losses", "How often the bus was lost", registry=registry
        )
        self.control_call_s = Histogram(
            "moonpool_control_call_seconds",
            "Calls of the control plane",
            ["operation", "outcome"],
            buckets=_REQUEST_BUCKETS_S,
            registry=registry,
        )
        self.control_connected = Gauge(
            "moonpool_control_connected", "1 while the control plane answers", registry=registry
        )
        self.control_watch_restarts = Counter(
            "moonpool_control_watch_restarts", "Watches that started over with a listing", registry=registry
        )
        self.registered = Gauge(
            "moonpool_registered", "1 while this instance is in the registry", registry=registry
        )
        self.lease_losses = Counter(
            "moonpool_lease_losses", "How often the registration's lease was lost", registry=registry
        )
        self.registry_instances = Gauge(
            "moonpool_registry_instances", "Instances in the registry by role", ["role"], registry=registry
        )
        self.info = Gauge(
            "moonpool_service_info",
            "1; what this process is",
            ["instance", "roles", "version"],
            registry=registry,
        )

        self._sent: dict[str, Counter] = {}
        self._received: dict[str, Counter] = {}
        self._requests: dict[tuple[str, str], Histogram] = {}

    def count_sent(self, family: str) -> None:
        """One more of `bus_sent`. This and the next two are for what is done for each message: to look up a
        label takes longer than to count.
        """
        child = self._sent.get(family)
        if child is None:
            child = self._sent[family] = self.bus_sent.labels(family)
        child.inc()

    def count_received(self, family: str) -> None:
        child = self._received.get(family)
        if child is None:
            child = self._received[family] = self.bus_received.labels(family)
        child.inc()

    def observe_request(self, family: str, outcome: str, elapsed_s: float) -> None:
        child = self._requests.get((family, outcome))
        if child is None:
            child = self._requests[family, outcome] = self.bus_request_s.labels(family, outcome)
        child.observe(elapsed_s)

    def exposition(self) -> bytes:
        """The text that `/metrics` answers, of type CONTENT_TYPE."""
        return generate_latest(self.registry)
