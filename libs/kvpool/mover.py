"""Moves blocks between the tiers of one instance, off the event loop: down ahead of need, up on demand.

Owns the threads, the order of steps and what follows from a failing store. What is moved when is the pool's
to say (`BlockPool.take_sinks`, `begin_rise`), where bytes lie the stores'. A full, failing or hanging disk
makes the cache smaller and slower; no request sees an error of it.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence

from kvhash import BlockHash
from kvindex.core import Tier
from kvpool.arena import Arena
from kvpool.ascent import Ascent, Shared
from kvpool.block_store import BlockStore, StoreError
from kvpool.copy_threads import CopyThreads
from kvpool.mover_limits import MoverCounters, MoverLimits, TierCounters
from kvpool.pool import BlockPool
from kvpool.sinker import Sinker

CLOSING_SHARE = 0.25
"""Of the time for closing, at most, in which nothing new is sunk and the copies under way end."""


class TierMover:
    """All methods are for the event loop's thread.

    `stores` has one store for each lower tier of `pool`; both use the blocks of `arena`. `loaded(block_ids)`
    says that what was written into these blocks is computed on from now. `changed()` is called when copies
    came, went or rose. `trouble(what, error)` is told of every failure that was dealt with, for the log.
    """

    def __init__(
        self,
        pool: BlockPool,
        arena: Arena,
        stores: Mapping[Tier, BlockStore],
        *,
        loaded: Callable[[Sequence[int]], Awaitable[None]],
        changed: Callable[[], None],
        trouble: Callable[[str, Exception], None],
        limits: MoverLimits = MoverLimits(),  # noqa: B008  # frozen
    ) -> None:
        self.counters = MoverCounters({tier: TierCounters() for tier in stores})
        self._pool = pool
        self._arena = arena
        self._stores = dict(stores)
        self._changed = changed
        self._trouble = trouble
        self._limits = limits
        self._reads = CopyThreads(limits.read_threads, "rise")
        self._piece_blocks = limits.piece_blocks(arena.block_bytes)
        self._shared = Shared(pool, arena, self._stores, self._reads, loaded, trouble, self.counters)
        self._ascents: dict[asyncio.Task[None], Ascent] = {}
        self._sinkers = [
            Sinker(tier, pool, arena, self._stores, limits, counters, self._sunk, trouble)
            for tier, counters in self.counters.tiers.items()
        ]
        self._closing = False

    async def run(self) -> None:
        """Sink ahead until cancelled. AssertionError where the pool's bookkeeping is at odds with ours."""
        async with asyncio.TaskGroup() as loops:
            for sinker in self._sinkers:
                loops.create_task(sinker.run())

    def wake(self) -> None:
        """The pool changed: there may be something to sink."""
        for sinker in self._sinkers:
            sinker.wake()

    async def rise(
        self, hashes: Sequence[BlockHash], timeout_s: float, blocks_max: int | None = None
    ) -> list[int]:
        """Bring up what lies below of the chain `hashes`: ids that are pinned for the caller now, contiguous
        from what `pool.match(hashes)` was at the call, at most `blocks_max`.

        Fewer where there is no room, a copy is not to be read or is corrupt, the time is up, or the caller
        did not pin what comes before. Nobody reads what another rise is reading: it is waited for. Raises
        nothing of that; where it is cancelled, nothing stays pinned for the caller.
        """
        taken: list[int] = []
        first = self._pool.match(hashes)
        end = len(hashes) if blocks_max is None else min(len(hashes), first + blocks_max)
        if self._closing or first >= end:
            return taken
        try:
            async with asyncio.timeout(timeout_s):
                await self._rise(hashes[:end], first, taken)
        except TimeoutError:
            self.counters.late_rises += 1
            self._take_held(hashes[:end], first, taken)
        except BaseException:
            self._pool.release(taken)
            raise
        finally:
            self._changed()
        return taken

    async def close(self, timeout_s: float) -> None:
        """Sink what is cached, so that a restart finds it, as far as `timeout_s` allows; then close the
        stores, unless a thread is still at one: that is told as trouble. Cancel `run` before."""
        self._closing = True
        for ascent in self._ascents.values():
            ascent.give_up()
        settle_s = min(self._limits.settle_s_max, timeout_s * CLOSING_SHARE)
        try:
            async with asyncio.timeout(timeout_s - settle_s):
                await self._sink_all()
        except TimeoutError:
            self._trouble("closing", StoreError("not all blocks could be sunk in time"))
        await self._settle(settle_s)
        self._reads.close()
        for sinker in self._sinkers:
            sinker.close()
        if self._ascents or any(sinker.is_busy for sinker in self._sinkers):
            self._trouble("closing", StoreError("a disk hangs: its files stay open and locked"))
            return
        for store in self._stores.values():
            await asyncio.to_thread(store.close)

    async def _rise(self, hashes: Sequence[BlockHash], first: int, taken: list[int]) -> None:
        """Appends to `taken` what is pinned, as it comes."""
        while not self._closing:
            self._take_held(hashes, first, taken)
            reached = first + len(taken)
            if reached >= len(hashes) or self._pool.match(hashes) < reached:
                return
            if not self._may_wait():
                return
            bringing = self._shared.rising.get(hashes[reached])
            if bringing is None:
                await self._ascend(hashes, len(hashes) - reached, taken)
                return
            last = reached
            while last + 1 < len(hashes) and self._shared.rising.get(hashes[last + 1]) is bringing:
                last += 1
            await bringing.brought(hashes[last])

    def _take_held(self, hashes: Sequence[BlockHash], first: int, taken: list[int]) -> None:
        """Pin what somebody else brought of the chain behind what is taken."""
        reached = first + len(taken)
        held = self._pool.match(hashes)
        if held > reached:
            block_ids = self._pool.acquire(hashes[:held])
            self._pool.release(block_ids[:reached])
            taken += block_ids[reached:]

    def _may_wait(self) -> bool:
        """Not while the disk hangs, be it for what another reads: everybody would wait for their deadline."""
        if self._reads.busy_s() <= self._limits.stall_s:
            return True
        self.counters.stalled_rises += 1
        return False

    async def _ascend(self, hashes: Sequence[BlockHash], blocks_max: int, taken: list[int]) -> None:
        rises = self._pool.begin_rise(hashes, blocks_max)
        if not rises:
            return
        ascent = Ascent(self._shared, rises, self._piece_blocks, taken)
        task = asyncio.ensure_future(ascent.run())
        self._ascents[task] = ascent
        task.add_done_callback(self._ascended)
        try:
            await asyncio.wait([task])
        finally:
            ascent.leave()

    def _ascended(self, task: "asyncio.Task[None]") -> None:
        del self._ascents[task]
        error = None if task.cancelled() else task.exception()
        if isinstance(error, Exception):
            self._trouble("rising", error)

    def _sunk(self) -> None:
        self._changed()
        self.wake()

    async def _sink_all(self) -> None:
        """Until nothing is left that can be sunk, lowest tier first, so that those above find room."""
        sinkers = list(reversed(self._sinkers))
        blocks = self._arena.blocks
        while [sinker for sinker in sinkers if await sinker.sink_batch(blocks) and not sinker.is_failing]:
            pass

    async def _settle(self, timeout_s: float) -> None:
        """Wait for the threads that are at it."""
        settling = [asyncio.ensure_future(sinker.settle()) for sinker in self._sinkers]
        if not settling and not self._ascents:
            return
        _, late = await asyncio.wait([*settling, *self._ascents], timeout=timeout_s)
        for wait in late.intersection(settling):
            wait.cancel()
