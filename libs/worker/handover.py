"""Streams one request's KV to decode, layer by layer, while the next layer computes (DESIGN §3 step 7).

Owns which bytes go when; kvtransfer owns how. A block goes once: whole where it was cached, else as its
layers are computed, so many in a write that it is worth one, the last partial block with the last chunk.
"""

import asyncio
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cluster.messages import Reserved
from engine.layout import KVLayout
from kvhash import BLOCK_TOKENS
from kvtransfer import Endpoint, Peer, Ranges, Region, RetryableTransferError, Transferred, checksum
from protocol.prefill import HandoverDone

WRITE_S_MAX = 60.0
"""A write that is not acknowledged by then has failed, however often it was made again."""
WRITE_BYTES_MIN = 4 << 20
"""Layers are gathered up to this much: a write costs both processes some 0.2 ms whatever its size, which the
engine's threads miss where cores are few, and this much takes about a millisecond to move."""
WRITE_TRIES_MAX = 3
"""A write whose transport fails is made again, over the next one that works."""


@dataclass(frozen=True, slots=True)
class Source:
    """Where the bytes are here."""

    endpoint: Endpoint
    region: Region
    layout: KVLayout
    checksums: bool
    write_bytes_min: int = WRITE_BYTES_MIN
    measured: Callable[[int], AbstractContextManager[None]] = lambda transfer_bytes: nullcontext()
    """Held around each write of so many bytes."""


class Handover:
    """Writes of one request to one reservation. Methods are for the event loop's thread."""

    def __init__(
        self, source: Source, peer: Peer, reserved: Reserved, block_ids: list[int], tokens: int
    ) -> None:
        self._source = source
        self._peer = peer
        self._reserved = reserved
        self._tokens = tokens
        self._blocks = -(-tokens // BLOCK_TOKENS)
        self._held_blocks = min(reserved.held_blocks, self._blocks)
        self._local_ids = np.asarray(block_ids[: self._blocks], np.int64)
        self._remote_ids = np.frombuffer(reserved.block_ids, "<i4").astype(np.int64)[: self._blocks]
        self._sent_blocks = self._held_blocks
        self._unsent_layer = 0
        self._writes: list[asyncio.Task[Transferred]] = []

    def send_cached(self, cached_blocks: int) -> None:
        """Blocks of the local prefix go whole, as far as decode does not hold them."""
        if cached_blocks > self._sent_blocks:
            self._write(self._sent_blocks, cached_blocks, 0, self._source.layout.block_bytes)
            self._sent_blocks = cached_blocks

    def layer_done(self, layer: int, computed_tokens: int, last_layer: bool) -> None:
        """`layer` of the blocks that `computed_tokens` tokens fill may go; of all, at the prompt's end.

        Called for each layer in turn, so the layers that wait are those from `_unsent_layer` on: side by
        side in each block, they are one piece of it.
        """
        complete = computed_tokens == self._tokens
        end_block = self._blocks if complete else computed_tokens // BLOCK_TOKENS
        if end_block > self._sent_blocks:
            offset, _ = self._source.layout.layer_range(self._unsent_layer)
            last_offset, last_length = self._source.layout.layer_range(layer)
            length = last_offset + last_length - offset
            if last_layer or length * (end_block - self._sent_blocks) >= self._source.write_bytes_min:
                self._write(self._sent_blocks, end_block, offset, length)
                self._unsent_layer = 0 if last_layer else layer + 1
            if last_layer:
                self._sent_blocks = end_block

    async def finish(self) -> HandoverDone:
        """Wait for every write, then checksum what was sent. Raises TransferError."""
        bytes_written = sum(done.payload_bytes for done in await asyncio.gather(*self._writes))
        digest = ""
        if self._source.checksums:
            block_bytes = self._source.layout.block_bytes
            sent = block_slices(self._local_ids[self._held_blocks :], block_bytes, 0, block_bytes)
            digest = await asyncio.to_thread(checksum, self._source.region, sent)
        return HandoverDone(self._blocks - self._held_blocks, bytes_written, digest)

    async def abort(self) -> None:
        """No write reads our blocks after this returns."""
        for write in self._writes:
            write.cancel()
        await asyncio.gather(*self._writes, return_exceptions=True)

    def _write(self, first_block: int, end_block: int, offset: int, length: int) -> None:
        block_bytes = self._source.layout.block_bytes
        local = block_slices(self._local_ids[first_block:end_block], block_bytes, offset, length)
        remote = block_slices(self._remote_ids[first_block:end_block], block_bytes, offset, length)
        self._writes.append(asyncio.create_task(self._written(local, remote)))

    async def _written(self, local: Ranges, remote: Ranges) -> Transferred:
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + WRITE_S_MAX
        tries_left = WRITE_TRIES_MAX
        write_bytes = int(local[:, 1].sum())
        while True:
            tries_left -= 1
            try:
                with self._source.measured(write_bytes):
                    return await self._peer.write(
                        self._source.region,
                        local,
                        self._reserved.grant,
                        remote,
                        timeout_s=deadline_s - loop.time(),
                    )
            except RetryableTransferError:
                if not tries_left or loop.time() >= deadline_s:
                    raise


def block_ranges(block_ids: list[int], block_bytes: int) -> Ranges:
    """(offset, length) of whole blocks in the arena."""
    return block_slices(np.asarray(block_ids, np.int64), block_bytes, 0, block_bytes)


def block_slices(block_ids: npt.NDArray[np.int64], block_bytes: int, offset: int, length: int) -> Ranges:
    """(offset, length) of the same slice of each block, in the arena."""
    ranges = np.empty((len(block_ids), 2), np.int64)
    ranges[:, 0] = block_ids * block_bytes + offset
    ranges[:, 1] = length
    return ranges
