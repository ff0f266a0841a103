import asyncio
from contextlib import asynccontextmanager

import pytest
from tests.support.contexts import deregister, register, service_context
from tests.support.eventually import eventually
from tests.support.records import worker

from cluster import subjects
from cluster.errors import NoResponderError
from cluster.messages import InventoryChunk, MatchReply, MatchRequest
from cluster.testing import FakeBroker, FakeStore
from kvindex.core import InstanceId, InstanceMatch, Tier, TierRun
from kvmeta.app import KvmetaApp
from kvmeta.config import KvmetaConfig
from policy.core import Role

pytestmark = pytest.mark.unit

BLOCK = b"b" * 16
P1 = InstanceId("p1")
ASK_TIMEOUT_S = 5.0


class Stage:
    def __init__(self) -> None:
        self.broker = FakeBroker()
        self.store = FakeStore()
        self.conductor = self.broker.bus("conductor-1")
        self.inventory_gate = asyncio.Event()
        self.inventory_gate.set()

    async def holder(self, name: str) -> None:
        """A registered instance that holds BLOCK."""

        async def inventory(received):
            await self.inventory_gate.wait()
            return InventoryChunk(0, 0, 1, Tier.DRAM, BLOCK, bytes(16))

        await self.broker.bus(name).subscribe(subjects.kv_inventory(InstanceId(name)), inventory)
        register(self.store, worker(name, Role.PREFILL))

    @asynccontextmanager
    async def kvmeta(self, **settings):
        config = KvmetaConfig(**settings)
        async with service_context(self.broker, self.store, "kvmeta-1", Role.KVMETA, config) as context:
            app = KvmetaApp(context, config)
            try:
                yield app
            finally:
                await app.close()

    async def match(self) -> MatchReply:
        reply = await self.conductor.request(
            subjects.KVMETA_MATCH, MatchRequest(BLOCK), timeout_s=ASK_TIMEOUT_S
        )
        assert isinstance(reply, MatchReply)
        return reply


@pytest.fixture
async def stage() -> Stage:
    return Stage()


async def test_answers_only_once_synchronised(stage: Stage):
    await stage.holder("p1")
    stage.inventory_gate.clear()
    async with stage.kvmeta() as app:
        starting = asyncio.create_task(app.start())
        with pytest.raises(NoResponderError):
            await stage.match()
        stage.inventory_gate.set()
        record = await starting
        assert record.roles == (Role.KVMETA,)
        assert await stage.match() == MatchReply((InstanceMatch(P1, 1, (TierRun(Tier.DRAM, 1),)),))
        assert app.load().blocks_indexed == 1


async def test_a_dead_instance_does_not_keep_it_from_serving(stage: Stage):
    await stage.holder("p1")
    register(stage.store, worker("dead", Role.PREFILL))
    async with stage.kvmeta(sync_wait_s_max=0.1) as app:
        await app.start()
        assert [match.instance for match in (await stage.match()).matches] == [P1]


async def test_follows_the_registry(stage: Stage):
    async with stage.kvmeta() as app:
        await app.start()
        assert await stage.match() == MatchReply(())
        await stage.holder("p1")
        await eventually(lambda: app.load().blocks_indexed == 1)
        deregister(stage.store, "p1")
        await eventually(lambda: app.load().blocks_indexed == 0)
        assert await stage.match() == MatchReply(())


async def test_answers_nothing_once_drained(stage: Stage):
    async with stage.kvmeta() as app:
        await app.start()
        await app.drain(1.0)
        with pytest.raises(NoResponderError):
            await stage.match()
