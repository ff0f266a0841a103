"""The cached prefix that a request was placed with, from its plan to the blocks being taken over.

Owns the fetch that is under way for the request and what it holds meanwhile; how a prefix is brought in is
`prefix_fetch`'s.
"""

import asyncio

from cluster.messages import Submit
from worker.fetch_plan import FetchPlan
from worker.node import Node
from worker.prefix_fetch import Fetched
from worker.sequence import Sequence


class PlacedPrefix:
    """Nothing is held before `begin`, nor after `release` or `end`."""

    def __init__(self, node: Node, sequence: Sequence, submit: Submit) -> None:
        self._node = node
        self._sequence = sequence
        self._source = submit.source
        self._source_blocks = submit.prefix_blocks
        self._fetched = Fetched()
        self._bringing: asyncio.Task[Fetched] | None = None

    @property
    def coming_blocks(self) -> int:
        """Blocks that the fetch holds and that `Sequence.take_blocks` will find cached."""
        return self._fetched.coming_blocks

    def plan(self) -> FetchPlan:
        """How far the prefix is here, and how far it is to be brought in."""
        hashes = self._sequence.reusable_hashes
        return self._node.fetch.plan(hashes, self._source, self._source_blocks)

    def begin(self, ends_at_s: float) -> asyncio.Task[Fetched]:
        bring = self._node.fetch.bring(
            self._sequence.reusable_hashes,
            self._source,
            self._source_blocks,
            ends_at_s,
            fetched=self._fetched,
        )
        self._bringing = asyncio.create_task(bring)
        return self._bringing

    def release(self) -> None:
        """Of a fetch that is done: the sequence has the blocks now, or nobody wants them."""
        block_ids, self._fetched.block_ids = self._fetched.block_ids, []
        self._node.pool.release(block_ids)

    async def end(self) -> None:
        """Whatever it is at, afterwards it holds nothing and writes nowhere."""
        if self._bringing is not None:
            self._bringing.cancel()
            await asyncio.wait({self._bringing})
        self.release()
