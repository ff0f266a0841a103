import asyncio
from contextlib import asynccontextmanager

import pytest
from tests.support.contexts import deregister, register, service_context
from tests.support.eventually import eventually
from tests.support.records import worker

from cluster import keys, subjects
from cluster.errors import NoResponderError
from cluster.messages import InventoryChunk, MatchReply, MatchRequest, PrefixHeats
from cluster.metrics import ServiceMetrics
from cluster.testing import FakeBroker, FakeStore
from kvindex.core import InstanceId, InstanceMatch, Tier, TierRun
from kvmeta.app import KvmetaApp
from kvmeta.config import KvmetaConfig
from kvmeta.replication import DUTY, ReplicationSettings, settings_of
from policy.core import Role
from policy.replicate import ReplicationLimits

pytestmark = pytest.mark.unit

BLOCK = b"b" * 16
P1 = InstanceId("p1")
ASK_TIMEOUT_S = 5.0


class Stage:
    def __init__(self) -> None:
        self.broker = FakeBroker()
        self.store = FakeStore()
        self.conductor = self.broker.bus("conductor-1")
        self.metrics: dict[str, ServiceMetrics] = {}
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
    async def kvmeta(self, name: str = "kvmeta-1", **settings):
        config = KvmetaConfig(**settings)
        async with service_context(self.broker, self.store, name, Role.KVMETA, config) as context:
            self.metrics[name] = context.metrics
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


async def test_stands_for_the_duty_of_replication_until_it_drains(stage: Stage):
    async with stage.kvmeta() as app:
        await app.start()
        await eventually(lambda: keys.duty(DUTY) in stage.store.entries)
        assert stage.store.entries[keys.duty(DUTY)].startswith(b"kvmeta-1/")
        await app.drain(1.0)
        assert keys.duty(DUTY) not in stage.store.entries


async def test_without_replication_it_tells_no_heat_and_takes_no_duty(stage: Stage):
    """Beside one that does: that one has the duty, and only what was asked of it is told."""
    heats: list[PrefixHeats] = []

    async def hear(received):
        heats.append(received.body)

    await stage.conductor.subscribe(subjects.KVMETA_HEAT, hear)
    await stage.holder("p1")
    settings = {"heat_interval_s": 0.01}
    async with (
        stage.kvmeta("kvmeta-1", replication=False, **settings) as quiet,
        stage.kvmeta("kvmeta-2", **settings) as telling,
    ):
        await quiet.start()
        await telling.start()
        for _ in range(6):
            await stage.match()
        await eventually(lambda: sum(heat.requests for told in heats for heat in told.prefixes) >= 2)
        assert stage.store.entries[keys.duty(DUTY)].startswith(b"kvmeta-2/")
        # The other half of the six was asked of the quiet one.
        assert sum(heat.requests for told in heats for heat in told.prefixes) <= 3
        assert {heat.block_hashes for told in heats for heat in told.prefixes} == {BLOCK}


async def test_the_clusters_configuration_says_what_is_hot(stage: Stage):
    await stage.holder("p1")

    def value(name: str) -> float | None:
        return stage.metrics["kvmeta-1"].registry.get_sample_value(name)

    async with stage.kvmeta(heat_interval_s=0.01, replication_requests_min=1000) as app:
        await app.start()
        for _ in range(6):
            await stage.match()
        await eventually(lambda: (value("moonpool_kvmeta_replication_rounds_total") or 0) > 3)
        assert value("moonpool_kvmeta_hot_prefixes") == 0
        stage.store.put(keys.CONFIG, b'{"replication_requests_min": 6}', None)
        await eventually(lambda: value("moonpool_kvmeta_hot_prefixes") == 1)
        stage.store.delete(keys.CONFIG)
        await eventually(lambda: value("moonpool_kvmeta_hot_prefixes") == 0)


def test_every_setting_of_replication_arrives():
    config = KvmetaConfig(
        heat_interval_s=1.5,
        replication_requests_min=11,
        replication_window_s=12.0,
        replication_copies_max=13,
        replication_in_flight_max=14,
        replication_bytes_per_s=15.0,
        replication_burst_bytes=16.0,
        replication_cached_share=0.17,
        replication_deadline_s=18.0,
        replication_pause_s=19.0,
        silence_s_max=20.0,
    )
    limits = ReplicationLimits(
        requests_min=11,
        copies_max=13,
        in_flight_max=14,
        bytes_per_s=15.0,
        burst_bytes=16.0,
        cached_share=0.17,
        silence_s_max=20.0,
    )
    assert settings_of(config) == ReplicationSettings(limits, 1.5, 12.0, 18.0, 19.0)
