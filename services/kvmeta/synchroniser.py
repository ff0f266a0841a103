"""Keeps the directory true to every instance: carries out what `protocol.inventory` decides.

One machine an instance. Events come in order over one subscription; an inventory is asked for in a task
of its own, so that a slow instance delays nobody else. It is built up beside what is known, chunk by chunk,
and shown when it is whole; what is dropped or replaced is swept up a few blocks at a time: matches are
answered in between.
"""

import asyncio
from collections.abc import Callable, Mapping
from functools import partial

from cluster import subjects
from cluster.bus import Bus, Received
from cluster.errors import ProtocolError, RetryableError
from cluster.logs import Logger
from cluster.messages import BlockEvents, InstanceRecord
from kvhash import HashInputError
from kvindex.core import InstanceId
from kvindex.directory import Directory
from kvindex.inventory import InventoryError
from kvindex.places import Replacement
from kvmeta.fetch import fetch_inventory
from kvmeta.metrics import KvmetaMetrics
from protocol.inventory import (
    Appeared,
    Apply,
    AskInventory,
    Drop,
    Effect,
    Event,
    EventsCame,
    InventoryCame,
    Outcome,
    Replace,
    Sync,
    TimePassed,
    begin,
    step,
)

EVENTS_PENDING_MAX = 65_536
"""Event messages waiting to be applied; those beyond are dropped, which shows as a gap."""
INVENTORIES_IN_FLIGHT_MAX = 8
"""Asked for at once, each window by window (`kvmeta.fetch`); others wait."""
SWEEP_BLOCKS = 4096
"""Looked at in one go: a millisecond or two."""
TICK_INTERVAL_S = 0.5
"""How often machines are told that time passes; their own retry interval is longer."""


class Synchroniser:
    """Owns the directory's writes. One event loop's."""

    def __init__(
        self,
        bus: Bus,
        directory: Directory,
        metrics: KvmetaMetrics,
        log: Logger,
        clock: Callable[[], float],
        *,
        chunk_timeout_s: float,
    ) -> None:
        self._bus = bus
        self._directory = directory
        self._metrics = metrics
        self._log = log
        self._clock = clock
        self._chunk_timeout_s = chunk_timeout_s
        self._syncs: dict[InstanceId, Sync] = {}
        self._fetches: dict[InstanceId, asyncio.Task[None]] = {}
        self._progress = asyncio.Event()
        self._fetch_places = asyncio.Semaphore(INVENTORIES_IN_FLIGHT_MAX)
        self._left_over = asyncio.Event()
        self._running: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        await self._bus.follow(subjects.KV_EVENTS_ALL, self._on_events, pending_max=EVENTS_PENDING_MAX)
        self._running = [
            asyncio.create_task(self._tick_for_ever()),
            asyncio.create_task(self._sweep_for_ever()),
        ]

    async def close(self) -> None:
        tasks = [*self._fetches.values(), *self._running]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def registry_changed(self, records: Mapping[InstanceId, InstanceRecord]) -> None:
        """Follow the instances that hold blocks, and only them."""
        holders = {name: record for name, record in records.items() if record.blocks > 0}
        for name in self._syncs.keys() - holders.keys():
            del self._syncs[name]
            self._cancel_fetch(name)
            self._drop(name)
            self._log.info("instance dropped", peer=name)
        for name, record in holders.items():
            known = self._syncs.get(name)
            if known is None:
                self._take(name, begin(record.incarnation, self._clock()))
            else:
                if known.incarnation != record.incarnation:
                    self._cancel_fetch(name)
                self._step(name, Appeared(record.incarnation))
        self._report()

    def unsynchronised(self) -> frozenset[InstanceId]:
        """Instances of which the directory is not known to be true."""
        return frozenset(name for name, sync in self._syncs.items() if not sync.synchronised)

    async def synchronised(self, timeout_s: float) -> frozenset[InstanceId]:
        """Return when the directory is true to all instances of the registry, or after `timeout_s`;
        says which it is not true to."""
        try:
            async with asyncio.timeout(timeout_s):
                while self.unsynchronised():
                    self._progress.clear()
                    await self._progress.wait()
        except TimeoutError:
            pass
        return self.unsynchronised()

    def tick(self) -> None:
        for name in tuple(self._syncs):
            self._step(name, TimePassed())

    async def _tick_for_ever(self) -> None:
        while True:
            await asyncio.sleep(TICK_INTERVAL_S)
            self.tick()

    async def _sweep_for_ever(self) -> None:
        while True:
            await self._left_over.wait()
            self._left_over.clear()
            more = True
            while more:
                more = self._directory.sweep(SWEEP_BLOCKS)
                await asyncio.sleep(0)

    def _on_events(self, received: Received) -> None:
        body, envelope = received.body, received.envelope
        if not isinstance(body, BlockEvents) or received.subject != subjects.kv_events(envelope.sender):
            raise ProtocolError(f"{envelope.kind} of {envelope.sender} tells no block events of its own")
        if envelope.sender not in self._syncs:
            # Not in the registry yet: its inventory, asked for when it is, will say this too.
            return
        self._step(envelope.sender, EventsCame(envelope.incarnation, body.first_number, body.events))

    def _step(self, instance: InstanceId, event: Event, inventory: Replacement | None = None) -> None:
        self._take(instance, step(self._syncs[instance], event, self._clock()), inventory)

    def _take(self, instance: InstanceId, outcome: Outcome, inventory: Replacement | None = None) -> None:
        """`inventory` is what an effect of InventoryCame replaces the instance's blocks by."""
        before = self._syncs.get(instance)
        sync, effects = outcome
        self._syncs[instance] = sync
        try:
            for effect in effects:
                self._carry_out(instance, effect, inventory)
        except (InventoryError, HashInputError) as error:
            self._contradicted(instance, error)
        if effects or before is None or before.synchronised != sync.synchronised:
            self._report()

    def _carry_out(self, instance: InstanceId, effect: Effect, inventory: Replacement | None) -> None:
        match effect:
            case AskInventory():
                self._fetch(instance)
            case Apply(events):
                for event in events:
                    self._directory.apply(instance, event)
                    self._metrics.events.inc()
            case Replace():
                assert inventory is not None, "an inventory came without its blocks"
                self._directory.commit(inventory)
                self._left_over.set()
            case Drop():
                self._drop(instance)

    def _drop(self, instance: InstanceId) -> None:
        self._directory.drop(instance)
        self._left_over.set()

    def _contradicted(self, instance: InstanceId, error: Exception) -> None:
        """Start over with an inventory, but only when time has passed: it may be what is wrong."""
        self._metrics.contradictions.inc()
        self._log.warning("instance contradicts itself", peer=instance, error=error)
        fresh, _ = begin(self._syncs[instance].incarnation, self._clock())
        self._syncs[instance] = fresh

    def _fetch(self, instance: InstanceId) -> None:
        """One at a time for an instance; another one asked for meanwhile is the same question."""
        if instance in self._fetches:
            return
        task = asyncio.create_task(self._fetch_and_take(instance, self._syncs[instance].incarnation))
        self._fetches[instance] = task
        task.add_done_callback(lambda done: self._fetched(instance, done))

    async def _fetch_and_take(self, instance: InstanceId, incarnation: int) -> None:
        async with self._fetch_places:
            inventory = self._directory.replacement(instance)
            try:
                came = await fetch_inventory(
                    self._bus,
                    instance,
                    incarnation,
                    partial(self._directory.extend, inventory),
                    chunk_timeout_s=self._chunk_timeout_s,
                )
                self._inventory_came(instance, came, inventory)
            except (RetryableError, ProtocolError) as error:
                self._metrics.inventories.labels("failed").inc()
                self._log.info("inventory did not come", peer=instance, error=error)
            except (InventoryError, HashInputError) as error:
                self._metrics.inventories.labels("refused").inc()
                self._contradicted(instance, error)
            finally:
                self._directory.abandon(inventory)
                self._left_over.set()

    def _inventory_came(self, instance: InstanceId, came: InventoryCame, inventory: Replacement) -> None:
        self._metrics.inventories.labels("came").inc()
        self._log.info("inventory came", peer=instance, blocks=inventory.blocks)
        # Before what follows from it: the machine may at once ask for another one.
        self._fetches.pop(instance, None)
        self._step(instance, came, inventory)

    def _fetched(self, instance: InstanceId, task: "asyncio.Task[None]") -> None:
        if self._fetches.get(instance) is task:
            del self._fetches[instance]
        if not task.cancelled() and (error := task.exception()) is not None:
            self._log.exception("inventory not taken", error, peer=instance)

    def _cancel_fetch(self, instance: InstanceId) -> None:
        task = self._fetches.pop(instance, None)
        if task is not None:
            task.cancel()

    def _report(self) -> None:
        unsynchronised = len(self.unsynchronised())
        self._metrics.blocks.set(self._directory.blocks())
        self._metrics.instances.labels("synchronised").set(len(self._syncs) - unsynchronised)
        self._metrics.instances.labels("unsynchronised").set(unsynchronised)
        self._progress.set()
