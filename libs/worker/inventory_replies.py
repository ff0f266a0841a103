"""How a worker answers who asks for its inventory: in windows of chunks, each asked for by itself.

The asker sets the pace: an inventory of a million blocks is 43 MB on the wire, and a bus cuts off whoever
falls behind by as much. What looks at every block is done in a thread, and chunks are made one by one as
they are sent, so that the event loop is never stopped for long. Knows the pool, not the bus.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass

from cluster.errors import ProtocolError, RetryableError
from cluster.messages import InventoryChunk, InventoryRequest
from kvindex.core import InstanceId, Tier
from kvindex.runs import HeldPart
from kvpool import BlockPool

BLOCKS_PER_CHUNK = 8192
KEPT_MAX = 8
"""Inventories of which more is to be asked, one for each asker; past it the oldest goes, and is asked for
again from the start."""
KEPT_S_MAX = 30.0
"""Whoever does not go on asking for so long has gone."""


@dataclass(frozen=True, slots=True)
class PackedInventory:
    """All that was held as of an event; at least one part, which may be empty."""

    as_of_number: int
    parts: Sequence[HeldPart]

    def chunks(self, first_chunk: int, chunks_max: int) -> Iterator[InventoryChunk]:
        for chunk in range(first_chunk, min(first_chunk + chunks_max, len(self.parts))):
            run = self.parts[chunk].pack()
            yield InventoryChunk(
                self.as_of_number, chunk, len(self.parts), run.tier, run.block_hashes, run.parents
            )


class InventoryReplies:
    """For one event loop."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._kept: dict[InstanceId, PackedInventory] = {}
        self._ends: dict[InstanceId, asyncio.TimerHandle] = {}
        """Of those that are kept."""

    async def answer(self, asker: InstanceId, request: InventoryRequest) -> AsyncIterator[InventoryChunk]:
        """The chunks that are asked for. RetryableError where they are of an inventory that is not kept,
        ProtocolError where there are none such."""
        if request.first_chunk < 0 or request.chunks_max < 0:
            raise ProtocolError(
                f"first_chunk: {request.first_chunk}, chunks_max: {request.chunks_max}; at least 0"
            )
        if request.first_chunk == 0:
            inventory = await self._new()
        else:
            inventory = self._kept_for(asker, request)
        if request.first_chunk >= len(inventory.parts):
            raise ProtocolError(f"first_chunk: {request.first_chunk}, there are {len(inventory.parts)}")
        chunks_max = request.chunks_max or len(inventory.parts)
        if request.first_chunk + chunks_max < len(inventory.parts):
            self._keep(asker, inventory)
        else:
            self._forget(asker, inventory)
        return _one_by_one(inventory.chunks(request.first_chunk, chunks_max))

    async def _new(self) -> PackedInventory:
        as_of_number, snapshot = self._pool.inventory_snapshot()
        parts = await asyncio.to_thread(snapshot.parts, BLOCKS_PER_CHUNK)
        return PackedInventory(as_of_number, parts or [HeldPart(Tier.DRAM, (), ())])

    def _kept_for(self, asker: InstanceId, request: InventoryRequest) -> PackedInventory:
        inventory = self._kept.get(asker)
        if inventory is None or inventory.as_of_number != request.as_of_number:
            raise RetryableError(f"the inventory as of {request.as_of_number} is kept no more; ask anew")
        return inventory

    def _keep(self, asker: InstanceId, inventory: PackedInventory) -> None:
        """Until it was not asked for more for KEPT_S_MAX."""
        self._drop(asker)
        self._kept[asker] = inventory
        self._ends[asker] = asyncio.get_running_loop().call_later(KEPT_S_MAX, self._drop, asker)
        if len(self._kept) > KEPT_MAX:
            self._drop(next(iter(self._kept)))

    def _forget(self, asker: InstanceId, inventory: PackedInventory) -> None:
        if self._kept.get(asker) is inventory:
            self._drop(asker)

    def _drop(self, asker: InstanceId) -> None:
        if self._kept.pop(asker, None) is not None:
            self._ends.pop(asker).cancel()


async def _one_by_one(chunks: Iterator[InventoryChunk]) -> AsyncIterator[InventoryChunk]:
    for chunk in chunks:
        yield chunk
