"""One inventory over the bus: the chunks of an answer, put together and checked."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import cast

from cluster import subjects
from cluster.bus import Bus
from cluster.errors import ProtocolError
from cluster.messages import InventoryChunk, InventoryRequest
from kvhash import HASH_BYTES, BlockHash
from kvindex.core import InstanceId
from kvindex.inventory import HeldBlock
from protocol.inventory import InventoryCame

CHUNKS_MAX = 4096
NO_PARENT = bytes(HASH_BYTES)


async def fetch_inventory(
    bus: Bus, instance: InstanceId, incarnation: int, *, chunk_timeout_s: float
) -> InventoryCame:
    """All that the instance holds.

    Raises RetryableError where an answer or a chunk does not come, ProtocolError where they do not fit
    together.
    """
    replies = bus.request_many(subjects.kv_inventory(instance), InventoryRequest(), timeout_s=chunk_timeout_s)
    chunks: list[InventoryChunk] = []
    async with aclosing(cast(AsyncGenerator[object, None], replies)):
        async for reply in replies:
            chunks.append(_next_chunk(reply, chunks))
            if len(chunks) == chunks[0].chunks:
                break
    blocks = tuple(block for chunk in chunks for block in _blocks_of(chunk))
    return InventoryCame(incarnation, chunks[0].as_of_number, blocks)


def _next_chunk(reply: object, before: list[InventoryChunk]) -> InventoryChunk:
    if not isinstance(reply, InventoryChunk):
        raise ProtocolError(f"{type(reply).__name__} is no inventory chunk")
    first = before[0] if before else reply
    if reply.chunk != len(before):
        raise ProtocolError(f"chunk: {reply.chunk}, expected {len(before)}")
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


def _blocks_of(chunk: InventoryChunk) -> list[HeldBlock]:
    blocks: list[HeldBlock] = []
    for start in range(0, len(chunk.block_hashes), HASH_BYTES):
        block_hash = BlockHash(chunk.block_hashes[start : start + HASH_BYTES])
        parent = BlockHash(chunk.parents[start : start + HASH_BYTES])
        blocks.append((block_hash, None if parent == NO_PARENT else parent, chunk.tier))
    return blocks
