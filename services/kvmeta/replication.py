"""Copies hot prefixes: tells what is asked here, sums what all kvmetas tell, and acts for all of them.

Every kvmeta counts, tells and sums; only the one that has the duty acts, so that another can go on at
once where it left off. What is copied where is `policy.replicate`'s; an instance that is told to copy
reads the blocks itself. A copy told twice moves nothing twice: whoever holds the blocks already reads none.
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from cluster import subjects
from cluster.bus import Bus, Received
from cluster.cluster_config import ClusterConfig
from cluster.duty import Duty
from cluster.errors import MoonpoolError, ProtocolError, RetryableError
from cluster.instance_view import instance_view
from cluster.logs import Logger
from cluster.messages import InstanceRecord, PrefixHeats, Replicate, Replicated
from kvhash import HASH_BYTES
from kvindex.core import InstanceId
from kvindex.directory import Directory
from kvmeta.config import KvmetaConfig
from kvmeta.hot_prefixes import heard, told
from kvmeta.metrics import KvmetaMetrics
from policy.copies import Copies
from policy.core import LoadSnapshot
from policy.heat import HeatCounter, HeatWindow
from policy.replicate import (
    Budget,
    HotPrefix,
    Replication,
    ReplicationLimits,
    ReplicationView,
    replicate,
)
from policy.view import ClusterView, with_instances, with_load

DUTY = "replication"
HOT_PREFIXES_MAX = 32
"""Looked at in one round, the hottest: each is matched in the directory."""
REPLY_SLACK_S = 2.0
"""For the answer, beyond the time that the target has."""
LOADS_PENDING_MAX = 4096
HEATS_PENDING_MAX = 256


@dataclass(frozen=True, slots=True)
class ReplicationSettings:
    limits: ReplicationLimits
    interval_s: float
    window_s: float
    deadline_s: float
    pause_s: float


def settings_of(config: KvmetaConfig) -> ReplicationSettings:
    return ReplicationSettings(
        ReplicationLimits(
            requests_min=config.replication_requests_min,
            copies_max=config.replication_copies_max,
            in_flight_max=config.replication_in_flight_max,
            bytes_per_s=config.replication_bytes_per_s,
            burst_bytes=config.replication_burst_bytes,
            cached_share=config.replication_cached_share,
            silence_s_max=config.silence_s_max,
        ),
        interval_s=config.heat_interval_s,
        window_s=config.replication_window_s,
        deadline_s=config.replication_deadline_s,
        pause_s=config.replication_pause_s,
    )


def configured(settings: ReplicationSettings, config: ClusterConfig) -> ReplicationSettings:
    """`settings` with what `config` sets."""
    limits = settings.limits
    requests_min, copies_max = config.replication_requests_min, config.replication_copies_max
    return replace(
        settings,
        limits=replace(
            limits,
            requests_min=limits.requests_min if requests_min is None else requests_min,
            copies_max=limits.copies_max if copies_max is None else copies_max,
        ),
        window_s=settings.window_s if config.replication_window_s is None else config.replication_window_s,
    )


class Replicator:
    """One event loop's. `start` to `close`."""

    def __init__(
        self,
        bus: Bus,
        directory: Directory,
        heat: HeatCounter,
        duty: Duty,
        settings: ReplicationSettings,
        metrics: KvmetaMetrics,
        log: Logger,
        clock: Callable[[], float],
    ) -> None:
        self._bus = bus
        self._directory = directory
        self._heat = heat
        self._duty = duty
        self._own_settings = settings
        self._settings = settings
        self._metrics = metrics
        self._log = log
        self._clock = clock
        self._window = HeatWindow(settings.window_s)
        self._cluster = ClusterView()
        self._budget = Budget(0.0, clock())
        self._copies = Copies(settings.pause_s)
        self._tasks: tuple[asyncio.Task[None], ...] = ()

    async def start(self) -> None:
        await self._bus.follow(subjects.LOAD_ALL, self._on_load, pending_max=LOADS_PENDING_MAX)
        await self._bus.follow(subjects.KVMETA_HEAT, self._on_heat, pending_max=HEATS_PENDING_MAX)
        self._tasks = (
            asyncio.create_task(self._tell_for_ever()),
            asyncio.create_task(self._duty.run(self._act_for_ever)),
        )

    async def close(self) -> None:
        """Stop acting, and give the duty to another."""
        tasks, self._tasks = self._tasks, ()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def configure(self, config: ClusterConfig) -> None:
        """Take over what the cluster's configuration sets now. Another window begins to count anew."""
        before, self._settings = self._settings, configured(self._own_settings, config)
        if self._settings.window_s != before.window_s:
            self._window = HeatWindow(self._settings.window_s)

    def registry_changed(self, records: Mapping[InstanceId, InstanceRecord]) -> None:
        now_s = self._clock()
        workers = (instance_view(record, now_s) for record in records.values())
        self._cluster = with_instances(self._cluster, (worker for worker in workers if worker is not None))

    def _on_load(self, received: Received) -> None:
        load, envelope = received.body, received.envelope
        if not isinstance(load, LoadSnapshot) or load.instance != envelope.sender:
            raise ProtocolError(f"{envelope.kind} of {envelope.sender} is no load snapshot of its own")
        self._cluster = with_load(self._cluster, load, envelope.incarnation, envelope.seq, self._clock())

    def _on_heat(self, received: Received) -> None:
        heats, envelope = received.body, received.envelope
        if not isinstance(heats, PrefixHeats):
            raise ProtocolError(f"{envelope.kind} of {envelope.sender} tells no heat")
        self._window.add(heard(heats), self._clock())

    async def _tell_for_ever(self) -> None:
        while True:
            await asyncio.sleep(self._settings.interval_s)
            # Nothing is sent while the bus is away: it would wait there and come as if asked for later.
            if self._bus.connected and (heats := self._heat.take(self._clock(), self._settings.window_s)):
                try:
                    await self._bus.publish(subjects.KVMETA_HEAT, told(heats))
                except MoonpoolError as error:
                    self._log.warning("heat not told", error=error)

    async def _act_for_ever(self) -> None:
        """The duty's work. What it began ends with it."""
        self._budget = Budget(0.0, self._clock())
        self._metrics.replication_duty.set(1)
        try:
            async with asyncio.TaskGroup() as group:
                while True:
                    for replication in self._next_round():
                        self._copies.begin(replication)
                        group.create_task(self._copy(replication))
                    await asyncio.sleep(self._settings.interval_s)
        finally:
            # Those that were cancelled before they ran did not end themselves.
            self._copies.end_all(self._clock())
            self._metrics.replication_duty.set(0)

    def _next_round(self) -> tuple[Replication, ...]:
        if not self._duty.held or not self._bus.connected:
            return ()
        now_s = self._clock()
        limits = self._settings.limits
        hot = self._window.hot(limits.requests_min, HOT_PREFIXES_MAX, now_s)
        self._metrics.hot_prefixes.set(len(hot))
        self._metrics.replication_rounds.inc()
        self._copies.forget(now_s)
        view = ReplicationView(
            cluster=self._cluster,
            prefixes=tuple(
                HotPrefix(asked.block_hashes, asked.requests, self._directory.match(asked.block_hashes))
                for asked in hot
            ),
            budget=self._budget,
            in_flight=self._copies.in_flight,
            settling=self._copies.settling,
            avoided=self._copies.avoided,
        )
        plan = replicate(view, limits, now_s)
        self._budget = plan.budget
        return plan.replications

    async def _copy(self, replication: Replication) -> None:
        outcome = "failed"
        try:
            outcome = await self._told(replication)
        except (RetryableError, ProtocolError) as error:
            self._log.warning("prefix not copied", **_fields(replication), error=error)
        except Exception as error:
            self._log.exception("prefix not copied", error, **_fields(replication))
        finally:
            self._copies.end(replication, self._clock(), done=outcome == "done")
            self._metrics.replications.labels(outcome).inc()

    async def _told(self, replication: Replication) -> str:
        """How it went, once the target answered."""
        order = Replicate(
            replication.fingerprint,
            replication.source,
            replication.block_hashes,
            self._settings.deadline_s,
        )
        answer = await self._bus.request(
            subjects.instance(replication.target),
            order,
            timeout_s=self._settings.deadline_s + REPLY_SLACK_S,
        )
        if not isinstance(answer, Replicated):
            raise ProtocolError(f"{replication.target} answered with {type(answer).__name__}")
        self._metrics.replicated_bytes.inc(max(0, answer.read_bytes))
        wanted_blocks = len(replication.block_hashes) // HASH_BYTES
        self._log.info(
            "prefix copied",
            **_fields(replication),
            held_blocks=answer.held_blocks,
            read_bytes=answer.read_bytes,
            detail=answer.detail,
        )
        return "done" if answer.held_blocks >= wanted_blocks else "partial"


def _fields(replication: Replication) -> dict[str, object]:
    return {
        "source": replication.source,
        "target": replication.target,
        "blocks": replication.new_blocks,
        "last_hash": replication.block_hashes[-HASH_BYTES:].hex(),
    }
