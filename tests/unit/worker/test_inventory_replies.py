"""An inventory is answered window by window, as of one event, and kept for a while in between."""

import asyncio

import pytest
from tests.support.virtual_time import run_in_virtual_time

from cluster import subjects
from cluster.errors import ProtocolError, RetryableError
from cluster.logs import Level, Logger
from cluster.messages import InventoryChunk, InventoryRequest
from cluster.testing import FakeBroker, FakeBus
from kvhash import BlockHash
from kvindex.core import InstanceId, Tier
from kvindex.directory import Directory
from kvindex.runs import HeldPart
from kvmeta.fetch import WINDOW_CHUNKS, fetch_inventory
from kvpool import BlockPool
from worker import inventory_replies
from worker.inventory_replies import KEPT_MAX, KEPT_S_MAX, InventoryReplies, PackedInventory
from worker.pool_reporter import PoolReporter

pytestmark = pytest.mark.unit

BLOCKS = 20
ASKER = InstanceId("kvmeta-0")


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inventory_replies, "BLOCKS_PER_CHUNK", 1)


def store(pool: BlockPool, number: int) -> BlockHash:
    (block_id,) = pool.allocate(1)
    block_hash = BlockHash(number.to_bytes(16, "big"))
    assert pool.store(block_id, block_hash, None)
    pool.release((block_id,))
    return block_hash


def filled_pool() -> BlockPool:
    pool = BlockPool(BLOCKS)
    for number in range(1, BLOCKS + 1):
        store(pool, number)
    return pool


async def ask(
    replies: InventoryReplies, first_chunk: int = 0, as_of_number: int = 0, asker: InstanceId = ASKER
) -> list[InventoryChunk]:
    answer = await replies.answer(asker, InventoryRequest(first_chunk, 8, as_of_number))
    return [chunk async for chunk in answer]


async def test_windows_go_on_in_one_inventory_whatever_happens_in_between() -> None:
    pool = filled_pool()
    replies = InventoryReplies(pool)
    chunks = await ask(replies)
    as_of_number = chunks[0].as_of_number
    for number in range(100, 110):
        store(pool, number)
    chunks += await ask(replies, 8, as_of_number)
    chunks += await ask(replies, 16, as_of_number)
    assert [chunk.chunk for chunk in chunks] == list(range(BLOCKS))
    assert {(chunk.as_of_number, chunk.chunks) for chunk in chunks} == {(as_of_number, BLOCKS)}
    assert [int.from_bytes(chunk.block_hashes, "big") for chunk in chunks] == list(range(1, BLOCKS + 1))
    with pytest.raises(RetryableError, match="kept no more"):
        await ask(replies, 8, as_of_number)


async def test_of_another_inventory_nothing_is_told() -> None:
    replies = InventoryReplies(filled_pool())
    (first, *_) = await ask(replies)
    with pytest.raises(RetryableError, match="kept no more"):
        await ask(replies, 8, first.as_of_number + 1)
    with pytest.raises(RetryableError, match="kept no more"):
        await ask(replies, 8, first.as_of_number, InstanceId("kvmeta-1"))
    assert len(await ask(replies, 8, first.as_of_number)) == 8


async def test_inventories_are_kept_for_a_bounded_number_of_askers() -> None:
    replies = InventoryReplies(filled_pool())
    for number in range(KEPT_MAX + 1):
        (first, *_) = await ask(replies, asker=InstanceId(f"kvmeta-{number}"))
    with pytest.raises(RetryableError, match="kept no more"):
        await ask(replies, 8, first.as_of_number, InstanceId("kvmeta-0"))
    assert len(replies._kept) == KEPT_MAX
    assert len(await ask(replies, 8, first.as_of_number, InstanceId("kvmeta-1"))) == 8


def test_what_nobody_goes_on_asking_for_is_forgotten() -> None:
    async def main() -> None:
        replies = InventoryReplies(filled_pool())
        inventory = PackedInventory(3, [HeldPart(Tier.DRAM, (), ())] * BLOCKS)
        replies._keep(ASKER, inventory)
        await asyncio.sleep(KEPT_S_MAX - 1.0)
        assert len(await ask(replies, 8, 3)) == 8
        await asyncio.sleep(KEPT_S_MAX - 1.0)
        assert replies._kept.keys() == {ASKER}, "it was asked for more a moment ago"
        await asyncio.sleep(2.0)
        assert replies._kept == {}

    run_in_virtual_time(main())


async def test_a_window_that_cannot_be_is_refused() -> None:
    replies = InventoryReplies(filled_pool())
    for bad in (InventoryRequest(-1), InventoryRequest(0, -1)):
        with pytest.raises(ProtocolError, match="first_chunk: "):
            await replies.answer(ASKER, bad)
    (first, *_) = await ask(replies)
    with pytest.raises(ProtocolError, match="there are 20"):
        await ask(replies, BLOCKS, first.as_of_number)


async def test_without_a_window_all_is_told() -> None:
    answer = await InventoryReplies(filled_pool()).answer(ASKER, InventoryRequest())
    assert len([chunk async for chunk in answer]) == BLOCKS


async def test_an_empty_pool_has_an_inventory_too() -> None:
    (chunk,) = await ask(InventoryReplies(BlockPool(4)))
    assert (chunk.chunks, chunk.block_hashes, chunk.parents) == (1, b"", b"")


class Fetching:
    """A reporter and a kvmeta's fetch on one bus."""

    def __init__(self) -> None:
        broker = FakeBroker()
        self.holder: FakeBus = broker.bus("decode-0")
        self.asker: FakeBus = broker.bus(ASKER)
        self.pool = filled_pool()
        self.reporter = PoolReporter(self.holder, self.pool, Logger(Level.ERROR))

    async def fetch(self, directory: Directory) -> int:
        replacement = directory.replacement(self.holder.instance)
        came = await fetch_inventory(
            self.asker,
            self.holder.instance,
            1,
            lambda run: directory.extend(replacement, run),
            chunk_timeout_s=5.0,
        )
        directory.commit(replacement)
        return came.as_of_number

    async def close(self) -> None:
        await self.reporter.close()
        await self.holder.close()
        await self.asker.close()


async def test_kvmeta_asks_window_by_window() -> None:
    fetching = Fetching()
    await fetching.reporter.start()
    asked: list[InventoryRequest] = []

    async def listen(received: object) -> None:
        asked.append(received.body)

    await fetching.asker.subscribe(subjects.kv_inventory(fetching.holder.instance), listen)
    directory = Directory()
    as_of_number = await fetching.fetch(directory)
    assert as_of_number == fetching.pool.inventory()[0]
    assert directory.blocks_of(fetching.holder.instance) == BLOCKS
    assert asked == [
        InventoryRequest(0, WINDOW_CHUNKS, 0),
        InventoryRequest(8, WINDOW_CHUNKS, as_of_number),
        InventoryRequest(16, WINDOW_CHUNKS, as_of_number),
    ]
    await fetching.close()


async def test_an_inventory_that_is_lost_half_way_fails_and_is_whole_the_next_time() -> None:
    fetching = Fetching()
    await fetching.reporter.start()
    replies = fetching.reporter._inventories
    answer = replies.answer

    async def forgetful(asker: InstanceId, request: InventoryRequest) -> object:
        if request.first_chunk == 16:
            replies._kept.clear()
            replies.answer = answer
        return await answer(asker, request)

    replies.answer = forgetful
    directory = Directory()
    with pytest.raises(RetryableError, match="kept no more"):
        await fetching.fetch(directory)
    assert directory.blocks_of(fetching.holder.instance) == 0
    await fetching.fetch(directory)
    assert directory.blocks_of(fetching.holder.instance) == BLOCKS
    await fetching.close()
