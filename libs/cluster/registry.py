"""Who is in the cluster: the watched instances of the control plane, as every service sees them.

Keeps the last known registry while the control plane is away. What is missing from the listing after an
outage stays for `grace_s`, because everyone who lives registers again in that time.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from cluster import keys
from cluster.compatibility import mismatch, older
from cluster.control import ControlPlane, Deleted, Listing, Put, WatchEvent
from cluster.errors import DeadlineError, ProtocolError
from cluster.logs import Logger
from cluster.messages import InstanceRecord
from cluster.metrics import ServiceMetrics
from cluster.wire import decode_record
from kvindex.core import InstanceId
from policy.core import Role


@dataclass(frozen=True, slots=True)
class Added:
    record: InstanceRecord


@dataclass(frozen=True, slots=True)
class Removed:
    """Its lease ended. That alone does not mean that the instance is lost (DESIGN §3, 12)."""

    record: InstanceRecord


@dataclass(frozen=True, slots=True)
class Replaced:
    """The same name with another record: another incarnation is another process."""

    old: InstanceRecord
    new: InstanceRecord


RegistryEvent = Added | Removed | Replaced
Instances = Mapping[InstanceId, InstanceRecord]


class Registry:
    """For the event loop's thread. Runs between `start` and `close`."""

    def __init__(
        self, control: ControlPlane, metrics: ServiceMetrics, log: Logger, *, grace_s: float
    ) -> None:
        self._control = control
        self._metrics = metrics
        self._log = log
        self._grace_s = grace_s
        self._instances: dict[InstanceId, InstanceRecord] = {}
        self._view = MappingProxyType(self._instances)
        self._callbacks: list[Callable[[RegistryEvent], None]] = []
        self._changed = asyncio.Event()
        self._listed = asyncio.Event()
        self._grace: dict[InstanceId, asyncio.TimerHandle] = {}
        self._task: asyncio.Task[None] | None = None

    @property
    def instances(self) -> Instances:
        """A live view, read-only."""
        return self._view

    def on_change(self, callback: Callable[[RegistryEvent], None]) -> None:
        """Call `callback(event)` in the event loop, after `instances` shows the change."""
        self._callbacks.append(callback)

    async def start(self, *, timeout_s: float) -> None:
        """Return when the first listing is there; DeadlineError where it does not come in time."""
        self._task = asyncio.create_task(self._follow())
        await self._within(self._listed.wait(), timeout_s, "the control plane listed no instances")

    async def wait_for(self, predicate: Callable[[Instances], bool], timeout_s: float) -> None:
        """Return as soon as the registry satisfies `predicate`; DeadlineError where it does not."""
        await self._within(self._satisfied(predicate), timeout_s, "the registry did not become as awaited")

    async def close(self) -> None:
        for timer in self._grace.values():
            timer.cancel()
        self._grace.clear()
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    async def _within(self, waiting: Awaitable[object], timeout_s: float, what: str) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await waiting
        except TimeoutError:
            raise DeadlineError(f"{what} within {timeout_s:g} s") from None

    async def _satisfied(self, predicate: Callable[[Instances], bool]) -> None:
        while not predicate(self._view):
            self._changed.clear()
            await self._changed.wait()

    async def _follow(self) -> None:
        async for event in self._control.watch_prefix(keys.INSTANCES):
            try:
                self._apply(event)
            except Exception as error:
                self._log.exception("registry event failed", error)

    def _apply(self, event: WatchEvent) -> None:
        match event:
            case Listing(entries):
                self._apply_listing(entries)
            case Put(key, value):
                self._put(key, value)
            case Deleted(key):
                self._remove(_instance_of(key))

    def _apply_listing(self, entries: dict[str, bytes]) -> None:
        for key, value in entries.items():
            self._put(key, value)
        listed = {_instance_of(key) for key in entries}
        for instance in self._instances.keys() - listed - self._grace.keys():
            loop = asyncio.get_running_loop()
            self._grace[instance] = loop.call_later(self._grace_s, self._remove, instance)
        self._listed.set()

    def _put(self, key: str, value: bytes) -> None:
        instance = _instance_of(key)
        try:
            record = decode_record(value, InstanceRecord)
        except ProtocolError as error:
            self._log.warning("registration ignored", key=key, error=error)
            return
        if record.instance != instance:
            self._log.warning("registration ignored", key=key, error=f"it names {record.instance}")
            return
        self._end_grace(instance)
        old = self._instances.get(instance)
        if old == record:
            return
        self._instances[instance] = record
        misfit = mismatch(record, (other for other in self._instances.values() if older(other, record)))
        if misfit is not None:
            self._log.warning("a registered instance does not fit", peer=instance, reason=str(misfit))
        self._tell(Added(record) if old is None else Replaced(old, record))

    def _remove(self, instance: InstanceId) -> None:
        self._end_grace(instance)
        record = self._instances.pop(instance, None)
        if record is not None:
            self._tell(Removed(record))

    def _end_grace(self, instance: InstanceId) -> None:
        timer = self._grace.pop(instance, None)
        if timer is not None:
            timer.cancel()

    def _tell(self, event: RegistryEvent) -> None:
        counts = Counter(role for record in self._instances.values() for role in record.roles)
        for role in Role:
            self._metrics.registry_instances.labels(role.value).set(counts[role])
        self._changed.set()
        for callback in self._callbacks:
            try:
                callback(event)
            except Exception as error:
                self._log.exception("registry callback failed", error)


def _instance_of(key: str) -> InstanceId:
    return InstanceId(key.removeprefix(keys.INSTANCES))
