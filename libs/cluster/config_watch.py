"""The cluster's configuration as it stands in the control plane: followed by services, changed by a command.

A document that makes no sense is logged, counted and passed over: the last good one holds. So does it
through an outage. What the document may say is `cluster.cluster_config`'s.
"""

import asyncio
from collections.abc import Callable

from prometheus_client import Counter, Gauge

from cluster import keys
from cluster.cluster_config import (
    ClusterConfig,
    Document,
    config_of,
    differences,
    encode_document,
    parse_document,
)
from cluster.control import ABSENT_REVISION, ControlPlane, Deleted, Listing, Put, WatchEvent
from cluster.errors import ConfigError, DeadlineError, ProtocolError, RetryableError
from cluster.logs import Logger
from cluster.metrics import ServiceMetrics

WRITE_TRIES_MAX = 8
"""Of a change, where others change it at the same time."""


class ConfigWatch:
    """For the event loop's thread. Runs between `start` and `close`."""

    def __init__(
        self,
        control: ControlPlane,
        metrics: ServiceMetrics,
        log: Logger,
        on_change: Callable[[ClusterConfig], None],
    ) -> None:
        """`on_change(config)` is called in the event loop when it is another one than before; before the
        first call it is `ClusterConfig()`."""
        self._control = control
        self._log = log
        self._on_change = on_change
        self._config = ClusterConfig()
        self._listed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._revision = Gauge(
            "moonpool_cluster_config_revision",
            "Revision in the control plane of the cluster's configuration that is in use; 0: none is set",
            registry=metrics.registry,
        )
        self._rejected = Counter(
            "moonpool_cluster_config_rejected",
            "Configurations of the cluster that were passed over because they make no sense",
            registry=metrics.registry,
        )

    async def start(self, *, timeout_s: float) -> None:
        """Return when what is set is in use; DeadlineError where the control plane does not say in time."""
        self._task = asyncio.create_task(self._follow())
        try:
            async with asyncio.timeout(timeout_s):
                await self._listed.wait()
        except TimeoutError:
            raise DeadlineError(f"no configuration of the cluster was read within {timeout_s:g} s") from None

    async def close(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait({task})

    async def _follow(self) -> None:
        async for event in self._control.watch_prefix(keys.CONFIG):
            try:
                self._apply(event)
            except Exception as error:
                self._log.exception("cluster configuration not taken over", error)
            self._listed.set()

    def _apply(self, event: WatchEvent) -> None:
        match event:
            case Listing(entries, revisions):
                value = entries.get(keys.CONFIG)
                self._take(value, revisions.get(keys.CONFIG, ABSENT_REVISION))
            case Put(keys.CONFIG, value, revision):
                self._take(value, revision)
            case Deleted(keys.CONFIG):
                self._take(None, ABSENT_REVISION)

    def _take(self, value: bytes | None, revision: int) -> None:
        try:
            config = ClusterConfig() if value is None else config_of(parse_document(value))
        except (ConfigError, ProtocolError) as error:
            self._rejected.inc()
            self._log.warning("cluster configuration passed over", revision=revision, error=error)
            return
        self._revision.set(revision)
        changes = differences(self._config, config)
        if changes:
            self._config = config
            self._log.info("cluster configuration changed", revision=revision, **changes)
            self._on_change(config)


async def read_document(control: ControlPlane) -> tuple[Document, int]:
    """What is set, and its revision. ProtocolError where it is no document."""
    stored = await control.get_versioned(keys.CONFIG)
    if stored is None:
        return {}, ABSENT_REVISION
    return parse_document(stored.value), stored.revision


async def change_document(
    control: ControlPlane, change: Callable[[Document], Document]
) -> tuple[Document, int]:
    """Put what `change(document)` makes of what is set, losing nothing that others change meanwhile; what is
    set then, and its revision.

    Raises ProtocolError where there is no document, RetryableError where others were quicker
    WRITE_TRIES_MAX times, and what `change` raises.
    """
    for _ in range(WRITE_TRIES_MAX):
        document, revision = await read_document(control)
        changed = change(document)
        if changed == document:
            return document, revision
        written = await control.put_at(keys.CONFIG, encode_document(changed), revision)
        if written is not None:
            return changed, written
    raise RetryableError("the configuration is being changed by others, try again")
