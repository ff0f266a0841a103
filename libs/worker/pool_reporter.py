"""Tells the directory what this instance's pool holds: numbered events, and the inventory on request."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress

from cluster import subjects
from cluster.bus import Bus, Received, Subscription
from cluster.errors import MoonpoolError, ProtocolError
from cluster.logs import Logger
from cluster.messages import BlockEvents, InventoryChunk, InventoryRequest
from kvindex.core import BlockEvent
from kvpool import BlockPool
from worker.inventory_replies import InventoryReplies

HEARTBEAT_S = 1.0
"""At least this often the next event number is published, so that a lost last event shows."""
EVENTS_PER_MESSAGE_MAX = 512
HASH_BYTES_PER_MESSAGE_MAX = 192 * 1024
INVENTORIES_AT_ONCE_MAX = 4
"""Several kvmeta may ask at once; those beyond wait their turn."""


class PoolReporter:
    def __init__(self, bus: Bus, pool: BlockPool, log: Logger) -> None:
        self._bus = bus
        self._pool = pool
        self._log = log
        self._inventories = InventoryReplies(pool)
        self._changed = asyncio.Event()
        self._subscription: Subscription | None = None

    async def start(self) -> None:
        subject = subjects.kv_inventory(self._bus.instance)
        self._subscription = await self._bus.subscribe(
            subject, self._inventory, concurrency_max=INVENTORIES_AT_ONCE_MAX
        )

    async def close(self) -> None:
        if self._subscription is not None:
            await self._subscription.unsubscribe()

    def changed(self) -> None:
        """The pool may have stored or dropped blocks: if it did, publish soon."""
        self._changed.set()

    async def run(self) -> None:
        """Publish until cancelled. Events that are lost on the way leave a gap, which heals itself."""
        loop = asyncio.get_running_loop()
        heartbeat_at_s = loop.time()
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout_at(heartbeat_at_s):
                    await self._changed.wait()
            self._changed.clear()
            first_number, events = self._pool.take_events()
            if not events and loop.time() < heartbeat_at_s:
                continue
            heartbeat_at_s = loop.time() + HEARTBEAT_S
            for message in event_messages(first_number, events):
                try:
                    await self._bus.publish(subjects.kv_events(self._bus.instance), message)
                except MoonpoolError as error:
                    self._log.warning("block events lost", error=error)

    async def _inventory(self, received: Received) -> AsyncIterator[InventoryChunk]:
        if not isinstance(received.body, InventoryRequest):
            raise ProtocolError(f"{received.envelope.kind} asks for no inventory")
        return await self._inventories.answer(received.envelope.sender, received.body)


def event_messages(first_number: int, events: tuple[BlockEvent, ...]) -> Iterator[BlockEvents]:
    """`events` in messages of bounded size, numbered on; one empty message where there are none."""
    batch: list[BlockEvent] = []
    batch_bytes = 0
    for event in events:
        full = len(batch) == EVENTS_PER_MESSAGE_MAX
        if batch and (full or batch_bytes + len(event.block_hashes) > HASH_BYTES_PER_MESSAGE_MAX):
            yield BlockEvents(first_number, tuple(batch))
            first_number += len(batch)
            batch, batch_bytes = [], 0
        batch.append(event)
        batch_bytes += len(event.block_hashes)
    yield BlockEvents(first_number, tuple(batch))
