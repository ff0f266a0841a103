"""Brings the cached prefix of a prompt to where it is computed on (DESIGN §3 step 6).

First what lies in this instance's lower tiers, then what comes after it from one other instance. Owns how far
that is worth its time, that two who want the same blocks move them once, and what follows from a failure: the
blocks are computed, and the source is left alone about them for a while. How a source is spoken to is
`prefix_source`'s.
"""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cluster.messages import MATCH_BLOCKS_MAX
from kvhash import BlockHash
from kvindex.core import InstanceId, Tier
from kvpool import NoBlocksError
from policy.core import CostCoefficients
from policy.cost import ASSUMED_COST, ssd_read_s
from worker.avoided_sources import AvoidedSources
from worker.fetch_metrics import FetchFailure, FetchMetrics
from worker.fetch_plan import FETCH_S_MAX, FetchPlan, patience_s, worthwhile
from worker.prefix_source import PinIds, PinnedBlocks, PrefixSource, SourceError

if TYPE_CHECKING:  # the node has its PrefixFetch
    from worker.node import Node

PIECE_BYTES = 32 << 20
"""Read at once, and then kept whatever becomes of the rest."""
PIECE_BLOCKS_MAX = 4096


@dataclass(slots=True)
class Fetched:
    """The chain's leading blocks that are pinned now, whoever brought them. To be released by who has it."""

    block_ids: list[int] = field(default_factory=list)
    coming_blocks: int = 0
    """Pinned as well, and still being read into."""
    risen_blocks: int = 0
    read_blocks: int = 0
    detail: str = ""
    """Why there are not more."""


class PrefixFetch:
    """All methods are for the event loop's thread."""

    def __init__(self, node: "Node") -> None:
        self._node = node
        self._metrics = FetchMetrics(node.context.metrics.registry)
        self._avoided = AvoidedSources()
        self._pin_ids = PinIds(node.context.incarnation)
        self._coming: dict[BlockHash, asyncio.Future[None]] = {}
        """Blocks that a fetch is bringing, each with the end of that fetch."""

    def plan(
        self,
        hashes: Sequence[BlockHash],
        source: InstanceId | None,
        source_blocks: int,
        *,
        whatever_it_costs: bool = False,
    ) -> FetchPlan:
        """What `bring` would do now. `source_blocks` leading blocks of the chain are said to be there."""
        node = self._node
        held = node.pool.match(hashes)
        local = node.pool.match_held(hashes)
        readable = 0
        if source is not None and source != node.context.instance:
            said = hashes[: min(max(0, source_blocks), MATCH_BLOCKS_MAX)]
            readable = self._avoided.askable_blocks(source, said, local, node.now_s())
        plan = FetchPlan(held, local, readable if readable > local else 0)
        if whatever_it_costs or not plan.brings:
            return plan
        ssd_blocks = _on_ssd(self._below(hashes, held, local))
        return worthwhile(plan, ssd_blocks, self._cost(), node.layout.block_bytes)

    async def bring(
        self,
        hashes: Sequence[BlockHash],
        source: InstanceId | None,
        source_blocks: int,
        ends_at_s: float,
        *,
        whatever_it_costs: bool = False,
        fetched: Fetched | None = None,
    ) -> Fetched:
        """Pin what is held of the chain and bring what is missing, up to what `source` is said to have.

        Returns `fetched`, which tells meanwhile how far it has come. Raises nothing for what becomes of the
        fetch; ends by `ends_at_s` at the latest. Where it is cancelled nothing stays pinned; what had come by
        then stays cached.
        """
        fetched = Fetched() if fetched is None else fetched
        node = self._node
        started_s = node.now_s()
        plan = self.plan(hashes, source, source_blocks, whatever_it_costs=whatever_it_costs)
        time_s = FETCH_S_MAX if whatever_it_costs else patience_s(plan, self._cost())
        ends_at_s = min(ends_at_s, started_s + time_s)
        while plan.brings and (coming := self._coming.get(hashes[plan.held_blocks])) is not None:
            await asyncio.wait([coming], timeout=ends_at_s - node.now_s())
            if not coming.done():
                fetched.block_ids = node.pool.acquire(hashes)
                self._failed(fetched, FetchFailure.TIMEOUT, "others did not bring it in time")
                return fetched
            plan = self.plan(hashes, source, source_blocks, whatever_it_costs=whatever_it_costs)
        fetched.block_ids = node.pool.acquire(hashes)
        try:
            with self._claimed(hashes[plan.held_blocks : plan.target_blocks]):
                await self._rise(hashes[: plan.rise_blocks], fetched, ends_at_s)
                if source is not None:
                    await self._read(hashes[: plan.read_blocks], source, fetched, ends_at_s)
        except BaseException:
            node.pool.release(fetched.block_ids)
            fetched.block_ids = []
            raise
        finally:
            node.pool_changed()
        self._metrics.fetch_s.observe(node.now_s() - started_s)
        return fetched

    @contextmanager
    def _claimed(self, hashes: Sequence[BlockHash]) -> Iterator[None]:
        """Whoever wants one of these waits for us."""
        end = asyncio.get_running_loop().create_future()
        claimed = [block_hash for block_hash in hashes if block_hash not in self._coming]
        self._coming.update(dict.fromkeys(claimed, end))
        try:
            yield
        finally:
            for block_hash in claimed:
                del self._coming[block_hash]
            end.set_result(None)

    async def _rise(self, hashes: Sequence[BlockHash], fetched: Fetched, ends_at_s: float) -> None:
        """What lies below, up to the end of `hashes`, comes up as far as there is room."""
        node, pool = self._node, self._node.pool
        held = len(fetched.block_ids)
        if held >= len(hashes):
            return
        below = self._below(hashes, held, len(hashes))
        started_s = node.now_s()
        risen = await node.mover.rise(hashes, ends_at_s - started_s, len(hashes) - held)
        self._took(below, node.now_s() - started_s)
        # Between what is pinned and what rose may lie what others brought up meanwhile.
        block_ids = pool.acquire(hashes)
        pool.release(fetched.block_ids)
        pool.release(risen)
        fetched.block_ids = block_ids
        fetched.risen_blocks = left = len(risen)
        for tier, blocks in below:
            self._metrics.rose(tier, min(blocks, left), node.layout.block_bytes)
            left -= min(blocks, left)
        if len(block_ids) < len(hashes):
            self._failed(fetched, FetchFailure.LOCAL, f"{len(hashes) - len(block_ids)} blocks did not rise")

    async def _read(
        self, hashes: Sequence[BlockHash], source: InstanceId, fetched: Fetched, ends_at_s: float
    ) -> None:
        """First blocks to read into, then the pin at the source: nobody waits for blocks while it pins."""
        node = self._node
        first_block = len(fetched.block_ids)
        if first_block >= len(hashes):
            return
        try:
            fresh = node.pool.allocate(len(hashes) - first_block)
        except NoBlocksError as error:
            self._failed(fetched, FetchFailure.NO_BLOCKS, str(error))
            return
        prefix_source = PrefixSource(node, source)
        fetched.coming_blocks = len(fresh)
        try:
            pin = prefix_source.pinned(self._pin_ids.next(), hashes, first_block, ends_at_s)
            async with pin as pinned:
                await self._read_pieces(prefix_source, pinned, hashes, fresh, fetched)
            if len(fetched.block_ids) < len(hashes):
                raise SourceError(FetchFailure.SHORT, f"it has {len(fetched.block_ids)} blocks")
        except SourceError as error:
            self._avoided.avoid(source, hashes[len(fetched.block_ids)], node.now_s())
            if error.reason is FetchFailure.UNANSWERED:
                self._avoided.avoid_all(source, node.now_s())
            self._failed(fetched, error.reason, f"{source}: {error}")
        finally:
            fetched.coming_blocks = 0
            node.pool.release(fresh)

    async def _read_pieces(
        self,
        source: PrefixSource,
        pinned: PinnedBlocks,
        hashes: Sequence[BlockHash],
        fresh: list[int],
        fetched: Fetched,
    ) -> None:
        """All that is pinned there, into `fresh`, from which is taken what was stored."""
        node = self._node
        first_block = len(fetched.block_ids)
        node.pool.release(fresh[len(pinned.block_ids) :])
        del fresh[len(pinned.block_ids) :]
        fetched.coming_blocks = len(fresh)
        piece_blocks = min(max(1, PIECE_BYTES // node.layout.block_bytes), PIECE_BLOCKS_MAX)
        while fresh:
            piece = fresh[:piece_blocks]
            await source.read(pinned, len(fetched.block_ids) - first_block, piece)
            await node.engine.load_blocks(piece)
            for block_id in piece:
                block = len(fetched.block_ids)
                parent = hashes[block - 1] if block else None
                fetched.block_ids.append(node.pool.store_or_share(block_id, hashes[block], parent))
            del fresh[: len(piece)]
            fetched.coming_blocks = len(fresh)
            fetched.read_blocks += len(piece)
            self._metrics.read(len(piece), node.layout.block_bytes)
            node.pool_changed()

    def _took(self, below: list[tuple[Tier, int]], elapsed_s: float) -> None:
        """So long it took to bring up what lay there, or to give it up."""
        node = self._node
        ssd_blocks = _on_ssd(below)
        if ssd_blocks and node.cost is not None:
            expected_s = ssd_read_s(node.cost, ssd_blocks * node.layout.block_bytes)
            node.slow_reads.took(expected_s, elapsed_s, node.now_s())

    def _failed(self, fetched: Fetched, reason: FetchFailure, detail: str) -> None:
        fetched.detail = f"{reason}: {detail}"
        self._metrics.failed(reason)
        self._node.context.log.warning("prefix not brought in, it is computed", reason=reason, detail=detail)

    def _below(self, hashes: Sequence[BlockHash], first: int, end: int) -> list[tuple[Tier, int]]:
        """Of the blocks from `first` up to `end`, how many lie in which tier here, in their order."""
        found: list[tuple[Tier, int]] = []
        begin = 0
        for run in self._node.pool.tier_runs(hashes[:end]) if end > first else ():
            blocks = begin + run.blocks - max(begin, first)
            begin += run.blocks
            if blocks > 0:
                found.append((run.tier, blocks))
        return found

    def _cost(self) -> CostCoefficients:
        return self._node.current_cost() or ASSUMED_COST


def _on_ssd(below: Sequence[tuple[Tier, int]]) -> int:
    return sum(blocks for tier, blocks in below if tier is Tier.SSD)
