"""What a worker publishes is cut into messages of bounded size, in order, without loss."""

import asyncio
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster import subjects
from cluster.errors import RetryableError
from cluster.logs import Level, Logger
from cluster.messages import Describe, FinishEntry, InventoryChunk, TokensEntry
from cluster.testing import FakeBroker
from cluster.wire import encode
from kvhash import BlockHash
from kvindex.core import BlockAction, BlockEvent, InstanceId, InstanceMatch, Tier, TierRun
from kvindex.directory import Directory
from kvindex.inventory import Inventory
from kvpool import BlockPool
from policy.core import FinishReason, RequestId, TokenLogprobs
from policy.sampling_limits import LOGPROBS_MAX
from worker.inventory_replies import BLOCKS_PER_CHUNK, PackedInventory
from worker.outbox import (
    MESSAGE_BYTES_MAX,
    TOKENS_PER_ENTRY_MAX,
    Entry,
    Outbox,
    batches,
    tokens_per_entry,
)
from worker.pool_reporter import (
    EVENTS_PER_MESSAGE_MAX,
    PoolReporter,
    event_messages,
)

pytestmark = pytest.mark.unit

BUS_BYTES_MAX = 1024 * 1024


def wire_bytes(body: object) -> int:
    return len(encode(body, InstanceId("x" * 64), 1, 1, 1.0))


def tokens(number: int, count: int) -> TokensEntry:
    return TokensEntry(RequestId(f"req-{number:032x}"), 0, 0, number, b"\xff" * (4 * count))


@given(st.lists(st.integers(1, TOKENS_PER_ENTRY_MAX), max_size=40))
def test_entries_are_sent_once_in_order_and_never_over_the_bound(counts: list[int]) -> None:
    entries: list[Entry] = [tokens(number, count) for number, count in enumerate(counts)]
    messages = list(batches(entries))
    assert [entry for message in messages for entry in message.tokens] == entries
    assert all(wire_bytes(message) <= MESSAGE_BYTES_MAX + 4096 for message in messages)


@given(
    st.lists(st.tuples(st.integers(0, 20), st.integers(1, 400)), max_size=12),
    st.floats(-9999.0, 0.0),
    st.integers(0, 10**6),
)
def test_entries_with_logprobs_keep_to_the_bound(
    shapes: list[tuple[int, int]], logprob: float, token_id: int
) -> None:
    entries: list[Entry] = []
    for top, count in shapes:
        count = min(count, tokens_per_entry(top))
        told = TokenLogprobs(round(logprob, 6), ((token_id, round(logprob, 6)),) * top)
        entries.append(replace(tokens(len(entries), count), logprobs=(told,) * count))
    messages = list(batches(entries))
    assert [entry for message in messages for entry in message.tokens] == entries
    assert all(wire_bytes(message) <= MESSAGE_BYTES_MAX + 4096 for message in messages)


def test_every_answer_can_be_told_again_whatever_logprobs_it_has() -> None:
    assert tokens_per_entry(None) == TOKENS_PER_ENTRY_MAX
    assert tokens_per_entry(0) > tokens_per_entry(LOGPROBS_MAX) >= 300


def test_a_finish_goes_with_or_after_its_tokens() -> None:
    finish = FinishEntry(RequestId("r"), 0, 0, 5, FinishReason.STOP)
    (message,) = batches([tokens(0, 5), finish])
    assert message.finished == (finish,)
    assert len(message.tokens) == 1


@given(st.lists(st.integers(1, 2000), max_size=40), st.integers(1, 10**6))
def test_events_keep_their_numbers_over_messages(chains: list[int], first_number: int) -> None:
    events = tuple(BlockEvent(BlockAction.STORED, bytes(16 * blocks), Tier.DRAM) for blocks in chains)
    messages = list(event_messages(first_number, events))
    assert tuple(event for message in messages for event in message.events) == events
    number = first_number
    for message in messages:
        assert message.first_number == number
        assert len(message.events) <= EVENTS_PER_MESSAGE_MAX
        assert wire_bytes(message) < BUS_BYTES_MAX
        number += len(message.events)


class SlowBus:
    """Keeps what was published; each message takes a few turns of the event loop."""

    instance = InstanceId("i")

    def __init__(self) -> None:
        self.published: list[object] = []

    async def publish(self, subject: str, body: object) -> None:
        for _ in range(3):
            await asyncio.sleep(0)
        self.published.append(body)


async def test_flushing_while_the_outbox_sends_keeps_the_order_and_waits_for_all() -> None:
    bus = SlowBus()
    outbox = Outbox(bus, Logger(Level.ERROR))
    running = asyncio.create_task(outbox.run())
    for number in range(8):
        outbox.put(InstanceId("g"), tokens(number, TOKENS_PER_ENTRY_MAX))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    outbox.put(InstanceId("g"), tokens(8, 1))
    await outbox.flush()
    running.cancel()
    sent = [entry.output_index for message in bus.published for entry in message.tokens]
    assert sent == list(range(9))


async def test_a_pool_that_did_not_change_is_told_no_more_often_than_the_heartbeat() -> None:
    bus, pool = SlowBus(), BlockPool(4)
    reporter = PoolReporter(bus, pool, Logger(Level.ERROR))
    running = asyncio.create_task(reporter.run())
    for _ in range(20):
        reporter.changed()
        await asyncio.sleep(0.005)
    assert len(bus.published) <= 1
    (block_id,) = pool.allocate(1)
    pool.store(block_id, BlockHash(bytes(16)), None)
    reporter.changed()
    await asyncio.sleep(0.05)
    assert bus.published[-1].first_number == 1
    assert len(bus.published[-1].events) == 1
    running.cancel()


def test_no_events_still_tell_the_next_number() -> None:
    (message,) = event_messages(7, ())
    assert (message.first_number, message.events) == (7, ())


def all_chunks(as_of_number: int, inventory: Inventory) -> list[InventoryChunk]:
    parts = inventory.snapshot().parts(BLOCKS_PER_CHUNK)
    return list(PackedInventory(as_of_number, parts).chunks(0, len(parts)))


@pytest.mark.parametrize("blocks", [1, BLOCKS_PER_CHUNK, BLOCKS_PER_CHUNK + 1])
def test_an_inventory_comes_back_from_its_chunks(blocks: int) -> None:
    hashes = [number.to_bytes(16, "big") for number in range(1, blocks + 1)]
    held = [(value, hashes[index - 1] if index else None, Tier.DRAM) for index, value in enumerate(hashes)]
    chunks = all_chunks(9, Inventory(held))
    assert [chunk.chunk for chunk in chunks] == list(range(len(chunks)))
    assert {(chunk.as_of_number, chunk.chunks) for chunk in chunks} == {(9, len(chunks))}
    assert all(wire_bytes(chunk) < BUS_BYTES_MAX for chunk in chunks)
    assert [triple for chunk in chunks for triple in _triples(chunk)] == held


def test_an_inventory_of_mixed_tiers_needs_few_chunks() -> None:
    """As blocks are used again and again, fast and slow ones stand beside each other in no order."""
    held = []
    for chain_number in range(1000):
        hashes = [(1000 * chain_number + place + 1).to_bytes(16, "big") for place in range(3)]
        tiers = (Tier.DEVICE, Tier.DRAM, Tier.SSD)[-(chain_number % 3) - 1 :] + (Tier.SSD,) * 3
        held += zip(hashes, [None, *hashes], tiers, strict=False)
    chunks = all_chunks(9, Inventory(held))
    assert len(chunks) == 3
    assert sorted(triple for chunk in chunks for triple in _triples(chunk)) == sorted(held)


def test_what_happens_while_an_inventory_is_sent_comes_as_events() -> None:
    """Inventory and the events after its number are the pool as it is in the end."""
    instance = InstanceId("decode-0")
    pool = BlockPool(4, lower=((Tier.SSD, 8),), sink_ahead_blocks=4)
    first, second, third = (BlockHash(bytes([number]) * 16) for number in (1, 2, 3))
    for block_hash, parent in ((first, None), (second, first)):
        (block_id,) = pool.allocate(1)
        pool.store(block_id, block_hash, parent)
        pool.release((block_id,))
    as_of, snapshot = pool.inventory_snapshot()
    pool.take_events()
    while sinks := pool.take_sinks(8):
        assert all(pool.sunk(sink) for sink in sinks)
    pool.release(pool.allocate(4))
    (block_id,) = pool.allocate(1)
    pool.store(block_id, third, None)
    directory = Directory()
    directory.replace(instance, [part.pack() for part in snapshot.parts(BLOCKS_PER_CHUNK)])
    first_number, events = pool.take_events()
    assert first_number == as_of + 1
    for event in events:
        directory.apply(instance, event)
    in_ssd, in_dram = (TierRun(tier, blocks) for tier, blocks in ((Tier.SSD, 2), (Tier.DRAM, 1)))
    assert directory.match(first + second) == (InstanceMatch(instance, 2, (in_ssd,)),)
    assert directory.match(third) == (InstanceMatch(instance, 1, (in_dram,)),)


def _triples(chunk: InventoryChunk) -> list[tuple[bytes, bytes | None, Tier]]:
    def pieces(packed: bytes) -> list[bytes]:
        return [packed[start : start + 16] for start in range(0, len(packed), 16)]

    parents = [None if parent == bytes(16) else parent for parent in pieces(chunk.parents)]
    return [
        (value, parent, chunk.tier) for value, parent in zip(pieces(chunk.block_hashes), parents, strict=True)
    ]


async def test_the_reporter_ends_when_cancelled_in_the_very_turn_in_which_the_pool_changed() -> None:
    """`asyncio.wait_for` of Python 3.11 swallows such a cancellation, and closing would hang."""
    reporter = PoolReporter(FakeBroker().bus("w"), BlockPool(4), Logger(Level.ERROR))
    running = asyncio.create_task(reporter.run())
    await asyncio.sleep(0)
    reporter.changed()
    await asyncio.sleep(0)
    running.cancel()
    async with asyncio.timeout(5):
        await asyncio.wait({running})
    assert running.cancelled()


async def test_what_asks_for_no_inventory_is_refused() -> None:
    broker = FakeBroker()
    bus, asker = broker.bus("decode-0"), broker.bus("kvmeta-0")
    reporter = PoolReporter(bus, BlockPool(4), Logger(Level.ERROR))
    await reporter.start()
    with pytest.raises(RetryableError, match="asks for no inventory"):
        await asker.request(subjects.kv_inventory(bus.instance), Describe(), timeout_s=1.0)
    await reporter.close()
    await bus.close()
    await asker.close()
