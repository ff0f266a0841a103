"""A pool with its arena, stores and mover, whose blocks hold what their hashes say."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace

from tests.support.memory_store import MemoryStore

from kvhash import BlockHash
from kvindex.core import Tier
from kvpool import Arena, BlockPool, BlockStore, DramStore, MoverLimits, NoBlocksError, TierMover

BLOCK_BYTES = 256
WAIT_S_MAX = 10.0
LIMITS = MoverLimits(
    piece_bytes=BLOCK_BYTES,
    sink_batch_bytes=4 * BLOCK_BYTES,
    back_off_s_min=0.001,
    back_off_s_max=0.004,
    settle_s_max=1.0,
)


def chain(name: str, blocks: int) -> list[BlockHash]:
    """Hashes of a prompt's blocks; prompts with the same first letters share their first blocks."""
    return [
        BlockHash((name[: place + 1] + f"-{place}").encode().rjust(16, b".")[-16:]) for place in range(blocks)
    ]


def content_of(block_hash: BlockHash) -> bytes:
    return block_hash * (BLOCK_BYTES // len(block_hash))


class TierWorld:
    """Compute blocks, then slots of DRAM where there are any, then of a MemoryStore or another `ssd`."""

    def __init__(
        self,
        blocks: int = 8,
        *,
        dram_slots: int = 0,
        ssd: BlockStore | None = None,
        sink_ahead_blocks: int | None = None,
        limits: MoverLimits = LIMITS,
    ) -> None:
        self.arena = Arena.create(blocks + dram_slots, BLOCK_BYTES)
        self.ssd = MemoryStore(32, BLOCK_BYTES) if ssd is None else ssd
        stores: dict[Tier, BlockStore] = {}
        if dram_slots:
            stores[Tier.DRAM] = DramStore(self.arena, blocks, dram_slots)
        stores[Tier.SSD] = self.ssd
        self.pool = BlockPool(
            blocks,
            tier=Tier.DEVICE if dram_slots else Tier.DRAM,
            lower=[(tier, store.slots) for tier, store in stores.items()],
            sink_ahead_blocks=blocks if sink_ahead_blocks is None else sink_ahead_blocks,
        )
        self.loads: list[list[int]] = []
        self.fails_load: Exception | None = None
        self.troubles: list[tuple[str, Exception]] = []
        self._changed = asyncio.Event()
        self.mover = TierMover(
            self.pool,
            self.arena,
            stores,
            loaded=self._loaded,
            changed=self.changed,
            trouble=self._trouble,
            limits=replace(limits),
        )
        self._run: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "TierWorld":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()
        if isinstance(self.ssd, MemoryStore):
            self.ssd.reads.open()
            self.ssd.writes.open()
        await self.mover.close(WAIT_S_MAX)
        self.pool.check_integrity()
        self.arena.close()

    def start(self) -> None:
        self._run = asyncio.create_task(self.mover.run())
        self.mover.wake()

    async def stop(self) -> None:
        """Cancel what sinks."""
        if self._run is not None:
            self._run.cancel()
            await asyncio.wait([self._run])
            self._run = None

    def changed(self) -> None:
        self._changed.set()

    async def until(self, condition: Callable[[], object]) -> None:
        """Return once that is true; looked at whenever the mover says that something changed."""
        async with asyncio.timeout(WAIT_S_MAX):
            while not condition():
                await self._changed.wait()
                self._changed.clear()

    def hold(self, hashes: Sequence[BlockHash]) -> list[int]:
        """Pin the chain, computing what is not there. Raises NoBlocksError."""
        block_ids = self.pool.acquire(hashes)
        try:
            fresh = self.pool.allocate(len(hashes) - len(block_ids))
        except NoBlocksError:
            self.pool.release(block_ids)
            raise
        for block_id in fresh:
            place = len(block_ids)
            self.arena.block(block_id)[:] = content_of(hashes[place])
            parent = hashes[place - 1] if place else None
            block_ids.append(self.pool.store_or_share(block_id, hashes[place], parent))
        self.mover.wake()
        return block_ids

    def keep(self, hashes: Sequence[BlockHash]) -> None:
        """Have the chain cached."""
        self.pool.release(self.hold(hashes))
        self.mover.wake()

    def evict_all(self) -> None:
        """Make every block free or in use, and worthless in content."""
        fresh = self.pool.allocate(self.pool.available())
        for block_id in fresh:
            self.arena.block(block_id)[:] = b"\xee" * BLOCK_BYTES
        self.pool.release(fresh)

    async def sink(self, hashes: Sequence[BlockHash]) -> None:
        """Have the chain lie below, and nowhere else."""
        self.keep(hashes)
        self.start()
        await self.until(lambda: self.is_below(hashes))
        await self.stop()
        self.evict_all()
        assert (self.pool.match(hashes), self.pool.match_held(hashes)) == (0, len(hashes))

    def is_below(self, hashes: Sequence[BlockHash]) -> bool:
        """Whether every block of the chain could leave the compute tier without loss."""
        lowest = self.pool.stats().tiers[-1]
        return lowest.copies >= len(hashes) and not any(tier.moving for tier in self.pool.stats().tiers)

    def check_content(self, block_ids: Sequence[int], hashes: Sequence[BlockHash]) -> None:
        """Each block holds what its hash says."""
        for block_id, block_hash in zip(block_ids, hashes, strict=True):
            assert self.arena.block(block_id) == content_of(block_hash)

    def all_is_free(self) -> bool:
        """Nothing is pinned or under way; something may still have to be erased."""
        stats = self.pool.stats()
        to_erase = [len(self.pool.erasures(tier.tier, tier.blocks)) for tier in stats.tiers]
        return not stats.in_use and [tier.moving for tier in stats.tiers] == to_erase

    def forget(self, hashes: Sequence[BlockHash]) -> None:
        """What the chain holds in memory turns out to be no good."""
        block_ids = self.pool.acquire(hashes)
        self.pool.release(block_ids)
        self.pool.forget(block_ids)
        self.mover.wake()

    async def _loaded(self, block_ids: Sequence[int]) -> None:
        self.loads.append(list(block_ids))
        await asyncio.sleep(0)
        if self.fails_load is not None:
            raise self.fails_load

    def _trouble(self, what: str, error: Exception) -> None:
        self.troubles.append((what, error))
        self.changed()
