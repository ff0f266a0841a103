"""Which instances are lost (DESIGN §3, 12): their lease is gone and they are silent, or they are silent for
very long, or another process took their name.

Silence counts only while our own bus is connected. `lost` decides, on frozen sightings; `Liveness` keeps
them and tells. Knows no request.
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from cluster import subjects
from cluster.bus import Bus, Received, Subscription
from cluster.errors import ProtocolError
from cluster.logs import Logger
from cluster.messages import InstanceRecord
from cluster.registry import Added, Registry, RegistryEvent, Removed, Replaced
from kvindex.core import InstanceId
from policy.core import LoadSnapshot

CHECK_S = 0.5
LOADS_PENDING_MAX = 4096
OTHER_PROCESS = "another process has its name"


@dataclass(frozen=True, slots=True)
class SilenceLimits:
    silence_s_max: float = 5.0
    """For an instance whose lease is gone."""
    dead_s_max: float = 60.0
    """For any."""


@dataclass(frozen=True, slots=True)
class Sighting:
    """The last sign of one process, and whether the registry has it."""

    incarnation: int
    heard_at_s: float
    registered: bool


def lost(
    sightings: Mapping[InstanceId, Sighting], now_s: float, limits: SilenceLimits
) -> tuple[InstanceId, ...]:
    """Who is to be taken as dead now, given that our bus was connected all the time since."""

    def patience_s(sighting: Sighting) -> float:
        return limits.dead_s_max if sighting.registered else limits.silence_s_max

    return tuple(
        instance
        for instance, sighting in sightings.items()
        if now_s - sighting.heard_at_s > patience_s(sighting)
    )


class Liveness:
    """Calls `on_lost(instance)` in the event loop, once per loss."""

    def __init__(
        self,
        bus: Bus,
        registry: Registry,
        log: Logger,
        limits: SilenceLimits,
        on_lost: Callable[[InstanceId], None],
    ) -> None:
        self._bus = bus
        self._registry = registry
        self._log = log
        self._limits = limits
        self._on_lost = on_lost
        self._sightings: dict[InstanceId, Sighting] = {}
        self._subscription: Subscription | None = None
        self._checking: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._registry.on_change(self._registry_changed)
        self._bus.on_connection(self._connection_changed)
        for record in self._registry.instances.values():
            self._registered(record)
        self._subscription = await self._bus.follow(
            subjects.LOAD_ALL, self._load_came, pending_max=LOADS_PENDING_MAX
        )
        self._checking = asyncio.create_task(self._check())

    async def close(self) -> None:
        if self._checking is not None:
            self._checking.cancel()
            await asyncio.wait({self._checking})
        if self._subscription is not None:
            await self._subscription.unsubscribe()

    def _load_came(self, received: Received) -> None:
        # Who is neither registered nor waited for gets no sighting: that bounds them.
        envelope = received.envelope
        if not isinstance(received.body, LoadSnapshot):
            raise ProtocolError(f"{envelope.kind} of {envelope.sender} is no load snapshot")
        known = self._sightings.get(envelope.sender)
        record = self._registry.instances.get(envelope.sender)
        if known is not None and known.incarnation == envelope.incarnation:
            self._sightings[envelope.sender] = replace(known, heard_at_s=_now_s())
        elif known is None and record is not None and record.incarnation == envelope.incarnation:
            self._registered(record)

    def _registry_changed(self, event: RegistryEvent) -> None:
        match event:
            case Removed(record):
                sighting = self._sightings.get(record.instance)
                if sighting is not None:
                    self._sightings[record.instance] = replace(sighting, registered=False)
            case Added(record):
                # The name may come back after its lease ended and before its silence was noticed.
                known = self._sightings.get(record.instance)
                if known is not None and known.incarnation != record.incarnation:
                    self._tell(record.instance, OTHER_PROCESS)
                self._registered(record)
            case Replaced(old, record):
                if old.incarnation != record.incarnation:
                    self._tell(record.instance, OTHER_PROCESS)
                self._registered(record)

    def _connection_changed(self, connected: bool) -> None:
        """After an outage of our own, everyone's silence starts anew."""
        if connected:
            for instance, sighting in self._sightings.items():
                self._sightings[instance] = replace(sighting, heard_at_s=_now_s())

    def _registered(self, record: InstanceRecord) -> None:
        self._sightings[record.instance] = Sighting(record.incarnation, _now_s(), registered=True)

    async def _check(self) -> None:
        while True:
            await asyncio.sleep(CHECK_S)
            if not self._bus.connected:
                continue
            for instance in lost(self._sightings, _now_s(), self._limits):
                del self._sightings[instance]
                self._tell(instance, "silent")

    def _tell(self, instance: InstanceId, reason: str) -> None:
        self._log.warning("instance lost", lost=instance, reason=reason)
        self._on_lost(instance)


def _now_s() -> float:
    return asyncio.get_running_loop().time()
