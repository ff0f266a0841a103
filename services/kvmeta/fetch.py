"""One inventory over the bus: the chunks of an answer, checked and handed on as they come."""

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import cast

from cluster import subjects
from cluster.bus import Bus
from cluster.errors import ProtocolError
from cluster.messages import InventoryChunk, InventoryRequest
from kvhash import HASH_BYTES
from kvindex.core import HeldRun, InstanceId
from protocol.inventory import InventoryCame

CHUNKS_MAX = 4096
WINDOW_CHUNKS = 8
"""Asked for at once: 2.8 MB. The bus cuts off whoever falls 64 MB behind, so the asker sets the pace."""


async def fetch_inventory(
    bus: Bus,
    instance: InstanceId,
    incarnation: int,
    take: Callable[[HeldRun], None],
    *,
    chunk_timeout_s: float,
) -> InventoryCame:
    """Give all that the instance holds to `take`, chunk by chunk; it is whole once this has returned.

    Raises RetryableError where an answer or a chunk does not come, ProtocolError where they do not fit
    together, and what `take` raises.
    """
    first: InventoryChunk | None = None
    came = 0
    while first is None or came < first.chunks:
        request = InventoryRequest(came, WINDOW_CHUNKS, 0 if first is None else first.as_of_number)
        replies = bus.request_many(subjects.kv_inventory(instance), request, timeout_s=chunk_timeout_s)
        window_end = came + WINDOW_CHUNKS
        async with aclosing(cast(AsyncGenerator[object, None], replies)):
            async for reply in replies:
                chunk = _checked(reply, first, came)
                first = first or chunk
                came += 1
                take(HeldRun(chunk.tier, chunk.block_hashes, chunk.parents))
                if came == min(window_end, chunk.chunks):
                    break
    return InventoryCame(incarnation, first.as_of_number)


def _checked(reply: object, first: InventoryChunk | None, came: int) -> InventoryChunk:
    if not isinstance(reply, InventoryChunk):
        raise ProtocolError(f"{type(reply).__name__} is no inventory chunk")
    first = first or reply
    if reply.chunk != came:
        raise ProtocolError(f"chunk: {reply.chunk}, expected {came}")
    if not 1 <= reply.chunks <= CHUNKS_MAX or reply.chunks != first.chunks:
        raise ProtocolError(f"chunks: {reply.chunks}, must be the same in all and at most {CHUNKS_MAX}")
    if reply.as_of_number != first.as_of_number:
        raise ProtocolError(f"as_of_number: {reply.as_of_number} after {first.as_of_number} in one answer")
    if len(reply.block_hashes) % HASH_BYTES or len(reply.parents) != len(reply.block_hashes):
        raise ProtocolError(
            f"block_hashes: {len(reply.block_hashes)} bytes, parents: {len(reply.parents)}; must be "
            f"{HASH_BYTES} a block each"
        )
    return reply
