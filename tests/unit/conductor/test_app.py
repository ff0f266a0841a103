from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from tests.support.contexts import deregister, register, service_context
from tests.support.eventually import eventually
from tests.support.records import MODEL_INFO, worker
from tests.support.views import D1, P1, request

from cluster import keys, subjects
from cluster.errors import NoResponderError
from cluster.recording import Ended, read_recording
from cluster.testing import FakeBroker, FakeStore
from conductor.app import ConductorApp
from conductor.config import ConductorConfig
from policy.core import InstanceState, Placement, Rejection, RejectReason, Role

pytestmark = pytest.mark.unit

ASK_TIMEOUT_S = 5.0


class Stage:
    def __init__(self) -> None:
        self.broker = FakeBroker()
        self.store = FakeStore()
        self.gateway = self.broker.bus("g1")

    @asynccontextmanager
    async def conductor(self, **settings):
        config = ConductorConfig(**settings)
        async with service_context(self.broker, self.store, "conductor-1", Role.CONDUCTOR, config) as context:
            app = ConductorApp(context, config)
            try:
                yield app, context
            finally:
                await app.close()

    async def ask(self, subject: str = subjects.SCHEDULE, name: str = "r"):
        return await self.gateway.request(subject, request(name), timeout_s=ASK_TIMEOUT_S)


@pytest.fixture
async def stage() -> Stage:
    return Stage()


async def test_places_on_what_was_registered_before_and_after_it_started(stage: Stage):
    register(stage.store, worker("p1", Role.PREFILL))
    async with stage.conductor() as (app, context):
        record = await app.start()
        assert (record.instance, record.roles, record.model) == ("conductor-1", (Role.CONDUCTOR,), None)
        assert isinstance(await stage.ask(), Rejection)
        register(stage.store, worker("d1", Role.DECODE))
        await eventually(lambda: D1 in context.registry.instances)
        placement = await stage.ask()
        assert isinstance(placement, Placement)
        assert (placement.prefill, placement.decode) == (P1, D1)
        deregister(stage.store, "p1")
        await eventually(lambda: P1 not in context.registry.instances)
        assert isinstance(await stage.ask(), Rejection)


async def test_places_nothing_on_an_instance_that_serves_the_model_in_another_way(stage: Stage):
    """It will be gone in a moment; what is placed there would be lost with it."""
    stranger = replace(
        worker("d1", Role.DECODE, incarnation=2), model=replace(MODEL_INFO, block_bytes=350_000)
    )
    register(stage.store, worker("p1", Role.PREFILL), stranger)
    async with stage.conductor() as (app, context):
        await app.start()
        assert D1 in context.registry.instances
        assert isinstance(await stage.ask(), Rejection)
        register(stage.store, worker("d1", Role.DECODE, incarnation=3))
        await eventually(lambda: context.registry.instances[D1].incarnation == 3)
        assert isinstance(await stage.ask(), Placement)


async def test_a_standby_answers_only_on_its_own_subject(stage: Stage):
    async with stage.conductor(standby=True) as (app, _):
        await app.start()
        with pytest.raises(NoResponderError):
            await stage.ask()
        assert isinstance(await stage.ask(subjects.SCHEDULE_STANDBY), Rejection)


async def test_answers_nothing_once_drained(stage: Stage):
    async with stage.conductor() as (app, _):
        await app.start()
        await app.drain(1.0)
        with pytest.raises(NoResponderError):
            await stage.ask()


async def test_load_and_metrics(stage: Stage):
    register(stage.store, worker("p1", Role.PREFILL), worker("d1", Role.DECODE))
    async with stage.conductor() as (app, context):
        await app.start()
        await stage.ask(name="a")
        await stage.ask(name="b")
        load = app.load()
        assert (load.instance, load.requests, load.state) == ("conductor-1", 0, InstanceState.SERVING)
        assert "moonpool_conductor_bookings 2.0" in context.metrics.exposition().decode()


async def test_closes_without_having_started(stage: Stage):
    async with stage.conductor():
        pass


def policy_shown(context) -> list[str]:
    text = context.metrics.exposition().decode()
    return [line for line in text.splitlines() if line.startswith("moonpool_conductor_policy{")]


async def test_the_clusters_configuration_decides_while_it_is_set(stage: Stage):
    """Live, over the process's own settings, which hold again where it is unset."""
    register(stage.store, worker("p1", Role.PREFILL), worker("d1", Role.DECODE))
    stage.store.put(keys.CONFIG, b'{"ttft_ms_default": 1}', None)
    async with stage.conductor(strategy="random", tbt_ms_default=60_000.0) as (app, context):
        await app.start()
        refused = await stage.ask(name="a")
        assert isinstance(refused, Rejection)
        assert refused.reason is RejectReason.TTFT
        stage.store.put(keys.CONFIG, b'{"ttft_ms_default": 1, "admission": "none"}', None)
        await eventually(lambda: 'admission="none"' in policy_shown(context)[0])
        assert policy_shown(context) == ['moonpool_conductor_policy{admission="none",strategy="random"} 1.0']
        assert isinstance(await stage.ask(name="b"), Placement)
        stage.store.put(keys.CONFIG, b'{"strategy": "joint"}', None)
        await eventually(lambda: 'strategy="joint"' in policy_shown(context)[0])
        assert isinstance(await stage.ask(name="c"), Placement)
        stage.store.delete(keys.CONFIG)
        await eventually(lambda: 'strategy="random"' in policy_shown(context)[0])
        assert isinstance(await stage.ask(name="d"), Placement)


async def test_the_settings_decide(stage: Stage):
    register(stage.store, worker("p1", Role.PREFILL), worker("d1", Role.DECODE))
    settings = {"strategy": "random", "ttft_ms_default": 1.0}
    for admission, answer in (("none", Placement), ("predictive", Rejection)):
        async with stage.conductor(admission=admission, **settings) as (app, context):
            await app.start()
            assert isinstance(await stage.ask(), answer)
            shown = f'moonpool_conductor_policy{{admission="{admission}",strategy="random"}} 1.0'
            assert shown in context.metrics.exposition().decode()


async def test_records_its_decisions_where_a_folder_is_named(stage: Stage, tmp_path):
    register(stage.store, worker("p1", Role.PREFILL), worker("d1", Role.DECODE))
    async with stage.conductor(record_folder=str(tmp_path), booking_ttl_s=3.0) as (app, context):
        await app.start()
        placement = await stage.ask()
    (path,) = tmp_path.iterdir()
    assert path.name == f"conductor-1-{context.incarnation}.jsonl"
    begun, *_, decided, ended = (line.entry for line in read_recording(path))
    assert (begun.instance, begun.booking_ttl_s) == ("conductor-1", 3.0)
    assert decided.placement == placement
    assert ended == Ended("closed")
