"""The operations that every service has, served by `cluster.admin`, for the gateway's API document."""

from msgspec import Struct

from cluster.admin import Health
from cluster.metrics import CONTENT_TYPE
from gateway.api.operations import Operation


class Live(Struct):
    live: bool


class Version(Struct):
    version: str


def _health(path: str, name: str, summary: str) -> Operation:
    return Operation(
        "GET", path, name, summary, None, Health, error_statuses=(503,), error_body=Health, needs_key=False
    )


ADMIN_OPERATIONS: tuple[Operation, ...] = (
    Operation("GET", "/live", "live", "Whether the process answers", None, Live, needs_key=False),
    Operation("GET", "/livez", "livez", "As /live", None, Live, needs_key=False),
    _health("/ready", "ready", "Whether requests can be taken"),
    _health("/readyz", "readyz", "As /ready"),
    _health("/health", "health", "As /ready"),
    _health("/healthz", "healthz", "As /ready"),
    Operation(
        "GET",
        "/metrics",
        "metrics",
        "Metrics in Prometheus' form",
        None,
        None,
        media_type=CONTENT_TYPE.partition(";")[0],
        needs_key=False,
    ),
    Operation("GET", "/version", "version", "The version that runs", None, Version, needs_key=False),
)
