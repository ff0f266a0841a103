"""Two processes that do not fit, over the fake and over a real etcd: exactly one of them stays."""

import asyncio
from dataclasses import replace

import pytest
from tests.support.control_worlds import World
from tests.support.eventually import eventually
from tests.support.records import MODEL_INFO, worker

from cluster import keys
from cluster.errors import ConfigError
from cluster.logs import Level, Logger
from cluster.messages import InstanceRecord
from cluster.metrics import ServiceMetrics
from cluster.registration import Registration
from cluster.registry import Added, Registry, RegistryEvent
from policy.core import Role

pytestmark = pytest.mark.contract

WAIT_S = 15.0
ROUNDS = 5


class Process:
    """As much of a service as registers: the registration, and the registry that it watches."""

    def __init__(self, record: InstanceRecord) -> None:
        self.record = record
        self.refused = asyncio.Event()
        self.reason = ""
        self.registration: Registration | None = None
        self.registry: Registry | None = None

    async def start(self, world: World) -> None:
        control, metrics, log = await world.connect(), ServiceMetrics(), Logger(Level.ERROR)
        self.registry = Registry(control, metrics, log, grace_s=1.0)
        await self.registry.start(timeout_s=WAIT_S)
        self.registry.on_change(self._appeared)
        self.registration = Registration(
            self.record,
            control,
            metrics,
            log,
            ttl_s=1.0,
            on_taken=lambda: None,
            on_refused=self._refused,
        )

    async def close(self) -> None:
        assert self.registration is not None
        assert self.registry is not None
        await self.registration.close()
        await self.registry.close()

    def _refused(self, why: ConfigError) -> None:
        self.reason = str(why)
        self.refused.set()

    def _appeared(self, event: RegistryEvent) -> None:
        if isinstance(event, Added) and self.registration is not None:
            self.registration.appeared(event.record)


@pytest.mark.parametrize("round_number", range(ROUNDS))
async def test_of_two_that_come_at_once_exactly_one_goes(world: World, round_number: int) -> None:
    older = Process(worker(f"older-{round_number}", Role.PREFILL, incarnation=1))
    younger = Process(
        replace(
            worker(f"younger-{round_number}", Role.DECODE, incarnation=2),
            model=replace(MODEL_INFO, dtype="bfloat16"),
        )
    )
    both = (older, younger) if round_number % 2 else (younger, older)
    for process in both:
        await process.start(world)
    for process in both:
        assert process.registration is not None
        process.registration.start()
    await eventually(lambda: older.refused.is_set() or younger.refused.is_set(), WAIT_S)
    goes, stays = (older, younger) if older.refused.is_set() else (younger, older)
    await goes.close()
    # Who was seen to be registered already stays, whatever its age; nobody goes for one that went.
    await eventually(lambda: stays.registration is not None and stays.registration.registered, WAIT_S)
    assert not stays.refused.is_set()
    assert stays.record.instance in goes.reason
    listed = await (await world.connect()).get_prefix(keys.INSTANCES)
    assert listed.keys() == {keys.instance(stays.record.instance)}
    await stays.close()


async def test_a_model_is_changed_once_those_that_served_it_are_gone(world: World) -> None:
    old = Process(worker("old", Role.PREFILL, incarnation=1))
    new = Process(replace(worker("new", Role.PREFILL, incarnation=2), model=replace(MODEL_INFO, layers=1)))
    again = Process(replace(new.record, incarnation=3))
    for process in (old, new, again):
        await process.start(world)
    assert old.registration is not None
    old.registration.start()
    await eventually(lambda: old.registration is not None and old.registration.registered, WAIT_S)
    assert new.registration is not None
    new.registration.start()
    await asyncio.wait_for(new.refused.wait(), WAIT_S)
    assert "layers is 1, but old, which is registered, has 30" in new.reason
    assert not old.refused.is_set()
    await new.close()
    await old.close()
    assert again.registration is not None
    again.registration.start()
    await eventually(lambda: again.registration is not None and again.registration.registered, WAIT_S)
    assert not again.refused.is_set()
    await again.close()
