"""A conductor as the lifecycle drives it: the view follows first, then requests are answered."""

import asyncio
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from aiohttp import web

from cluster import subjects
from cluster.bus import Handler, Subscription
from cluster.cluster_config import ClusterConfig
from cluster.compatibility import fitting
from cluster.config_watch import ConfigWatch
from cluster.context import ServiceContext
from cluster.messages import InstanceRecord
from cluster.registry import RegistryEvent
from conductor.cluster_state import ClusterState
from conductor.config import ConductorConfig
from conductor.metrics import ConductorMetrics
from conductor.outcomes_heard import OutcomesHeard
from conductor.policy_limits import PolicyLimits, placement_limits
from conductor.recorder import FileRecorder
from conductor.scheduler import Scheduler
from policy.core import InstanceState, LoadSnapshot


class ConductorApp:
    def __init__(self, context: ServiceContext, config: ConductorConfig) -> None:
        self._context = context
        self._config = config
        self._metrics = ConductorMetrics(context.metrics.registry)
        self._recorder = _recorder(context, config, self._metrics)
        self._state = ClusterState(
            context.bus,
            context.log,
            time.monotonic,
            booking_ttl_s=config.booking_ttl_s,
            describe_timeout_s=config.describe_timeout_s,
            recorder=self._recorder,
            load_heard=self._load_heard,
        )
        self._outcomes = OutcomesHeard(context.log)
        self._metrics.bookings.set_function(lambda: len(self._state.current().bookings))
        self._limits = PolicyLimits(placement_limits(config))
        self._show_policy()
        self._metrics.show_tuned(self._limits.tuned)
        self._config_watch = ConfigWatch(
            context.control, context.metrics, context.log, self._cluster_configured
        )
        self._scheduler = Scheduler(
            context.bus,
            self._state,
            self._limits.deciding,
            self._metrics,
            context.log,
            time.monotonic,
            match_timeout_ms=config.match_timeout_ms,
            placed=self._limits.placed,
        )
        self._subscription: Subscription | None = None

    async def start(self) -> InstanceRecord:
        await self._config_watch.start(timeout_s=self._config.connect_s_max)
        await self._state.start()
        self._context.registry.on_change(self._registry_changed)
        self._state.registry_changed(fitting(self._context.registry.instances))
        await self._state.described()
        self._subscription = await self._context.bus.subscribe(
            subjects.SCHEDULE_STANDBY if self._config.standby else subjects.SCHEDULE,
            self._scheduler.schedule,
            queue=subjects.CONDUCTOR_QUEUE,
            concurrency_max=self._config.decisions_in_flight_max,
            pending_max=self._config.decisions_pending_max,
        )
        return self._context.record()

    def load(self) -> LoadSnapshot:
        return LoadSnapshot(
            instance=self._context.instance,
            roles=self._context.roles,
            state=InstanceState.SERVING,
            requests=self._scheduler.in_flight,
        )

    def handlers(self) -> Mapping[type, Handler]:
        return {}

    def routes(self) -> Iterable[web.RouteDef]:
        return ()

    async def drain(self, deadline_s: float) -> None:
        """A decision takes no longer than its wait for kvmeta: that bounds this, not `deadline_s`."""
        await self._stop_answering()

    async def close(self) -> None:
        await self._stop_answering()
        await self._config_watch.close()
        await self._state.close()
        if self._recorder is not None:
            await asyncio.to_thread(self._recorder.close)

    async def _stop_answering(self) -> None:
        subscription, self._subscription = self._subscription, None
        if subscription is not None:
            await subscription.unsubscribe()

    def _load_heard(self, load: LoadSnapshot, incarnation: int) -> None:
        outcomes = self._outcomes.newly(load, incarnation)
        if outcomes.answered:
            self._limits.answered(outcomes, time.monotonic())

    def _cluster_configured(self, config: ClusterConfig) -> None:
        self._limits.configure(config)
        self._show_policy()

    def _show_policy(self) -> None:
        limits = self._limits.current()
        self._metrics.policy.clear()
        self._metrics.policy.labels(limits.strategy, limits.admission).set(1)

    def _registry_changed(self, _: RegistryEvent) -> None:
        self._state.registry_changed(fitting(self._context.registry.instances))


def _recorder(
    context: ServiceContext, config: ConductorConfig, metrics: ConductorMetrics
) -> FileRecorder | None:
    """ConfigError where it could not write."""
    if not config.record_folder:
        return None
    return FileRecorder(
        Path(config.record_folder),
        context.instance,
        context.incarnation,
        time.monotonic,
        metrics,
        context.log,
        booking_ttl_s=config.booking_ttl_s,
        bytes_max=config.record_bytes_max,
    )
