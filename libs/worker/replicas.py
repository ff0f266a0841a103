"""Brings in a prefix that is asked for everywhere, before a request here asks (DESIGN §3 step 6).

Carries out what the holder of the replication duty says, as a read like any other. The blocks end up cached:
they are the first to go where requests need the room, and replicas never take it from them.
"""

from collections.abc import Mapping

from cluster.bus import Handler, Received
from cluster.errors import ProtocolError
from cluster.messages import MATCH_BLOCKS_MAX, Replicate, Replicated
from kvhash import HASH_BYTES, BlockHash, unpack
from worker.node import Node

REPLICAS_MAX = 2
"""Brought in at once; more are refused, whoever asks comes again if they are still hot."""


class Replicas:
    """All methods are for the event loop's thread."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._running = 0
        self._draining = False

    def handlers(self) -> Mapping[type, Handler]:
        return {Replicate: self._on_replicate}

    def refuse_new(self) -> None:
        """From now on nothing is brought in that no request asked for."""
        self._draining = True

    async def _on_replicate(self, received: Received) -> Replicated:
        """ProtocolError for what no instance would carry out."""
        asked = received.body
        assert isinstance(asked, Replicate)
        hashes = _checked_hashes(asked)
        refusal = self._refusal(asked, hashes)
        if refusal:
            return Replicated(self._held_blocks(hashes), 0, refusal)
        self._running += 1
        try:
            return await self._replicate(asked, hashes)
        finally:
            self._running -= 1

    async def _replicate(self, asked: Replicate, hashes: list[BlockHash]) -> Replicated:
        node = self._node
        ends_at_s = node.now_s() + asked.deadline_s
        fetched = await node.fetch.bring(hashes, asked.source, len(hashes), ends_at_s, whatever_it_costs=True)
        node.pool.release(fetched.block_ids)
        node.pool_changed()
        read_bytes = fetched.read_blocks * node.layout.block_bytes
        return Replicated(self._held_blocks(hashes), read_bytes, fetched.detail)

    def _refusal(self, asked: Replicate, hashes: list[BlockHash]) -> str:
        """Why not now; empty where it may begin."""
        node = self._node
        if asked.fingerprint != node.model.fingerprint:
            return f"fingerprint is {asked.fingerprint[:64]!r}, not ours"
        if self._draining:
            return "the instance drains"
        if self._running >= REPLICAS_MAX:
            return f"{REPLICAS_MAX} replicas are being brought in already"
        if node.steps.preempted:
            return "preempted requests wait for blocks"
        needed = len(hashes) - node.pool.match_in_use(hashes)
        room = node.spare_blocks()
        return "" if needed <= room else f"{needed} blocks needed, {room} to spare"

    def _held_blocks(self, hashes: list[BlockHash]) -> int:
        return self._node.pool.match_held(hashes)


def _checked_hashes(asked: Replicate) -> list[BlockHash]:
    blocks, rest = divmod(len(asked.block_hashes), HASH_BYTES)
    if rest or not 1 <= blocks <= MATCH_BLOCKS_MAX:
        raise ProtocolError(
            f"block_hashes has {len(asked.block_hashes)} bytes, must be 1 to {MATCH_BLOCKS_MAX} hashes of"
            f" {HASH_BYTES}"
        )
    if not asked.deadline_s > 0:
        raise ProtocolError(f"deadline_s is {asked.deadline_s}, must be above 0")
    return unpack(asked.block_hashes)
