"""Random histories of a pool with an SSD, under damage, failing disks, deadlines and restarts.

Whatever happens: no block holds other bytes than its hash says, nothing stays pinned that nobody holds, the
bookkeeping agrees, and what is announced as held is either there or found out to be lost.
"""

import asyncio
import errno
import os
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.tier_world import BLOCK_BYTES, LIMITS, WAIT_S_MAX, TierWorld, chain

from kvhash import BlockHash
from kvindex.core import Tier
from kvpool import NoBlocksError, SsdStore, StoreError

pytestmark = pytest.mark.unit

BLOCKS = 12
CAPACITY_BYTES = 8192 + 20 * 4096 + 3 * 4096
SEGMENT_SLOTS = 8
SEGMENT_BYTES = SEGMENT_SLOTS * 4096 + 4096
SLOW_LIMITS = replace(LIMITS, back_off_s_min=0.0, back_off_s_max=0.0)

PROMPTS = ("aaaaaaaa", "aaabbbbb", "cccccccc")
"""The first two begin with the same blocks."""

chains = st.builds(chain, st.sampled_from(PROMPTS), st.integers(3, 8))
places = st.integers(0, 2**20)
steps = st.one_of(
    st.tuples(st.just("keep"), chains),
    st.tuples(st.just("keep_below"), chains),
    st.tuples(st.just("hold"), chains),
    st.tuples(st.just("let_go"), places),
    st.tuples(st.just("rise"), chains),
    st.tuples(st.just("rise_late"), chains),
    st.tuples(st.just("rise_cancelled"), chains),
    st.tuples(st.just("two_rise"), st.tuples(chains, chains)),
    st.tuples(st.just("evict"), st.none()),
    st.tuples(st.just("sink"), st.booleans()),
    st.tuples(st.just("damage"), st.tuples(chains, places, st.booleans())),
    st.tuples(st.just("fill_disk"), st.booleans()),
    st.tuples(st.just("restart"), st.sampled_from(["graceful", "killed"])),
)


class History:
    """A world whose store lies in a folder, and the chains that are held in it."""

    def __init__(self, folder: Path, dram_slots: int) -> None:
        self._folder = folder
        self._dram_slots = dram_slots
        self._held: list[tuple[list[int], list[BlockHash]]] = []
        self._disk_is_full = False
        self.world = self._new_world()

    def _new_world(self) -> TierWorld:
        store = SsdStore.open(self._folder, CAPACITY_BYTES, BLOCK_BYTES, b"id", SEGMENT_BYTES)
        world = TierWorld(
            BLOCKS, dram_slots=self._dram_slots, ssd=store, sink_ahead_blocks=6, limits=SLOW_LIMITS
        )
        write = store.write

        def write_unless_full(slot: int, block_hash: BlockHash, *rest: object) -> None:
            if self._disk_is_full:
                raise StoreError(os.strerror(errno.ENOSPC))
            write(slot, block_hash, *rest)

        store.write = write_unless_full
        world.pool.restore(Tier.SSD, store.recover())
        return world

    async def step(self, name: str, argument: object) -> None:
        match name, argument:
            case "keep", hashes:
                self._compute(hashes, keep=True)
            case "keep_below", hashes:
                self._compute(hashes, keep=True)
                await self._sink(whole=True)
                self.world.evict_all()
            case "hold", hashes:
                self._compute(hashes, keep=False)
            case "let_go", place:
                if self._held:
                    block_ids, hashes = self._held.pop(place % len(self._held))
                    self.world.check_content(block_ids, hashes)
                    self.world.pool.release(block_ids)
            case "rise", hashes:
                await self._rise(hashes, WAIT_S_MAX)
            case "rise_late", hashes:
                await self._rise(hashes, 0.0)
            case "rise_cancelled", hashes:
                task = asyncio.create_task(self.world.mover.rise(hashes, WAIT_S_MAX))
                await asyncio.sleep(0)
                task.cancel()
                await asyncio.wait([task])
                if not task.cancelled():
                    self.world.pool.release(task.result())
            case "two_rise", (one, other):
                rises = (self._rise(hashes, WAIT_S_MAX, alone=False) for hashes in (one, other))
                await asyncio.gather(*rises)
            case "evict", _:
                self.world.evict_all()
            case "sink", whole:
                await self._sink(whole)
            case "damage", (hashes, place, evicted):
                self._damage(hashes[-1], place)
                if evicted:
                    self.world.evict_all()
                    await self._rise(hashes, WAIT_S_MAX)
            case "fill_disk", is_full:
                self._disk_is_full = is_full
            case "restart", how:
                await self._restart(how)
        self.world.pool.check_integrity()

    def _compute(self, hashes: list[BlockHash], keep: bool) -> None:
        """As a request does: use what is there, compute the rest."""
        try:
            block_ids = self.world.hold(hashes)
        except NoBlocksError:
            return
        self.world.check_content(block_ids, hashes)
        if keep:
            self.world.pool.release(block_ids)
        else:
            self._held.append((block_ids, hashes))

    async def _rise(self, hashes: list[BlockHash], timeout_s: float, alone: bool = True) -> None:
        world = self.world
        block_ids = world.pool.acquire(hashes)
        said = world.pool.match_held(hashes)
        room = world.pool.available()
        missing = said - len(block_ids)
        block_ids += await world.mover.rise(hashes, timeout_s)
        world.check_content(block_ids, hashes[: len(block_ids)])
        if alone and timeout_s and room >= missing and len(block_ids) < said:
            # A copy was no good: it is announced no longer.
            assert world.pool.match_held(hashes) < said
            assert sum(tier.lost_total for tier in world.pool.stats().tiers)
        world.pool.release(block_ids)

    async def _sink(self, whole: bool) -> None:
        """As `run` does, to the end; or a part, and leave a batch under way."""
        sinkers = self.world.mover._sinkers
        while whole and any([await sinker.sink_batch() for sinker in sinkers]):
            pass
        self.world.start()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        await self.world.stop()

    def _damage(self, block_hash: BlockHash, place: int) -> None:
        """Change a byte of a block's newest copy, if there is one, or of its record."""
        slots = [copy.slot for copy in self.world.ssd.recover() if copy.block_hash == block_hash]
        if not slots:
            return
        segment, slot = divmod(slots[0], SEGMENT_SLOTS)
        kind, slot_bytes, used_bytes = ("data", 4096, BLOCK_BYTES) if place % 3 else ("records", 64, 64)
        with (self._folder / f"segment-{segment:04}.{kind}").open("r+b") as file:
            offset = slot * slot_bytes + place % used_bytes
            file.seek(offset)
            byte = file.read(1)[0]
            file.seek(offset)
            file.write(bytes([byte ^ 0x10]))

    async def _restart(self, how: str) -> None:
        await self._settle()
        if how == "graceful":
            await self.world.mover.close(WAIT_S_MAX)
        else:
            self.world.ssd.close()
        self.world.arena.close()
        self.world = self._new_world()

    def files_bytes(self) -> int:
        return sum(path.stat().st_size for path in self._folder.iterdir())

    async def _settle(self) -> None:
        """Nobody holds anything, and no thread is at work."""
        for block_ids, hashes in self._held:
            self.world.check_content(block_ids, hashes)
            self.world.pool.release(block_ids)
        self._held.clear()
        await self.world.mover._settle(WAIT_S_MAX)
        assert self.world.all_is_free()
        self.world.pool.check_integrity()

    async def end(self) -> None:
        await self._settle()
        self._disk_is_full = False
        await self.world.mover.close(WAIT_S_MAX)
        self.world.arena.close()


@settings(max_examples=30, deadline=None)
@given(st.sampled_from([0, 6]), st.lists(steps, min_size=10, max_size=40))
def test_no_history_gives_wrong_bytes_or_leaks_a_block(dram_slots, history):
    async def play() -> None:
        with tempfile.TemporaryDirectory() as folder:
            played = History(Path(folder), dram_slots)
            try:
                for name, argument in history:
                    await played.step(name, argument)
            finally:
                await played.end()
                assert played.files_bytes() <= CAPACITY_BYTES

    asyncio.run(play())
