"""When an instance counts as lost, and when it does not."""

import asyncio

import pytest

from cluster import keys, subjects
from cluster.errors import RetryableError
from cluster.logs import Level, Logger
from cluster.messages import Describe, InstanceRecord
from cluster.metrics import ServiceMetrics
from cluster.registry import Registry
from cluster.testing.bus import FakeBroker
from cluster.testing.control import FakeControlPlane, FakeStore
from cluster.wire import encode_record
from gateway.answers.liveness import Liveness, Sighting, SilenceLimits, lost
from kvindex.core import InstanceId
from policy.core import InstanceState, LoadSnapshot, Role

pytestmark = pytest.mark.unit

LIMITS = SilenceLimits(silence_s_max=5.0, dead_s_max=60.0)
ONE = InstanceId("decode-1")


@pytest.mark.parametrize(
    ("silent_s", "registered", "is_lost"),
    [
        (4.9, False, False),
        (5.1, False, True),
        (5.1, True, False),
        (59.9, True, False),
        (60.1, True, True),
    ],
)
def test_who_is_lost(silent_s: float, registered: bool, is_lost: bool) -> None:
    assert bool(lost({ONE: Sighting(1, 100.0, registered)}, 100.0 + silent_s, LIMITS)) is is_lost


def record(incarnation: int = 1) -> bytes:
    return encode_record(InstanceRecord(ONE, incarnation, (Role.DECODE,), "127.0.0.1", "http://x"))


class World:
    def __init__(self, control: FakeControlPlane, broker: FakeBroker, limits: SilenceLimits) -> None:
        log = Logger(Level.ERROR)
        self.control = control
        self.bus = broker.bus("gateway-1")
        self.decode = broker.bus(ONE)
        self.registry = Registry(control, ServiceMetrics(), log, grace_s=0.1)
        self.lost: asyncio.Queue[InstanceId] = asyncio.Queue()
        self.liveness = Liveness(self.bus, self.registry, log, limits, self.lost.put_nowait)

    async def speak(self) -> None:
        load = LoadSnapshot(ONE, (Role.DECODE,), InstanceState.SERVING)
        await self.decode.publish(subjects.load(ONE), load)


@pytest.fixture
async def world(monkeypatch):
    monkeypatch.setattr("gateway.answers.liveness.CHECK_S", 0.01)
    control = FakeControlPlane(FakeStore())
    made = World(control, FakeBroker(), SilenceLimits(silence_s_max=0.1, dead_s_max=30.0))
    await control.put(keys.instance(ONE), record())
    await made.registry.start(timeout_s=1.0)
    await made.liveness.start()
    yield made
    await made.liveness.close()
    await made.registry.close()
    await made.bus.close()
    await made.decode.close()


async def until_removed(world: World) -> None:
    await world.registry.wait_for(lambda instances: ONE not in instances, 1.0)


async def test_silence_after_a_lost_lease_is_a_loss(world) -> None:
    await world.control.delete(keys.instance(ONE))
    async with asyncio.timeout(2):
        assert await world.lost.get() == ONE
    await asyncio.sleep(0.05)
    assert world.lost.empty()


async def test_a_lost_lease_alone_is_none(world) -> None:
    await world.control.delete(keys.instance(ONE))
    await until_removed(world)
    for _ in range(20):
        await world.speak()
        await asyncio.sleep(0.02)
    assert world.lost.empty()


async def test_what_is_no_load_snapshot_is_refused_and_no_sign_of_life(world) -> None:
    await world.control.delete(keys.instance(ONE))
    await until_removed(world)
    subject = subjects.load(ONE)
    with pytest.raises(RetryableError, match="no load snapshot"):
        await world.decode.request(subject, Describe(), timeout_s=1.0)
    async with asyncio.timeout(2):
        while world.lost.empty():
            await world.decode.publish(subject, Describe())
            await asyncio.sleep(0.02)


async def test_silence_alone_is_none(world) -> None:
    await asyncio.sleep(0.3)
    assert world.lost.empty()


async def test_silence_while_our_own_bus_is_away_does_not_count(world) -> None:
    world.bus.disconnect()
    await world.control.delete(keys.instance(ONE))
    await until_removed(world)
    await asyncio.sleep(0.3)
    assert world.lost.empty()
    world.bus.reconnect()
    for _ in range(10):
        await world.speak()
        await asyncio.sleep(0.02)
    assert world.lost.empty()


async def test_another_process_of_the_same_name_is_a_loss_at_once(world) -> None:
    await world.control.put(keys.instance(ONE), record(incarnation=1))
    await world.control.put(keys.instance(ONE), record(incarnation=2))
    async with asyncio.timeout(1):
        assert await world.lost.get() == ONE
    assert world.lost.empty()


async def test_a_restart_between_two_leases_is_a_loss(world) -> None:
    """The lease ran out first, and the name came back before anybody had missed it."""
    await world.control.delete(keys.instance(ONE))
    await until_removed(world)
    await world.control.put(keys.instance(ONE), record(incarnation=2))
    async with asyncio.timeout(1):
        assert await world.lost.get() == ONE
    assert world.lost.empty()


async def test_who_registers_again_is_not_lost(world) -> None:
    await world.control.delete(keys.instance(ONE))
    await until_removed(world)
    await world.control.put(keys.instance(ONE), record(incarnation=1))
    await asyncio.sleep(0.3)
    assert world.lost.empty()


async def test_another_process_is_no_sign_of_life(world) -> None:
    """It speaks before it has registered: what the old one had is lost all the same."""
    successor = world.bus.broker.bus(ONE, incarnation=2)
    await world.control.delete(keys.instance(ONE))
    await until_removed(world)
    load = LoadSnapshot(ONE, (Role.DECODE,), InstanceState.SERVING)
    async with asyncio.timeout(2):
        while world.lost.empty():
            await successor.publish(subjects.load(ONE), load)
            await asyncio.sleep(0.02)
    await successor.close()
