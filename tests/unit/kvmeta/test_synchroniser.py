import asyncio

import pytest
from tests.support.eventually import Clock, eventually
from tests.support.records import gateway, registry, worker

from cluster import subjects
from cluster.errors import ProtocolError, RetryableError
from cluster.logs import Level, Logger
from cluster.messages import BlockEvents, InventoryChunk, InventoryRequest
from cluster.metrics import ServiceMetrics
from cluster.testing import FakeBroker
from kvindex.core import BlockAction, BlockEvent, HeldRun, InstanceId, Tier
from kvindex.directory import Directory
from kvmeta.fetch import fetch_inventory
from kvmeta.metrics import KvmetaMetrics
from kvmeta.synchroniser import Synchroniser
from policy.core import Role
from protocol.inventory import RETRY_INTERVAL_S

pytestmark = pytest.mark.unit

P1, P2 = InstanceId("p1"), InstanceId("p2")
NO_PARENT = bytes(16)


def block(number: int) -> bytes:
    return number.to_bytes(16, "big")


def chain(*numbers: int) -> bytes:
    return b"".join(block(number) for number in numbers)


def stored(*numbers: int, parent: int | None = None) -> BlockEvent:
    return BlockEvent(
        BlockAction.STORED, chain(*numbers), Tier.DRAM, b"" if parent is None else block(parent)
    )


class Holder:
    """An instance with a pool, as kvmeta sees it: events and inventories on the bus."""

    def __init__(self, broker: FakeBroker, name: str, incarnation: int = 1) -> None:
        self.name = InstanceId(name)
        self.bus = broker.bus(name, incarnation)
        self.blocks: list[tuple[bytes, bytes]] = []
        self.as_of_number = 0
        self.asked = 0
        self.gate = asyncio.Event()
        self.gate.set()
        self.chunk_blocks = 2

    async def start(self) -> None:
        self.subscription = await self.bus.subscribe(subjects.kv_inventory(self.name), self._inventory)

    async def say(self, first_number: int, *events: BlockEvent) -> None:
        await self.bus.publish(subjects.kv_events(self.name), BlockEvents(first_number, events))

    def hold(self, as_of_number: int, *numbers: int) -> None:
        """A single chain of blocks."""
        self.as_of_number = as_of_number
        parents = [NO_PARENT, *(block(number) for number in numbers)]
        self.blocks = list(zip([block(number) for number in numbers], parents, strict=False))

    async def _inventory(self, received):
        assert isinstance(received.body, InventoryRequest)
        self.asked += 1
        blocks, as_of_number = list(self.blocks), self.as_of_number
        await self.gate.wait()
        parts = [blocks[i : i + self.chunk_blocks] for i in range(0, len(blocks), self.chunk_blocks)] or [[]]
        return tuple(
            InventoryChunk(
                as_of_number=as_of_number,
                chunk=number,
                chunks=len(parts),
                tier=Tier.DRAM,
                block_hashes=b"".join(block_hash for block_hash, _ in part),
                parents=b"".join(parent for _, parent in part),
            )
            for number, part in enumerate(parts)
        )


class Stage:
    def __init__(self) -> None:
        self.broker = FakeBroker()
        self.clock = Clock()
        self.directory = Directory()
        self.metrics = ServiceMetrics()
        self.synchroniser = Synchroniser(
            self.broker.bus("kvmeta-1"),
            self.directory,
            KvmetaMetrics(self.metrics.registry),
            Logger(Level.ERROR),
            self.clock,
            chunk_timeout_s=0.2,
        )
        self.holders: dict[InstanceId, Holder] = {}

    async def holder(self, name: str, incarnation: int = 1) -> Holder:
        made = Holder(self.broker, name, incarnation)
        await made.start()
        self.holders[made.name] = made
        return made

    def register(self, *names: str, incarnation: int = 1) -> None:
        records = (worker(name, Role.PREFILL, incarnation=incarnation) for name in names)
        self.synchroniser.registry_changed(registry(gateway("g1"), *records))

    async def in_sync(self) -> None:
        assert await self.synchroniser.synchronised(5.0) == frozenset()

    def pass_time(self) -> None:
        self.clock.now_s += RETRY_INTERVAL_S
        self.synchroniser.tick()

    def held(self, *numbers: int) -> dict[InstanceId, int]:
        return {match.instance: match.prefix_blocks for match in self.directory.match(chain(*numbers))}

    def sample(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(f"moonpool_kvmeta_{name}", labels) or 0


@pytest.fixture
async def stage():
    made = Stage()
    await made.synchroniser.start()
    yield made
    await made.synchroniser.close()


async def test_takes_inventories_of_all_registered(stage: Stage):
    (await stage.holder("p1")).hold(4, 1, 2, 3, 4, 5)
    (await stage.holder("p2")).hold(1, 1, 2)
    stage.register("p1", "p2")
    assert stage.synchroniser.unsynchronised() == {P1, P2}
    await stage.in_sync()
    assert stage.held(1, 2, 3, 4, 5, 6) == {P1: 5, P2: 2}
    assert stage.sample("blocks") == 7
    assert stage.sample("instances", state="synchronised") == 2


async def test_applies_events_in_order(stage: Stage):
    holder = await stage.holder("p1")
    stage.register("p1")
    await stage.in_sync()
    await holder.say(1, stored(1, 2), stored(3, parent=2))
    await holder.say(3, BlockEvent(BlockAction.REMOVED, chain(3), Tier.DRAM))
    await eventually(lambda: stage.sample("events_total") == 3)
    assert stage.held(1, 2, 3) == {P1: 2}
    assert holder.asked == 1


async def test_events_that_come_before_the_inventory_are_kept(stage: Stage):
    holder = await stage.holder("p1")
    holder.hold(2, 1, 2)
    holder.gate.clear()
    stage.register("p1")
    await eventually(lambda: holder.asked == 1)
    await holder.say(2, stored(2, parent=1), stored(3, parent=2))
    holder.gate.set()
    await stage.in_sync()
    assert stage.held(1, 2, 3) == {P1: 3}


async def test_a_gap_asks_for_the_inventory(stage: Stage):
    holder = await stage.holder("p1")
    stage.register("p1")
    await stage.in_sync()
    holder.hold(5, 1, 2, 3)
    await holder.say(5, stored(3, parent=2))
    await eventually(lambda: holder.asked == 2)
    await stage.in_sync()
    assert stage.held(1, 2, 3) == {P1: 3}


async def test_a_contradiction_asks_again_once_time_has_passed(stage: Stage):
    holder = await stage.holder("p1")
    stage.register("p1")
    await stage.in_sync()
    await holder.say(1, stored(9, parent=8))
    await eventually(lambda: stage.sample("contradictions_total") == 1)
    assert stage.synchroniser.unsynchronised() == {P1}
    assert holder.asked == 1
    holder.hold(1, 1)
    stage.pass_time()
    await stage.in_sync()
    assert stage.held(1) == {P1: 1}


async def test_malformed_hashes_are_a_contradiction(stage: Stage):
    holder = await stage.holder("p1")
    stage.register("p1")
    await stage.in_sync()
    await holder.say(1, BlockEvent(BlockAction.STORED, b"short", Tier.DRAM))
    await eventually(lambda: stage.sample("contradictions_total") == 1)
    stage.pass_time()
    await stage.in_sync()


async def test_an_inventory_with_holes_is_asked_for_again(stage: Stage):
    holder = await stage.holder("p1")
    holder.blocks = [(block(2), block(1))]
    stage.register("p1")
    await eventually(lambda: stage.sample("contradictions_total") == 1)
    holder.hold(1, 1, 2)
    stage.pass_time()
    await stage.in_sync()
    assert stage.held(1, 2) == {P1: 2}


async def test_a_removed_instance_is_forgotten(stage: Stage):
    for name in ("p1", "p2"):
        (await stage.holder(name)).hold(1, 1)
    stage.register("p1", "p2")
    await stage.in_sync()
    stage.register("p2")
    assert stage.held(1) == {P2: 1}
    assert stage.directory.instances() == (P2,)


async def test_removed_while_its_inventory_is_under_way(stage: Stage):
    holder = await stage.holder("p1")
    holder.hold(1, 1)
    holder.gate.clear()
    stage.register("p1")
    await eventually(lambda: holder.asked == 1)
    stage.register()
    holder.gate.set()
    assert stage.synchroniser.unsynchronised() == frozenset()
    assert stage.directory.instances() == ()
    stage.register("p1")
    await stage.in_sync()
    assert stage.held(1) == {P1: 1}


async def test_a_restarted_instance_starts_afresh(stage: Stage):
    old = await stage.holder("p1")
    old.hold(3, 1, 2, 3)
    stage.register("p1")
    await stage.in_sync()
    await old.subscription.unsubscribe()
    new = await stage.holder("p1", incarnation=2)
    new.hold(1, 1)
    stage.register("p1", incarnation=2)
    assert stage.held(1, 2, 3) == {}
    await old.say(4, stored(4, parent=3))
    await stage.in_sync()
    assert stage.held(1, 2, 3, 4) == {P1: 1}


async def test_a_silent_instance_delays_nobody_else_for_long(stage: Stage):
    (await stage.holder("p1")).hold(1, 1)
    stage.register("p1", "p2")
    assert await stage.synchroniser.synchronised(0.05) == {P2}
    assert stage.held(1) == {P1: 1}
    assert stage.sample("inventories_total", outcome="failed") == 1
    (await stage.holder("p2")).hold(1, 1)
    stage.pass_time()
    await stage.in_sync()
    assert stage.held(1) == {P1: 1, P2: 1}


async def test_events_in_anothers_name_change_nothing(stage: Stage):
    holder = await stage.holder("p1")
    stage.register("p1")
    await stage.in_sync()
    await stage.broker.bus("p2").publish(subjects.kv_events(P1), BlockEvents(1, (stored(1),)))
    await holder.say(1, stored(2))
    await eventually(lambda: stage.held(2))
    assert stage.held(1) == {}


class TestFetch:
    """What does not fit together is refused, never taken in part."""

    CHUNK = InventoryChunk(3, 0, 2, Tier.DRAM, block(1), NO_PARENT)
    SECOND = InventoryChunk(3, 1, 2, Tier.SSD, block(2), block(1))

    async def fetch(self, *replies: object):
        broker = FakeBroker()
        self.runs: list[HeldRun] = []

        async def answer(received):
            return replies

        await broker.bus("p1").subscribe(subjects.kv_inventory(P1), answer)
        bus = broker.bus("kvmeta-1")
        return await fetch_inventory(bus, P1, 7, self.runs.append, chunk_timeout_s=0.05)

    async def test_chunks_are_handed_on(self):
        came = await self.fetch(self.CHUNK, self.SECOND)
        assert (came.incarnation, came.as_of_number) == (7, 3)
        assert self.runs == [
            HeldRun(Tier.DRAM, block(1), NO_PARENT),
            HeldRun(Tier.SSD, block(2), block(1)),
        ]

    @pytest.mark.parametrize(
        ("second", "field"),
        [
            (InventoryChunk(3, 0, 2, Tier.DRAM, block(2), block(1)), "chunk:"),
            (InventoryChunk(3, 1, 3, Tier.DRAM, block(2), block(1)), "chunks:"),
            (InventoryChunk(4, 1, 2, Tier.DRAM, block(2), block(1)), "as_of_number:"),
            (InventoryChunk(3, 1, 2, Tier.DRAM, block(2), b""), "parents:"),
            (InventoryChunk(3, 1, 2, Tier.DRAM, b"x", b"x"), "block_hashes:"),
            (InventoryRequest(), "InventoryRequest"),
        ],
    )
    async def test_what_does_not_fit(self, second, field):
        with pytest.raises(ProtocolError, match=field):
            await self.fetch(self.CHUNK, second)

    @pytest.mark.parametrize("chunks", [0, 5000])
    async def test_number_of_chunks_is_bounded(self, chunks):
        with pytest.raises(ProtocolError, match="chunks:"):
            await self.fetch(InventoryChunk(3, 0, chunks, Tier.DRAM, b"", b""))

    async def test_a_missing_chunk_is_waited_for_only_so_long(self):
        with pytest.raises(RetryableError):
            await self.fetch(self.CHUNK)
