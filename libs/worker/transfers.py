"""The transfer endpoint of an instance, made from its settings, and its counters as metrics.

Owns what `WorkerConfig` says about transfers. Knows nothing of what is transferred.
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from cluster.errors import ConfigError
from cluster.logs import Logger
from kvtransfer import Endpoint, TransferCounters, TransportKind, TransportUnavailable
from worker.config import WorkerConfig


def transfer_endpoint(name: str, config: WorkerConfig) -> Endpoint:
    """Not started yet. Raises ConfigError."""
    shm_folder = Path(config.shm_folder).expanduser() if config.shm_folder else None
    if shm_folder is not None and not shm_folder.is_dir():
        raise ConfigError(f"shm_folder: {shm_folder} is not a folder")
    return Endpoint(
        name,
        config.cluster_secret.encode(),
        host=config.bind,
        advertised_host=config.host,
        transports=_kinds(config.transfer_transports),
        shm_folder=shm_folder,
        rdma_devices=config.rdma_devices or None,
    )


async def start_endpoint(endpoint: Endpoint, log: Logger) -> None:
    """Raises ConfigError if this machine has none of the transports, or for a setting that a transport
    cannot use; OSError if an address is taken."""
    try:
        await endpoint.start()
    except TransportUnavailable as error:
        raise ConfigError(f"transfer_transports: {error}") from error
    except ValueError as error:  # names the setting
        raise ConfigError(str(error)) from error
    for kind, reason in endpoint.unavailable.items():
        log.info("transport left out", transport=kind, reason=reason)


class TransferCollector(Collector):
    """What `counters()` says, by transport, as Prometheus counters."""

    def __init__(self, counters: Callable[[], Mapping[TransportKind, TransferCounters]]) -> None:
        self._counters = counters

    def collect(self) -> Iterator[Metric]:
        moved_bytes = CounterMetricFamily(
            "moonpool_transfer_bytes", "Bytes moved by our calls", labels=["transport", "direction"]
        )
        calls = CounterMetricFamily(
            "moonpool_transfer_calls", "Our calls that ended", labels=["transport", "result"]
        )
        seconds = CounterMetricFamily(
            "moonpool_transfer_seconds", "Durations of our calls, summed", labels=["transport"]
        )
        for kind, counted in self._counters().items():
            moved_bytes.add_metric([kind, "write"], counted.written_bytes)
            moved_bytes.add_metric([kind, "read"], counted.read_bytes)
            calls.add_metric([kind, "done"], counted.writes + counted.reads)
            calls.add_metric([kind, "failed"], counted.failures)
            seconds.add_metric([kind], counted.transfer_s)
        yield from (moved_bytes, calls, seconds)


def _kinds(names: tuple[str, ...]) -> tuple[TransportKind, ...]:
    known = [kind.value for kind in TransportKind]
    for name in names:
        if name not in known:
            raise ConfigError(f"transfer_transports: {name!r} is not one of {', '.join(known)}")
    if not names or len(set(names)) != len(names):
        raise ConfigError("transfer_transports must name at least one transport, and each once")
    return tuple(map(TransportKind, names))
