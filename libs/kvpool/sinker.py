"""Copies blocks down into one lower tier, ahead of need: batch after batch, written in threads. Erases there
what must not be found again.

A store that fails costs the copies, never a request: the tier is left alone for a while, then tried again.
What to copy and what becomes of a copy is the pool's to say.
"""

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from kvindex.core import Tier
from kvpool.arena import Arena
from kvpool.block_store import BlockStore, StoreError
from kvpool.copy_threads import CopyThreads
from kvpool.mover_limits import MoverLimits, TierCounters
from kvpool.pool import BlockPool
from kvpool.tiers import Sink


@dataclass(frozen=True, slots=True)
class _Progress:
    """How many leading slots were written or erased, and what was wrong with the next; None: given up."""

    good: int
    error: Exception | None = None


class Sinker:
    """All methods are for the event loop's thread; only one of `run` and `sink_batch` at a time."""

    def __init__(
        self,
        tier: Tier,
        pool: BlockPool,
        arena: Arena,
        stores: Mapping[Tier, BlockStore],
        limits: MoverLimits,
        counters: TierCounters,
        changed: Callable[[], None],
        trouble: Callable[[str, Exception], None],
    ) -> None:
        self._tier = tier
        self._pool = pool
        self._arena = arena
        self._stores = stores
        self._limits = limits
        self._counters = counters
        self._changed = changed
        self._trouble = trouble
        self._threads = CopyThreads(limits.write_threads, f"sink-{tier}")
        self._batch_blocks = limits.sink_batch_blocks(arena.block_bytes)
        self._piece_blocks = limits.piece_blocks(arena.block_bytes)
        self._woken = asyncio.Event()
        self._under_way: asyncio.Task[bool] | None = None
        self._failures = 0
        """Batches in a row of which nothing was written."""
        self._erasing_failures = 0
        """In a row."""
        self._erases_from_s = 0.0
        """In the event loop's time: after a failure not at once."""

    def wake(self) -> None:
        """There may be something to sink."""
        self._woken.set()

    async def run(self) -> None:
        """Sink ahead until cancelled; a batch under way goes on by itself then."""
        while True:
            await self._woken.wait()
            self._woken.clear()
            while await self.sink_batch():
                if self._failures:
                    await asyncio.sleep(self._limits.back_off_s(self._failures))

    async def sink_batch(self, ahead_blocks: int | None = None) -> bool:
        """Erase what is to be, and sink what is most pressing, at most a batch of each. False where there
        was nothing to do."""
        await self.settle()
        slots = self._to_erase()
        if slots:
            await self._begin(self._erase(slots))
        sinks = self._pool.take_sinks(self._batch_blocks, ahead_blocks, self._tier)
        if sinks:
            written = await self._begin(self._write_batch(sinks))
            self._failures = 0 if written else self._failures + 1
            self._counters.backing_off = not written
            self._pool.tier_fails(self._tier, not written)
        if slots or sinks:
            self._changed()
        return bool(slots or sinks)

    @property
    def is_failing(self) -> bool:
        """Nothing of the last batch could be written."""
        return self._failures > 0

    @property
    def is_busy(self) -> bool:
        """Threads are at it."""
        return self._under_way is not None and not self._under_way.done()

    async def settle(self) -> None:
        """Returns when no batch is under way."""
        if self._under_way is not None:
            await asyncio.wait([self._under_way])

    def close(self) -> None:
        self._threads.close()

    async def _begin(self, batch: Coroutine[None, None, bool]) -> bool:
        """Awaits a batch, which goes on by itself where that is cancelled."""
        self._under_way = asyncio.ensure_future(batch)
        return await asyncio.shield(self._under_way)

    def _to_erase(self) -> tuple[int, ...]:
        if asyncio.get_running_loop().time() < self._erases_from_s:
            return ()
        return self._pool.erasures(self._tier, self._limits.erase_batch_slots_max)

    async def _erase(self, slots: Sequence[int]) -> bool:
        """Erase in this order, up to the first that cannot be. Whether all were."""
        progress = await self._run(partial(_erase_all, self._stores[self._tier], slots))
        for slot in slots[: progress.good]:
            self._pool.end_erasure(self._tier, slot, erased=True)
        if progress.error is None:
            self._erasing_failures = 0
            return True
        self._pool.end_erasure(self._tier, slots[progress.good], erased=False)
        self._counters.erase_failures += 1
        self._erasing_failures += 1
        wait_s = self._limits.back_off_s(self._erasing_failures)
        self._erases_from_s = asyncio.get_running_loop().time() + wait_s
        self._trouble(f"erasing in {self._tier}", progress.error)
        return False

    async def _write_batch(self, sinks: Sequence[Sink]) -> bool:
        """Write all, then tell the pool of each in their order. Whether any was written."""
        failed = asyncio.Event()
        pieces = [sinks[at : at + self._piece_blocks] for at in range(0, len(sinks), self._piece_blocks)]
        outcomes = await asyncio.gather(*(self._write_piece(piece, failed) for piece in pieces))
        error = next((outcome.error for outcome in outcomes if outcome.error is not None), None)
        if error is not None:
            self._trouble(f"writing to {self._tier}", error)
        for piece, outcome in zip(pieces, outcomes, strict=True):
            for sink in piece[: outcome.good]:
                if self._pool.sunk(sink):
                    self._counters.sunk_blocks += 1
                    self._counters.sunk_bytes += self._arena.block_bytes
            for sink in piece[outcome.good :]:
                self._counters.write_failed_blocks += 1
                self._pool.sink_failed(sink)
        return any(outcome.good for outcome in outcomes)

    async def _write_piece(self, piece: Sequence[Sink], failed: asyncio.Event) -> _Progress:
        outcome = await self._run(
            partial(_write, self._stores, self._arena, piece, failed.is_set, self._pool.generation)
        )
        if outcome.error is not None:
            failed.set()
        return outcome

    async def _run(self, work: Callable[[], _Progress]) -> _Progress:
        """In a thread."""
        try:
            return await self._threads.run(work)
        except Exception as error:
            # Not the store's fault: the system gives no thread, or the arena is closed.
            return _Progress(0, error)


def _write(
    stores: Mapping[Tier, BlockStore],
    arena: Arena,
    sinks: Sequence[Sink],
    is_given_up: Callable[[], bool],
    generation: Callable[[int], int],
) -> _Progress:
    """In a thread. What was given to somebody else meanwhile is not written, and good nevertheless: the pool
    throws it away."""
    for good, sink in enumerate(sinks):
        if is_given_up():
            return _Progress(good)
        try:
            data = _source(stores, arena, sink, generation)
            if data is not None:
                stores[sink.tier].write(sink.slot, sink.block_hash, sink.parent, data)
        except Exception as error:
            # Whatever it is: the pool must know which slots were written to.
            return _Progress(good, error)
    return _Progress(len(sinks))


def _erase_all(store: BlockStore, slots: Sequence[int]) -> _Progress:
    """In a thread."""
    for good, slot in enumerate(slots):
        try:
            store.erase(slot)
        except StoreError as error:
            return _Progress(good, error)
    return _Progress(len(slots))


def _source(
    stores: Mapping[Tier, BlockStore], arena: Arena, sink: Sink, generation: Callable[[int], int]
) -> memoryview | None:
    """The bytes to copy, which nobody changes any more; None where they are somebody else's."""
    store = stores.get(sink.source)
    if store is None:
        # Looked at after the copy: bytes of another block must not even reach the store, where a restart
        # would find them under this hash with a checksum that fits.
        data = np.frombuffer(arena.block(sink.source_index), np.uint8).copy()
        return data.data if generation(sink.source_index) == sink.generation else None
    view = store.view(sink.source_index)
    if view is None:
        view = memoryview(bytearray(arena.block_bytes))
        store.read(sink.source_index, sink.block_hash, view)
    return view
