"""A duty is held by at most one process, over the fake and over a real etcd server."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field

import pytest
from tests.support.control_worlds import World, fake_world, real_world
from tests.support.eventually import eventually

from cluster import keys
from cluster.control import ControlPlane, Lease
from cluster.duty import TRIES_PER_TTL, Duty
from cluster.errors import LeaseLostError
from cluster.logs import Level, Logger
from cluster.testing import FakeControlPlane
from kvindex.core import InstanceId
from moonpool.servers import ServerProcess

pytestmark = pytest.mark.contract

WAIT_S = 15.0
TTL_S = 2.0
"""etcd grants no shorter lease with its usual election timeout."""


@dataclass
class Office:
    """The candidates for one duty; `history` tells who began and ended to act, in order."""

    world: World
    history: list[tuple[str, str]] = field(default_factory=list)
    running: dict[str, "asyncio.Task[None]"] = field(default_factory=dict)
    duties: dict[str, Duty] = field(default_factory=dict)
    controls: dict[str, ControlPlane] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"d{self.world.prefix.strip('/').replace('/', '-')}"

    async def stand(self, candidate: str, work: Callable[[], Awaitable[None]] | None = None) -> Duty:
        control = await self.world.connect()
        duty = Duty(self.name, InstanceId(candidate), control, Logger(Level.ERROR), ttl_s=TTL_S)

        async def act() -> None:
            assert duty.held
            self.history.append((candidate, "began"))
            try:
                await (work or asyncio.Event().wait)()
            finally:
                self.history.append((candidate, "ended"))

        self.controls[candidate] = control
        self.duties[candidate] = duty
        self.running[candidate] = asyncio.create_task(duty.run(act))
        return duty

    async def resign(self, candidate: str) -> None:
        task = self.running.pop(candidate)
        task.cancel()
        await asyncio.wait({task})

    def acting(self) -> set[str]:
        """Who acts now; never more than one."""
        acting: set[str] = set()
        for candidate, what in self.history:
            if what == "began":
                acting.add(candidate)
            else:
                acting.remove(candidate)
            assert len(acting) <= 1, self.history
        return acting

    async def until_acting(self, *candidates: str) -> str:
        await eventually(lambda: self.acting() & set(candidates), WAIT_S)
        return self.acting().pop()


@contextlib.asynccontextmanager
async def office_of(world: World) -> AsyncIterator[Office]:
    office = Office(world)
    try:
        yield office
    finally:
        for candidate in tuple(office.running):
            await office.resign(candidate)


@pytest.fixture
async def office(world: World) -> AsyncIterator[Office]:
    async with office_of(world) as made:
        yield made


async def test_one_of_several_has_it_and_the_next_takes_over_at_once(office: Office) -> None:
    for candidate in "abc":
        await office.stand(candidate)
    seen: set[str] = set()
    for _ in range(3):
        acting = await office.until_acting(*({"a", "b", "c"} - seen))
        seen.add(acting)
        assert [name for name, duty in office.duties.items() if duty.held] == [acting]
        await office.resign(acting)
        assert not office.duties[acting].held
    assert seen == {"a", "b", "c"}
    control = await office.world.connect()
    assert await control.get(keys.duty(office.name)) is None


async def test_it_is_kept_for_longer_than_a_lease_lasts(office: Office) -> None:
    await office.stand("a")
    await office.until_acting("a")
    await office.stand("b")
    await asyncio.sleep(1.5 * TTL_S)
    assert office.history == [("a", "began")]
    assert office.duties["a"].held


async def test_who_is_cut_off_stops_before_another_begins(office: Office) -> None:
    loop = asyncio.get_running_loop()
    await office.stand("a")
    await office.until_acting("a")
    await office.stand("b")
    await office.controls["a"].close()
    cut_s = loop.time()
    await office.until_acting("b")
    assert office.history == [("a", "began"), ("a", "ended"), ("b", "began")]
    assert not office.duties["a"].held
    # A lease, which etcd may stretch by its own second, and a try.
    assert loop.time() - cut_s <= TTL_S + TTL_S / TRIES_PER_TTL + 1.5


async def test_a_lease_that_the_servers_ended_ends_the_work(office: Office) -> None:
    granted: list[Lease] = []
    connect = office.world.connect

    async def connect_and_watch() -> ControlPlane:
        control = await connect()
        grant = control.grant_lease

        async def grant_lease(ttl_s: float) -> Lease:
            granted.append(await grant(ttl_s))
            return granted[-1]

        control.grant_lease = grant_lease
        return control

    office.world.connect = connect_and_watch
    await office.stand("a")
    await office.until_acting("a")
    await granted[0].revoke()
    await eventually(lambda: ("a", "ended") in office.history, WAIT_S)
    await office.until_acting("a")
    assert len(granted) == 2


async def test_whose_work_fails_gives_it_back(office: Office) -> None:
    async def fail() -> None:
        raise RuntimeError("broken")

    await office.stand("a", fail)
    await eventually(lambda: ("a", "ended") in office.history, WAIT_S)
    await office.resign("a")
    await office.stand("b")
    await office.until_acting("b")


async def test_a_key_is_put_under_a_lease_only_where_it_is_absent(world: World) -> None:
    control = await world.connect()
    key = f"{world.prefix}k"
    first, second = await control.grant_lease(60.0), await control.grant_lease(60.0)
    assert await control.put_if_absent(key, b"1", first) == b"1"
    assert await control.put_if_absent(key, b"2", second) == b"1"
    await second.revoke()
    assert await control.get(key) == b"1"
    assert await control.put_if_absent(key, b"2", second) == b"1"
    await first.revoke()
    assert await control.get(key) is None
    with pytest.raises(LeaseLostError):
        await control.put_if_absent(key, b"3", first)
    assert control.connected


@dataclass
class Outage:
    office: Office
    begin: Callable[[], Awaitable[None]]
    end: Callable[[], Awaitable[None]]


@pytest.fixture(params=["fake", "real"])
async def outage(request: pytest.FixtureRequest) -> AsyncIterator[Outage]:
    if request.param == "fake":
        async with fake_world() as world, office_of(world) as office:

            def fakes() -> list[FakeControlPlane]:
                return [made for made in office.controls.values() if isinstance(made, FakeControlPlane)]

            async def cut() -> None:
                for control in fakes():
                    control.cut()

            async def restore() -> None:
                for control in fakes():
                    control.restore()

            yield Outage(office, cut, restore)
        return
    server: ServerProcess = request.getfixturevalue("own_etcd")
    async with real_world(server.url) as world, office_of(world) as office:

        async def kill() -> None:
            await asyncio.to_thread(server.kill)

        async def start() -> None:
            await asyncio.to_thread(server.start)

        yield Outage(office, kill, start)


async def test_nobody_acts_in_an_outage_and_one_does_after_it(outage: Outage) -> None:
    office = outage.office
    for candidate in "ab":
        await office.stand(candidate)
    first = await office.until_acting("a", "b")
    await outage.begin()
    await eventually(lambda: not office.acting(), WAIT_S)
    assert not any(duty.held for duty in office.duties.values())
    await asyncio.sleep(TTL_S)
    assert office.history == [(first, "began"), (first, "ended")]
    await outage.end()
    await office.until_acting("a", "b")


async def test_a_server_that_hangs_ends_the_work_in_time(own_etcd: ServerProcess) -> None:
    """A renewal without an answer is none, however long the call itself waits."""
    loop = asyncio.get_running_loop()
    async with real_world(own_etcd.url) as world, office_of(world) as office:
        await office.stand("a")
        await office.until_acting("a")
        own_etcd.pause()
        paused_s = loop.time()
        try:
            await eventually(lambda: not office.acting(), WAIT_S)
            assert loop.time() - paused_s <= TTL_S + 1.0
        finally:
            own_etcd.resume()
        await office.until_acting("a")
