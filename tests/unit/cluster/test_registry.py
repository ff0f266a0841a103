"""The registry: what it shows, what it tells, and that an outage makes nobody disappear."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace

import pytest
from tests.support.eventually import eventually
from tests.support.records import MODEL_INFO

from cluster import keys
from cluster.errors import DeadlineError
from cluster.logs import Level, Logger
from cluster.messages import InstanceRecord
from cluster.metrics import ServiceMetrics
from cluster.registry import Added, Registry, RegistryEvent, Removed, Replaced
from cluster.testing import FakeControlPlane, FakeStore
from cluster.wire import encode_record
from kvindex.core import InstanceId
from policy.core import Role

pytestmark = pytest.mark.unit

WAIT_S = 5.0
GRACE_S = 0.1


def record(name: str, incarnation: int = 1, roles: tuple[Role, ...] = (Role.DECODE,)) -> InstanceRecord:
    return InstanceRecord(InstanceId(name), incarnation, roles, "127.0.0.1", "http://127.0.0.1:1")


@dataclass
class World:
    store: FakeStore
    control: FakeControlPlane
    registry: Registry
    metrics: ServiceMetrics
    events: list[RegistryEvent] = field(default_factory=list)

    def put(self, one: InstanceRecord) -> None:
        self.store.put(keys.instance(one.instance), encode_record(one), None)

    def delete(self, name: str) -> None:
        self.store.delete(keys.instance(InstanceId(name)))

    async def told(self, count: int) -> list[RegistryEvent]:
        await eventually(lambda: len(self.events) >= count)
        return self.events


@pytest.fixture
async def world() -> AsyncIterator[World]:
    store, metrics = FakeStore(), ServiceMetrics()
    control = store.control()
    registry = Registry(control, metrics, Logger(Level.ERROR), grace_s=GRACE_S)
    made = World(store, control, registry, metrics)
    registry.on_change(made.events.append)
    made.put(record("early", roles=(Role.PREFILL, Role.DECODE)))
    await registry.start(timeout_s=WAIT_S)
    yield made
    await registry.close()


async def test_it_shows_and_tells_what_comes_changes_and_goes(world: World) -> None:
    early = record("early", roles=(Role.PREFILL, Role.DECODE))
    assert world.registry.instances == {"early": early}
    world.put(record("a"))
    world.put(record("a"))
    world.put(record("a", incarnation=2))
    world.delete("a")
    assert await world.told(4) == [
        Added(early),
        Added(record("a")),
        Replaced(record("a"), record("a", incarnation=2)),
        Removed(record("a", incarnation=2)),
    ]
    assert world.registry.instances == {"early": early}
    gauge = "moonpool_registry_instances"
    assert world.metrics.registry.get_sample_value(gauge, {"role": "prefill"}) == 1
    assert world.metrics.registry.get_sample_value(gauge, {"role": "gateway"}) == 0


async def test_the_view_cannot_be_written(world: World) -> None:
    with pytest.raises(TypeError):
        world.registry.instances[InstanceId("x")] = record("x")  # type: ignore[index]


async def test_records_that_make_no_sense_are_ignored(world: World) -> None:
    blockless = encode_record(replace(record("blockless"), model=MODEL_INFO)).replace(
        b'"block_tokens":16', b'"block_tokens":0'
    )
    for name, value in (
        ("bad", b"not json"),
        ("other", encode_record(record("else"))),
        ("half", b"{}"),
        ("blockless", blockless),
    ):
        world.store.put(keys.instance(InstanceId(name)), value, None)
    world.put(record("good"))
    assert (await world.told(2))[1] == Added(record("good"))
    assert world.registry.instances.keys() == {"early", "good"}


async def test_an_outage_makes_nobody_disappear(world: World) -> None:
    world.put(record("a"))
    await world.told(2)
    world.control.cut()
    world.store.wipe()
    assert world.registry.instances.keys() == {"early", "a"}
    world.control.restore()
    # The store is empty now; both are still shown for the time in which the living come back.
    await asyncio.sleep(GRACE_S / 4)
    assert world.registry.instances.keys() == {"early", "a"}
    world.put(record("a"))
    await eventually(lambda: world.registry.instances.keys() == {"a"})
    assert world.events[2:] == [Removed(record("early", roles=(Role.PREFILL, Role.DECODE)))]


async def test_who_restarted_during_an_outage_is_replaced(world: World) -> None:
    world.put(record("a"))
    await world.told(2)
    world.control.cut()
    world.put(record("a", incarnation=5))
    world.control.restore()
    assert (await world.told(3))[2] == Replaced(record("a"), record("a", incarnation=5))


async def test_a_grace_that_runs_is_not_started_again(world: World) -> None:
    world.control.cut()
    world.store.wipe()
    loop = asyncio.get_running_loop()
    started_s = loop.time()
    for _ in range(8):
        world.control.restore()
        await asyncio.sleep(GRACE_S / 4)
        world.control.cut()
    await eventually(lambda: not world.registry.instances)
    assert loop.time() - started_s < 5 * GRACE_S


async def test_wait_for_returns_when_it_is_so_and_gives_up_in_time(world: World) -> None:
    waiting = asyncio.create_task(world.registry.wait_for(lambda found: len(found) == 3, WAIT_S))
    other = asyncio.create_task(world.registry.wait_for(lambda found: len(found) == 2, WAIT_S))
    await world.registry.wait_for(lambda found: len(found) == 1, WAIT_S)
    world.put(record("a"))
    await asyncio.wait_for(other, WAIT_S)
    assert not waiting.done()
    world.put(record("b"))
    await asyncio.wait_for(waiting, WAIT_S)
    with pytest.raises(DeadlineError, match=r"0\.01 s"):
        await world.registry.wait_for(lambda found: not found, 0.01)


async def test_start_gives_up_in_time() -> None:
    control = FakeStore().control()
    control.cut()
    registry = Registry(control, ServiceMetrics(), Logger(Level.ERROR), grace_s=1.0)
    with pytest.raises(DeadlineError, match=r"0\.01 s"):
        await registry.start(timeout_s=0.01)
    await registry.close()


async def test_a_callback_that_breaks_stops_no_other(world: World) -> None:
    def broken(_: RegistryEvent) -> None:
        raise ValueError("broken")

    seen: list[RegistryEvent] = []
    world.registry.on_change(broken)
    world.registry.on_change(seen.append)
    world.put(record("a"))
    world.put(replace(record("b"), blocks=3))
    await eventually(lambda: len(seen) == 2)
    assert world.registry.instances[InstanceId("b")].blocks == 3
