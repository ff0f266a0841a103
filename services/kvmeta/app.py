"""A kvmeta as the lifecycle drives it: it answers only once its directory is true to the cluster."""

import time
from collections.abc import Iterable, Mapping

from aiohttp import web

from cluster import subjects
from cluster.bus import Handler, Subscription
from cluster.compatibility import fitting
from cluster.config_watch import ConfigWatch
from cluster.context import ServiceContext
from cluster.duty import Duty
from cluster.messages import InstanceRecord
from cluster.registry import RegistryEvent
from kvindex.directory import Directory
from kvmeta.config import KvmetaConfig
from kvmeta.matcher import Matcher
from kvmeta.metrics import KvmetaMetrics
from kvmeta.replication import DUTY, Replicator, settings_of
from kvmeta.synchroniser import Synchroniser
from policy.core import InstanceState, LoadSnapshot
from policy.heat import HeatCounter


class KvmetaApp:
    def __init__(self, context: ServiceContext, config: KvmetaConfig) -> None:
        self._context = context
        self._config = config
        self._directory = Directory()
        metrics = KvmetaMetrics(context.metrics.registry)
        self._synchroniser = Synchroniser(
            context.bus,
            self._directory,
            metrics,
            context.log,
            time.monotonic,
            chunk_timeout_s=config.chunk_timeout_s,
        )
        heat = HeatCounter()
        self._matcher = Matcher(self._directory, heat, metrics, time.monotonic)
        self._replicator = Replicator(
            context.bus,
            self._directory,
            heat,
            Duty(DUTY, context.instance, context.control, context.log, ttl_s=config.lease_ttl_s),
            settings_of(config),
            metrics,
            context.log,
            time.monotonic,
        )
        self._config_watch = ConfigWatch(
            context.control, context.metrics, context.log, self._replicator.configure
        )
        self._subscription: Subscription | None = None

    async def start(self) -> InstanceRecord:
        """Returns once the directory is true to all that are registered: only then does it answer.

        Who does not send its inventory within `sync_wait_s_max` is left out until it does.
        """
        await self._config_watch.start(timeout_s=self._config.connect_s_max)
        await self._synchroniser.start()
        self._context.registry.on_change(self._registry_changed)
        self._follow_registry()
        missing = await self._synchroniser.synchronised(self._config.sync_wait_s_max)
        if missing:
            self._context.log.warning("serving without some inventories", peers=sorted(missing))
        self._subscription = await self._context.bus.subscribe(
            subjects.KVMETA_MATCH,
            self._matcher.match,
            queue=subjects.KVMETA_QUEUE,
            concurrency_max=self._config.matches_in_flight_max,
        )
        if self._config.replication:
            await self._replicator.start()
        return self._context.record()

    def load(self) -> LoadSnapshot:
        return LoadSnapshot(
            instance=self._context.instance,
            roles=self._context.roles,
            state=InstanceState.SERVING,
            blocks_indexed=self._directory.blocks(),
        )

    def handlers(self) -> Mapping[type, Handler]:
        return {}

    def routes(self) -> Iterable[web.RouteDef]:
        return ()

    async def drain(self, deadline_s: float) -> None:
        """A lookup never waits, so there is nothing to wait for. The duty goes to another kvmeta."""
        await self._stop_answering()
        await self._replicator.close()

    async def close(self) -> None:
        await self._stop_answering()
        await self._config_watch.close()
        await self._replicator.close()
        await self._synchroniser.close()

    async def _stop_answering(self) -> None:
        subscription, self._subscription = self._subscription, None
        if subscription is not None:
            await subscription.unsubscribe()

    def _registry_changed(self, _: RegistryEvent) -> None:
        self._follow_registry()

    def _follow_registry(self) -> None:
        instances = fitting(self._context.registry.instances)
        self._synchroniser.registry_changed(instances)
        self._replicator.registry_changed(instances)
