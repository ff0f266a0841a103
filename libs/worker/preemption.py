"""Sequences that had to give up their blocks, and how each gets its KV back (DESIGN §3 step 9).

Owns who waits, oldest first, and which swap slots each holds. Which way is cheaper is `policy.preempt`'s to
say, when to preempt and when to look again the step loop's: every call here is between two steps.
"""

from bisect import insort
from dataclasses import dataclass

from cluster.logs import Logger
from kvhash import BLOCK_TOKENS
from kvpool import BlockPool, SwapSlots
from policy.core import CostCoefficients
from policy.preempt import HostCopyCost, Preemption, choose_preemption
from worker.engine_thread import EngineThread
from worker.metrics import WorkerMetrics
from worker.sequence import Sequence


@dataclass(frozen=True, slots=True)
class SwapCosts:
    """What the choice is made from: the instance's cost model and its copies to host memory."""

    compute: CostCoefficients
    copy: HostCopyCost
    block_bytes: int


@dataclass(frozen=True, slots=True)
class Swapped:
    """KV of `context_tokens` tokens: blocks from number `first_block` on are in `slots`, those before were
    in use by others when it went."""

    context_tokens: int
    first_block: int
    slots: tuple[int, ...]


class Preempted:
    """Methods are for the event loop's thread. A sequence may `leave` while a copy of its blocks is awaited;
    its blocks are its own until that is over."""

    def __init__(
        self, engine: EngineThread, pool: BlockPool, slots: SwapSlots, metrics: WorkerMetrics, log: Logger
    ) -> None:
        self._engine = engine
        self._pool = pool
        self._slots = slots
        self._metrics = metrics
        self._log = log
        self._waiting: list[Sequence] = []
        self._swapped: dict[Sequence, Swapped] = {}
        self.costs: SwapCosts | None = None
        """None: everything is computed again."""

    def __len__(self) -> int:
        return len(self._waiting)

    def first(self) -> Sequence | None:
        """Who has to come back before any other."""
        return self._waiting[0] if self._waiting else None

    def leave(self, sequence: Sequence) -> None:
        """It will not come back; twice is once."""
        self._waiting = [other for other in self._waiting if other is not sequence]
        self._forget_swapped(sequence)

    async def take(self, sequence: Sequence) -> None:
        """Its blocks go back to the pool before this returns, and it waits for others."""
        swapped = self._choose(sequence)
        way = Preemption.RECOMPUTE if swapped is None else Preemption.SWAP
        self._log.info("preempted", request_id=sequence.request_id, sample=sequence.sample, way=way)
        self._metrics.preemptions.labels(way).inc()
        insort(self._waiting, sequence, key=lambda waiting: waiting.arrival)
        if swapped is not None:
            self._swapped[sequence] = swapped
            block_ids = sequence.block_ids[swapped.first_block :][: len(swapped.slots)]
            try:
                await self._engine.swap_out(block_ids, swapped.slots)
            except Exception:
                self._log.exception("swap out failed")
                self._forget_swapped(sequence)
        sequence.give_back(self._pool)

    async def bring_back(self, sequence: Sequence) -> bool:
        """Give the first one its blocks, where there is room for one more than it needs, unless that is
        more than there are. False: it goes on waiting, or left meanwhile."""
        spare_blocks = 1 if sequence.blocks_needed() < self._pool.stats().blocks else 0
        if sequence.blocks_to_take(self._pool) + spare_blocks > self._pool.available():
            # Asked again after every step: nothing is pinned, and made to look used, in vain.
            return False
        sequence.take_blocks(self._pool, spare_blocks)
        swapped = self._swapped.get(sequence)
        sequence.give_back_spare(self._pool)
        if swapped is not None and sequence.stored_blocks >= swapped.first_block:
            await self._swap_in(sequence, swapped)
        self._forget_swapped(sequence)
        came_back = sequence in self._waiting
        self.leave(sequence)
        return came_back

    async def _swap_in(self, sequence: Sequence, swapped: Swapped) -> None:
        """What is still in the pool is pinned already, the rest comes from its slots. Where it cannot come
        it is computed again."""
        slots = swapped.slots[sequence.stored_blocks - swapped.first_block :]
        block_ids = sequence.block_ids[sequence.stored_blocks :][: len(slots)]
        try:
            await self._engine.swap_in(slots, block_ids)
        except Exception:
            self._log.exception("swap in failed")
        else:
            sequence.restored(swapped.context_tokens)
            sequence.store_full_blocks(self._pool)

    def _choose(self, sequence: Sequence) -> Swapped | None:
        """What goes into slots, where that is the cheaper way and there are enough."""
        if self.costs is None:
            return None
        context_tokens = sequence.context_tokens
        kept_blocks = min(self._pool.blocks_others_use(sequence.block_ids), context_tokens // BLOCK_TOKENS)
        kept_tokens = kept_blocks * BLOCK_TOKENS
        blocks = -(-context_tokens // BLOCK_TOKENS) - kept_blocks
        if blocks > self._slots.free:
            return None
        way = choose_preemption(
            self.costs.compute,
            self.costs.copy,
            len(sequence.token_ids) - kept_tokens,
            kept_tokens,
            blocks * self.costs.block_bytes,
        )
        if way is Preemption.RECOMPUTE:
            return None
        return Swapped(context_tokens, kept_blocks, tuple(self._slots.take(blocks)))

    def _forget_swapped(self, sequence: Sequence) -> None:
        """Copies are carried out one after the other: who gets these slots next comes behind."""
        swapped = self._swapped.pop(sequence, None)
        if swapped is not None:
            self._slots.give_back(swapped.slots)
