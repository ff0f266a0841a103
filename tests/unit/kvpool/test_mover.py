"""TierMover over a real pool: what it sinks and raises, and that no store can do worse than lose a block."""

import asyncio
import threading
from dataclasses import replace

import pytest
from tests.support.eventually import eventually
from tests.support.memory_store import Disk, MemoryStore
from tests.support.tier_world import BLOCK_BYTES, LIMITS, TierWorld, chain, content_of

from kvindex.core import Tier
from kvpool import CorruptBlock, MoverLimits, SsdStore

pytestmark = pytest.mark.unit

A = chain("a", 6)
LONG_S = 30.0


def counters(world, tier=Tier.SSD):
    return world.mover.counters.tiers[tier]


async def test_cached_blocks_are_sunk_ahead_of_need_and_cost_nothing_to_evict():
    async with TierWorld() as world:
        world.keep(A)
        world.start()
        await world.until(lambda: counters(world).sunk_blocks == 6)
        assert counters(world).sunk_bytes == 6 * BLOCK_BYTES
        assert [held[:2] for held in world.ssd.disk.held.values()] == [
            (block_hash, parent) for block_hash, parent in zip(A, [None, *A], strict=False)
        ]
        world.evict_all()
        assert world.pool.match_held(A) == 6
        assert world.pool.stats().dropped_total == 0


async def test_what_lies_below_rises_root_first_and_pinned():
    async with TierWorld() as world:
        await world.sink(A)
        block_ids = await world.mover.rise(A, LONG_S)
        assert len(block_ids) == 6
        world.check_content(block_ids, A)
        assert world.pool.stats().in_use == 6
        assert [block_id for load in world.loads for block_id in load] == block_ids
        assert (counters(world).risen_blocks, counters(world).risen_bytes) == (6, 6 * BLOCK_BYTES)
        world.pool.release(block_ids)
        assert world.all_is_free()
        assert world.pool.match(A) == 6


async def test_it_continues_from_what_the_caller_has_pinned():
    async with TierWorld() as world:
        await world.sink(A)
        first = await world.mover.rise(A, LONG_S, 2)
        rest = await world.mover.rise(A, LONG_S)
        assert (len(first), len(rest)) == (2, 4)
        world.check_content(first + rest, A)
        assert await world.mover.rise(A, LONG_S) == []
        world.pool.release(first + rest)


@pytest.mark.parametrize(("blocks_max", "risen"), [(0, 0), (1, 1), (4, 4), (100, 6)])
async def test_it_brings_no_more_than_asked(blocks_max, risen):
    async with TierWorld() as world:
        await world.sink(A)
        block_ids = await world.mover.rise(A, LONG_S, blocks_max)
        assert len(block_ids) == risen
        world.check_content(block_ids, A[:risen])
        assert world.ssd.reads.passed == risen
        world.pool.release(block_ids)


async def test_where_there_is_little_room_as_much_rises_as_fits():
    async with TierWorld(blocks=8) as world:
        await world.sink(A)
        others = world.hold(chain("others", 5))
        block_ids = await world.mover.rise(A, LONG_S)
        assert len(block_ids) == 3
        world.check_content(block_ids, A[:3])
        assert await world.mover.rise(A, LONG_S) == []
        world.pool.release(block_ids + others)


async def test_a_chain_that_lies_nowhere_rises_not():
    async with TierWorld() as world:
        assert await world.mover.rise(A, LONG_S) == []
        assert await world.mover.rise([], LONG_S) == []


async def test_blocks_are_loaded_before_anyone_may_compute_on_them():
    async with TierWorld() as world:
        await world.sink(A)
        reached = []
        load = world.mover._shared.loaded

        async def loaded(block_ids):
            reached.append((len(block_ids), world.pool.match(A)))
            await load(block_ids)

        world.mover._shared = replace(world.mover._shared, loaded=loaded)
        world.pool.release(await world.mover.rise(A, LONG_S))
        assert sum(blocks for blocks, _ in reached) == 6
        before = 0
        for blocks, match in reached:
            assert match == before
            before += blocks


@pytest.mark.parametrize("kind", ["corrupt", "unreadable"])
@pytest.mark.parametrize("bad", [0, 3, 5])
async def test_a_bad_copy_ends_the_rise_there_and_is_forgotten_with_what_hangs_on_it(kind, bad):
    async with TierWorld() as world:
        await world.sink(A)
        slot = next(slot for slot, held in world.ssd.disk.held.items() if held[0] == A[bad])
        if kind == "corrupt":
            world.ssd.corrupt(slot)
        else:
            world.ssd.fails_read = lambda asked: asked == slot
        block_ids = await world.mover.rise(A, LONG_S)
        assert len(block_ids) == bad
        world.check_content(block_ids, A[:bad])
        assert (counters(world).corrupt_blocks, counters(world).unreadable_blocks) == (
            (1, 0) if kind == "corrupt" else (0, 1)
        )
        (what, error), *others = world.troubles
        assert (what, isinstance(error, CorruptBlock), others) == ("reading from ssd", kind == "corrupt", [])
        assert world.pool.match_held(A) == bad
        world.pool.release(block_ids)
        assert world.all_is_free()
        # Computed again, it is sunk again.
        world.ssd.fails_read = lambda asked: False
        await world.sink(A)
        block_ids = await world.mover.rise(A, LONG_S)
        assert len(block_ids) == 6
        world.pool.release(block_ids)


async def test_at_the_deadline_it_gives_back_all_but_what_is_being_read_and_that_when_the_read_ends():
    async with TierWorld(limits=replace(LIMITS, read_threads=1)) as world:
        await world.sink(A)
        world.ssd.reads.shut()
        rise = asyncio.create_task(world.mover.rise(A, 0.3))
        await eventually(lambda: world.ssd.reads.waiting)
        assert await rise == []
        assert world.mover.counters.late_rises == 1
        # The thread is still at its block, which may not be anybody else's.
        assert world.ssd.reads.waiting == 1
        assert world.pool.available() == 7
        others = world.pool.allocate(7)
        world.ssd.reads.open()
        await eventually(lambda: world.pool.available() == 1)
        assert world.ssd.reads.passed == 1
        # What was read in full is good, and is kept.
        assert world.pool.match(A) == 1
        world.check_content(world.pool.acquire(A[:1]), A[:1])
        world.pool.release(world.pool.acquire(A[:1]) * 2 + others)
        assert world.all_is_free()


async def test_a_deadline_in_the_middle_keeps_what_had_come():
    async with TierWorld(limits=replace(LIMITS, read_threads=1)) as world:
        await world.sink(A)
        read, first_two = world.ssd.read, threading.Event()

        def read_two(slot, block_hash, into):
            if block_hash == A[2]:
                assert first_two.wait(10)
            read(slot, block_hash, into)

        world.ssd.read = read_two
        rise = asyncio.create_task(world.mover.rise(A, 0.3))
        block_ids = await rise
        assert len(block_ids) == 2
        world.check_content(block_ids, A[:2])
        first_two.set()
        await eventually(lambda: world.pool.stats().in_use == 2)
        world.pool.release(block_ids)


async def test_a_cancelled_rise_leaves_nothing_pinned():
    async with TierWorld(limits=replace(LIMITS, read_threads=2)) as world:
        await world.sink(A)
        world.ssd.reads.shut()
        rise = asyncio.create_task(world.mover.rise(A, LONG_S))
        await eventually(lambda: world.ssd.reads.waiting == 2)
        rise.cancel()
        with pytest.raises(asyncio.CancelledError):
            await rise
        assert world.pool.stats().in_use == 2
        world.ssd.reads.open()
        await eventually(world.all_is_free)
        assert world.ssd.reads.passed == 2


async def test_a_block_is_not_given_back_before_the_thread_that_fills_it_has_ended():
    async with TierWorld(limits=replace(LIMITS, read_threads=2)) as world:
        await world.sink(A[:2])
        read, began, opened = world.ssd.read, threading.Event(), threading.Event()
        reading: list[memoryview] = []

        def read_bad_then_late(slot, block_hash, into):
            if block_hash == A[0]:
                assert began.wait(10)
                raise CorruptBlock("bad")
            reading.append(into)
            began.set()
            assert opened.wait(10)
            read(slot, block_hash, into)

        world.ssd.read = read_bad_then_late
        rise = asyncio.create_task(world.mover.rise(A[:2], LONG_S))
        await world.until(lambda: counters(world).corrupt_blocks)
        # The chain is known to be lost, but its second block is still being read.
        others = world.pool.allocate(world.pool.available())
        assert len(others) == 7
        for block_id in others:
            world.arena.block(block_id)[:] = content_of(A[5])
        opened.set()
        assert await rise == []
        world.check_content(others, [A[5]] * 7)
        assert reading[0] == content_of(A[1])
        reading.clear()
        world.pool.release(others)
        assert world.all_is_free()


async def test_two_who_want_the_same_share_the_reads():
    async with TierWorld() as world:
        await world.sink(A)
        world.ssd.reads.shut()
        rises = [asyncio.create_task(world.mover.rise(A, LONG_S)) for _ in range(3)]
        await eventually(lambda: world.ssd.reads.waiting)
        assert world.pool.available() == 2
        world.ssd.reads.open()
        first, *others = await asyncio.gather(*rises)
        assert others == [first, first]
        assert world.ssd.reads.passed == 6
        world.check_content(first, A)
        for block_ids in (first, first, first):
            assert world.pool.stats().in_use == 6
            world.pool.release(block_ids)
        assert world.all_is_free()


async def test_one_who_wants_another_branch_waits_for_the_common_part_only():
    async with TierWorld(blocks=10) as world:
        one, other = chain("xxxxx", 5), chain("xxyyy", 5)
        assert one[:2] == other[:2]
        assert one[2] != other[2]
        await world.sink(one)
        world.keep(other)
        world.start()
        await world.until(lambda: counters(world).sunk_blocks == 8)
        await world.stop()
        world.evict_all()
        last = next(slot for slot, held in world.ssd.disk.held.items() if held[0] == one[4])
        read, opened = world.ssd.read, threading.Event()

        def read_late(slot, block_hash, into):
            if slot == last:
                assert opened.wait(10)
            read(slot, block_hash, into)

        world.ssd.read = read_late
        first = asyncio.create_task(world.mover.rise(one, LONG_S))
        second = asyncio.create_task(world.mover.rise(other, LONG_S))
        block_ids = await second
        world.check_content(block_ids, other)
        assert not first.done()
        opened.set()
        world.check_content(await first, one)
        assert world.ssd.reads.passed == 8
        world.pool.release(block_ids + first.result())
        assert world.all_is_free()


async def test_who_waits_for_a_rise_gets_it_although_its_owner_leaves():
    async with TierWorld(limits=replace(LIMITS, read_threads=1)) as world:
        await world.sink(A)
        read, wanted = world.ssd.read, threading.Event()
        read_hashes = []

        def read_unwanted_late(slot, block_hash, into):
            read_hashes.append(block_hash)
            if block_hash == A[4]:
                assert wanted.wait(10)
            read(slot, block_hash, into)

        world.ssd.read = read_unwanted_late
        world.ssd.reads.shut()
        owner = asyncio.create_task(world.mover.rise(A, LONG_S))
        await eventually(lambda: world.ssd.reads.waiting)
        others = [asyncio.create_task(world.mover.rise(A[:blocks], LONG_S)) for blocks in (4, 2)]
        await asyncio.sleep(0)
        owner.cancel()
        await asyncio.wait([owner])
        world.ssd.reads.open()
        for other, blocks in zip(others, (4, 2), strict=True):
            block_ids = await other
            world.check_content(block_ids, A[:blocks])
            world.pool.release(block_ids)
        wanted.set()
        await eventually(world.all_is_free)
        # The last two nobody wanted: at most the one was read that was begun before that was seen.
        assert read_hashes in (A[:4], A[:5])


async def test_who_waits_for_a_rise_takes_what_came_by_its_deadline():
    async with TierWorld(limits=replace(LIMITS, read_threads=1)) as world:
        await world.sink(A)
        read, opened = world.ssd.read, threading.Event()

        def read_three(slot, block_hash, into):
            if block_hash == A[3]:
                assert opened.wait(10)
            read(slot, block_hash, into)

        world.ssd.read = read_three
        owner = asyncio.create_task(world.mover.rise(A, LONG_S))
        other = asyncio.create_task(world.mover.rise(A, 0.3))
        block_ids = await other
        world.check_content(block_ids, A[:3])
        opened.set()
        assert (await owner)[:3] == block_ids
        world.pool.release(owner.result() + block_ids)
        assert world.all_is_free()


async def test_a_rise_that_others_wait_for_and_that_fails_fails_for_them_too():
    async with TierWorld() as world:
        await world.sink(A)
        slot = next(slot for slot, held in world.ssd.disk.held.items() if held[0] == A[2])
        world.ssd.corrupt(slot)
        world.ssd.reads.shut()
        rises = [asyncio.create_task(world.mover.rise(A, LONG_S)) for _ in range(2)]
        await eventually(lambda: world.ssd.reads.waiting)
        world.ssd.reads.open()
        first, second = await asyncio.gather(*rises)
        assert (len(first), second) == (2, first)
        assert counters(world).corrupt_blocks == 1
        world.pool.release(first + second)
        assert world.all_is_free()


async def test_a_block_computed_meanwhile_is_shared():
    async with TierWorld() as world:
        await world.sink(A[:2])
        world.ssd.reads.shut()
        rise = asyncio.create_task(world.mover.rise(A[:2], LONG_S))
        await eventually(lambda: world.ssd.reads.waiting)
        computed = world.hold(A[:2])
        world.ssd.reads.open()
        assert await rise == computed
        world.pool.release(computed)
        assert world.pool.stats().in_use == 2
        world.pool.release(computed)
        assert world.all_is_free()


async def test_an_engine_that_cannot_load_costs_the_rise():
    async with TierWorld() as world:
        await world.sink(A)
        world.fails_load = RuntimeError("device lost")
        assert await world.mover.rise(A, LONG_S) == []
        assert world.troubles == [("loading what rose", world.fails_load)]
        assert world.all_is_free()
        assert world.pool.match_held(A) == 6


async def test_no_more_threads_read_than_allowed():
    async with TierWorld(blocks=12, limits=replace(LIMITS, read_threads=3)) as world:
        await world.sink(A)
        world.ssd.reads.shut()
        rises = [asyncio.create_task(world.mover.rise(hashes, LONG_S)) for hashes in (A[:3], A)]
        await eventually(lambda: world.ssd.reads.waiting == 3)
        world.ssd.reads.open()
        for rise in rises:
            world.pool.release(await rise)
        assert world.ssd.reads.waiting_max == 3


@pytest.mark.parametrize("pieces_of", [1, 3, 6])
async def test_a_disk_that_hangs_keeps_no_block_but_those_that_are_written_to(pieces_of):
    limits = replace(LIMITS, read_threads=2, piece_bytes=pieces_of * BLOCK_BYTES)
    async with TierWorld(blocks=8, limits=limits) as world:
        await world.sink(A)
        world.ssd.reads.shut()
        assert await world.mover.rise(A, 0.05) == []
        threads = min(2, len(A) // pieces_of)
        assert world.pool.stats().in_use == world.ssd.reads.waiting == threads
        others = world.hold(chain("others", 8 - threads))
        world.ssd.reads.open()
        await eventually(lambda: world.pool.stats().in_use == len(others))
        world.check_content(others, chain("others", 8 - threads))
        world.pool.release(others)
        world.pool.check_integrity()
        block_ids = await world.mover.rise(A, LONG_S)
        held = world.pool.acquire(A)
        world.check_content(held, A)
        assert len(held) == len(A)
        world.pool.release(block_ids + held)


async def test_what_lies_behind_a_read_that_hangs_is_given_back_and_not_stored_when_it_ends():
    limits = replace(LIMITS, read_threads=2)
    async with TierWorld(blocks=8, limits=limits) as world:
        await world.sink(A)
        goes_on = threading.Event()
        first = next(slot for slot, held in world.ssd.disk.held.items() if held[0] == A[0])
        last = next(slot for slot, held in world.ssd.disk.held.items() if held[0] == A[5])
        world.ssd.fails_read = lambda slot: slot == last or (slot == first and not goes_on.wait(LONG_S))
        rise = asyncio.create_task(world.mover.rise(A, 0.3))
        await eventually(lambda: world.ssd.reads.passed == 6)
        assert world.pool.stats().in_use == 6
        assert await rise == []
        assert world.pool.stats().in_use == 1
        others = world.hold(chain("others", 7))
        goes_on.set()
        await eventually(lambda: world.pool.match(A) == 1)
        assert world.pool.stats().in_use == 7
        assert counters(world).unreadable_blocks == 0
        world.check_content(others, chain("others", 7))
        world.pool.release(others)


async def test_nobody_begins_to_wait_for_a_disk_that_hangs():
    async with TierWorld(blocks=12, limits=replace(LIMITS, stall_s=0.0)) as world:
        other = chain("b", 3)
        await world.sink(A)
        world.keep(other)
        world.start()
        await world.until(lambda: counters(world).sunk_blocks == 9)
        await world.stop()
        world.evict_all()
        world.ssd.reads.shut()
        hanging = asyncio.create_task(world.mover.rise(A, LONG_S))
        await eventually(lambda: world.ssd.reads.waiting)
        assert await world.mover.rise(other, LONG_S) == []
        # Nor for what is being read already.
        assert await world.mover.rise(A, LONG_S) == []
        assert world.mover.counters.stalled_rises == 2
        world.ssd.reads.open()
        world.pool.release(await hanging)
        block_ids = await world.mover.rise(other, LONG_S)
        assert len(block_ids) == 3
        world.pool.release(block_ids)


async def test_a_full_disk_is_told_and_left_alone_for_longer_and_longer_and_used_again_afterwards():
    async with TierWorld(blocks=6) as world:
        world.ssd.fails_write = lambda slot: True
        world.start()
        world.keep(A)
        await world.until(lambda: counters(world).backing_off)
        assert counters(world).write_failed_blocks == 4
        what, error = world.troubles[0]
        assert (what, str(error).endswith("no space left")) == ("writing to ssd", True)
        # Requests go on: blocks are given, at the price of what was cached.
        world.pool.release(world.hold(chain("b", 6)))
        world.evict_all()
        assert world.pool.stats().dropped_total > 0
        world.ssd.fails_write = lambda slot: False
        world.keep(A)
        await world.until(lambda: counters(world).sunk_blocks == 6)
        assert not counters(world).backing_off


async def test_a_failing_disk_is_not_written_to_while_it_is_left_alone():
    async with TierWorld(
        blocks=16, limits=replace(LIMITS, back_off_s_min=60.0, back_off_s_max=60.0)
    ) as world:
        world.ssd.fails_write = lambda slot: True
        world.start()
        world.keep(A)
        await world.until(lambda: counters(world).backing_off)
        tried = world.ssd.writes.passed
        for name in "bcd":
            world.keep(chain(name, 3))
            for _ in range(5):
                await asyncio.sleep(0)
        assert not world.pool.stats().tiers[-1].moving
        assert (world.ssd.writes.passed, len(world.troubles)) == (tried, 1)
        # Closing tries once more: what could not be written then may be by now.
        world.ssd.fails_write = lambda slot: False
        await world.stop()
        await world.mover.close(LONG_S)
        assert {copy.block_hash for copy in world.ssd.recover()} >= set(chain("b", 3) + chain("d", 3))


def test_the_pauses_grow_up_to_a_limit():
    limits = MoverLimits(back_off_s_min=0.5, back_off_s_max=60.0)
    assert [limits.back_off_s(failures) for failures in (1, 2, 3, 7, 8, 9, 10**9)] == [
        0.5,
        1,
        2,
        32,
        60,
        60,
        60,
    ]


@pytest.mark.parametrize(
    ("block_bytes", "batch_blocks", "piece_blocks"),
    [(4096, 128, 512), (368_640, 45, 5), (5 << 20, 3, 1), (64 << 20, 1, 1)],
)
def test_batches_and_pieces_are_bounded_in_blocks_and_bytes(block_bytes, batch_blocks, piece_blocks):
    limits = MoverLimits()
    assert limits.sink_batch_blocks(block_bytes) == batch_blocks
    assert limits.piece_blocks(block_bytes) == piece_blocks


async def test_a_slot_that_fails_costs_its_block_and_what_comes_after_it():
    async with TierWorld() as world:
        failing = set()
        write = world.ssd.write

        def write_some(slot, block_hash, parent, data):
            if block_hash == A[2]:
                failing.add(slot)
            world.ssd.fails_write = lambda asked: asked in failing
            write(slot, block_hash, parent, data)

        world.ssd.write = write_some
        world.keep(A)
        world.start()
        await world.until(lambda: world.pool.stats().tiers[-1].copies == 2 and world.troubles)
        await world.stop()
        world.evict_all()
        assert world.pool.match_held(A) == 2
        block_ids = await world.mover.rise(A, LONG_S)
        world.check_content(block_ids, A[:2])
        world.pool.release(block_ids)


async def test_a_block_given_to_somebody_else_while_it_is_written_is_not_kept_below():
    async with TierWorld(blocks=3) as world:
        world.ssd.writes.shut()
        world.keep(A[:3])
        world.start()
        await eventually(lambda: world.ssd.writes.waiting == 2)
        world.evict_all()
        reserved = world.pool.stats().tiers[-1].moving
        assert reserved == 3
        world.ssd.writes.open()
        await world.until(lambda: world.pool.stats().tiers[-1].free == 32)
        assert world.pool.stats().tiers[-1].discarded_total == 3
        assert world.pool.match_held(A) == 0
        assert not world.ssd.disk.held, "what was written for nothing is erased"


async def test_a_batch_under_way_settles_by_itself_when_sinking_is_cancelled():
    async with TierWorld() as world:
        world.ssd.writes.shut()
        world.keep(A)
        world.start()
        await eventually(lambda: world.ssd.writes.waiting == 2)
        await world.stop()
        assert world.pool.stats().tiers[-1].moving == 4
        world.ssd.writes.open()
        await eventually(lambda: counters(world).sunk_blocks == 4)
        assert world.all_is_free()


async def test_closing_sinks_what_is_cached():
    world = TierWorld(sink_ahead_blocks=0)
    world.keep(A)
    held = world.hold(chain("b", 2))
    await world.mover.close(LONG_S)
    assert world.ssd.closed
    assert [copy.block_hash for copy in world.ssd.recover()][:6] == A
    assert await world.mover.rise(A, LONG_S) == []
    world.pool.release(held)
    world.arena.close()


async def test_closing_gives_up_rises_and_waits_for_their_threads():
    world = TierWorld(limits=replace(LIMITS, read_threads=1))
    await world.sink(A)
    world.ssd.reads.shut()
    rise = asyncio.create_task(world.mover.rise(A, LONG_S))
    await eventually(lambda: world.ssd.reads.waiting)
    closing = asyncio.create_task(world.mover.close(LONG_S))
    await asyncio.sleep(0)
    assert not closing.done()
    world.ssd.reads.open()
    await closing
    assert world.ssd.closed
    block_ids = await rise
    world.check_content(block_ids, A[: len(block_ids)])
    assert len(block_ids) == world.ssd.reads.passed == 1
    world.pool.release(block_ids)
    assert world.all_is_free()
    world.arena.close()


@pytest.mark.parametrize("gate", ["reads", "writes"])
async def test_closing_does_not_wait_for_a_disk_that_hangs(gate):
    world = TierWorld(limits=replace(LIMITS, settle_s_max=0.02))
    rise = None
    if gate == "reads":
        await world.sink(A)
    else:
        world.keep(A)
    getattr(world.ssd, gate).shut()
    if gate == "reads":
        rise = asyncio.create_task(world.mover.rise(A, LONG_S))
        await eventually(lambda: world.ssd.reads.waiting)
    async with asyncio.timeout(5):
        await world.mover.close(0.1)
    assert not world.ssd.closed
    assert [what for what, _ in world.troubles][-1] == "closing"
    assert "its files stay open and locked" in str(world.troubles[-1][1])
    getattr(world.ssd, gate).open()
    if rise is not None:
        world.pool.release(await rise)
    await eventually(world.all_is_free)
    world.arena.close()


async def test_a_broken_disk_does_not_keep_blocks_from_dram():
    async with TierWorld(blocks=6, dram_slots=8) as world:
        world.ssd.fails_write = lambda slot: True
        world.start()
        world.keep(A)
        await world.until(lambda: counters(world, Tier.DRAM).sunk_blocks == 6)
        await world.until(lambda: counters(world).backing_off)
        world.evict_all()
        block_ids = await world.mover.rise(A, LONG_S)
        world.check_content(block_ids, A)
        world.pool.release(block_ids)


async def test_a_disk_that_hangs_does_not_keep_blocks_from_dram():
    async with TierWorld(blocks=6, dram_slots=13) as world:
        world.ssd.writes.shut()
        world.start()
        world.keep(A)
        await world.until(lambda: counters(world, Tier.DRAM).sunk_blocks == 6)
        # DRAM is to have 6 free slots again: more has to go down from there, and hangs.
        world.keep(chain("b", 6))
        await eventually(lambda: world.ssd.writes.waiting)
        await world.until(lambda: counters(world, Tier.DRAM).sunk_blocks == 12)
        world.ssd.writes.open()


async def test_a_chain_in_three_tiers_rises_from_where_each_block_lies():
    async with TierWorld(blocks=6, dram_slots=4) as world:
        names = [chain(name, 4) for name in "abc"]
        world.start()
        for hashes in names:
            world.keep(hashes)
            await world.until(lambda hashes=hashes: world.pool.stats().tiers[-1].copies >= 4)
        await world.until(world.all_is_free)
        world.evict_all()
        risen = 0
        for hashes in names:
            held = world.pool.match_held(hashes)
            block_ids = await world.mover.rise(hashes, LONG_S)
            assert len(block_ids) == held
            world.check_content(block_ids, hashes[:held])
            world.pool.release(block_ids)
            risen += held
            world.evict_all()
        assert risen >= 4
        total = sum(counters(world, tier).risen_blocks for tier in (Tier.DRAM, Tier.SSD))
        assert total == risen


async def test_a_restart_finds_on_the_ssd_what_was_cached(tmp_path):
    def open_store():
        return SsdStore.open(tmp_path, 1 << 20, BLOCK_BYTES, b"id")

    async with TierWorld(blocks=16, ssd=open_store(), sink_ahead_blocks=0) as world:
        world.keep(A)
        world.keep(chain("ab", 7))
    async with TierWorld(ssd=open_store()) as world:
        assert world.pool.restore(Tier.SSD, world.ssd.recover()) == 12
        for hashes in (A, chain("ab", 7)):
            block_ids = world.pool.acquire(hashes)
            block_ids += await world.mover.rise(hashes, LONG_S)
            world.check_content(block_ids, hashes)
            world.pool.release(block_ids)


async def test_corrupt_bytes_on_the_ssd_are_recomputed_never_used(tmp_path):
    store = SsdStore.open(tmp_path, 1 << 20, BLOCK_BYTES, b"id")
    async with TierWorld(ssd=store) as world:
        await world.sink(A)
        path = tmp_path / "segment-0000.data"
        slot = next(copy.slot for copy in store.recover() if copy.block_hash == A[3])
        raw = bytearray(path.read_bytes())
        raw[slot * 4096 + 17] ^= 1
        path.write_bytes(raw)
        block_ids = await world.mover.rise(A, LONG_S)
        assert len(block_ids) == 3
        world.check_content(block_ids, A[:3])
        assert counters(world).corrupt_blocks == 1
        world.pool.release(block_ids)
        held = world.hold(A)
        world.check_content(held, A)
        world.pool.release(held)


async def test_bytes_of_somebody_else_are_never_found_again_under_a_hash_after_a_restart():
    """What is thrown away has been written all the same: a crash must not bring it back."""
    disk = Disk()
    async with TierWorld(blocks=3, ssd=MemoryStore(32, BLOCK_BYTES, disk)) as world:
        world.ssd.writes.shut()
        world.keep(A[:3])
        world.start()
        await eventually(lambda: world.ssd.writes.waiting == 2)
        world.evict_all()
        world.ssd.fails_erase = lambda slot: True
        world.ssd.writes.open()
        await world.until(lambda: world.pool.stats().tiers[-1].discarded_total == 3)
    async with TierWorld(ssd=MemoryStore(32, BLOCK_BYTES, disk)) as world:
        found = world.pool.restore(Tier.SSD, world.ssd.recover())
        assert found == 2, "the two that were read in time"
        block_ids = await world.mover.rise(A, LONG_S)
        world.check_content(block_ids, A[:found])
        world.pool.release(block_ids)


def open_ssd(folder):
    return SsdStore.open(folder, 1 << 20, BLOCK_BYTES, b"id")


async def test_what_is_not_to_be_trusted_does_not_come_back_from_the_ssd_after_a_restart(tmp_path):
    other = chain("b", 3)
    async with TierWorld(blocks=16, ssd=open_ssd(tmp_path)) as world:
        world.keep(A)
        world.keep(other)
        world.start()
        await world.until(lambda: counters(world).sunk_blocks == 9)
        world.forget(A)
        await world.until(lambda: world.pool.stats().tiers[0].free == world.ssd.slots - 3)
        left = [copy.block_hash for copy in world.ssd.recover()]
        assert sorted(left) == sorted(other), "at once, not only when the instance stops"
    async with TierWorld(ssd=open_ssd(tmp_path)) as world:
        assert world.pool.restore(Tier.SSD, world.ssd.recover()) == 3
        assert (world.pool.match_held(A), world.pool.match_held(other)) == (0, 3)


async def test_what_is_not_to_be_trusted_any_more_while_it_is_written_does_not_come_back_either():
    disk = Disk()
    async with TierWorld(ssd=MemoryStore(32, BLOCK_BYTES, disk)) as world:
        world.ssd.writes.shut()
        world.keep(A)
        world.start()
        await eventually(lambda: world.ssd.writes.waiting == 2)
        world.forget(A)
        world.ssd.writes.open()
        await world.until(lambda: world.pool.stats().tiers[0].free == 32)
        assert world.pool.stats().tiers[0].discarded_total
    assert not disk.held


async def test_a_slot_that_cannot_be_erased_is_told_left_out_and_tried_again():
    async with TierWorld(blocks=16) as world:
        world.start()
        world.keep(A)
        await world.until(lambda: counters(world).sunk_blocks == 6)
        slots = {held[0]: slot for slot, held in world.ssd.disk.held.items()}
        bad = slots[A[3]]
        world.ssd.fails_erase = lambda slot: slot == bad
        world.forget(A)
        await world.until(lambda: counters(world).erase_failures)
        what, error = world.troubles[0]
        assert (what, str(error)) == ("erasing in ssd", f"slot {bad}: input/output error")
        # The others are erased, and writing goes on beside it.
        world.keep(chain("b", 6))
        await world.until(lambda: counters(world).sunk_blocks == 12)
        await eventually(lambda: retried(world, 3))
        assert not counters(world).backing_off
        assert [slot for slot, held in world.ssd.disk.held.items() if held[0] in A] == [bad]
        assert world.pool.erasures(Tier.SSD, 32) == (bad,)
        world.ssd.fails_erase = lambda slot: False
        await eventually(lambda: retried(world, 3) and not world.pool.erasures(Tier.SSD, 32))
        assert bad not in world.ssd.disk.held


def retried(world, failures):
    """As where requests come and go all the time: whether erasing failed that often by now."""
    world.mover.wake()
    return counters(world).erase_failures >= failures


async def test_at_the_end_what_must_not_be_found_again_is_erased():
    disk = Disk()
    async with TierWorld(ssd=MemoryStore(32, BLOCK_BYTES, disk)) as world:
        await world.sink(A)
        world.ssd.corrupt(next(slot for slot, held in disk.held.items() if held[0] == A[1]))
        world.pool.release(await world.mover.rise(A, LONG_S))
        assert len(disk.held) == 5
    assert [held[0] for held in disk.held.values()] == A[:1]
