"""What every control plane promises, over the fake and over a real etcd server."""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

import pytest
from tests.support.control_worlds import World, connected, fake_world, real_world
from tests.support.eventually import eventually

from cluster import etcd_control
from cluster.control import ControlPlane, Deleted, Listing, Put, Versioned, WatchEvent
from cluster.errors import ConfigError, DisconnectedError, LeaseLostError
from cluster.etcd_control import EtcdControl
from cluster.testing import FakeControlPlane
from moonpool.servers import ServerProcess, free_port

pytestmark = pytest.mark.contract

WAIT_S = 15.0


async def following(events: AsyncIterator[WatchEvent]) -> WatchEvent:
    return await asyncio.wait_for(anext(events), WAIT_S)


async def until_event(events: AsyncIterator[WatchEvent], wanted: WatchEvent) -> None:
    """Repeats are allowed where a watch starts over, loss is not."""
    async with asyncio.timeout(WAIT_S):
        async for event in events:
            if event == wanted:
                return


async def test_put_get_and_delete(world: World) -> None:
    control = await world.connect()
    key = world.prefix + "a"
    assert await control.get(key) is None
    await control.put(key, b"1")
    await control.put(key, b"\x00\xff")
    assert await control.get(key) == b"\x00\xff"
    await control.put(world.prefix + "b", b"")
    assert await control.get_prefix(world.prefix) == {key: b"\x00\xff", world.prefix + "b": b""}
    await control.delete(key)
    await control.delete(key)
    assert await control.get(key) is None
    assert await control.get_prefix(world.prefix) == {world.prefix + "b": b""}
    assert control.connected


async def test_put_if_absent_lets_one_win(world: World) -> None:
    controls = [await world.connect() for _ in range(3)]
    key = world.prefix + "seed"
    values = await asyncio.gather(
        *(control.put_if_absent(key, bytes([number])) for number, control in enumerate(controls))
    )
    assert len(set(values)) == 1
    assert await controls[0].get(key) == values[0]
    assert await controls[1].put_if_absent(key, b"later") == values[0]


async def test_put_at_lets_one_win_each_revision(world: World) -> None:
    controls = [await world.connect() for _ in range(3)]
    control, key = controls[0], world.prefix + "config"
    assert await control.get_versioned(key) is None
    first = await asyncio.gather(
        *(other.put_at(key, bytes([number]), 0) for number, other in enumerate(controls))
    )
    (revision,) = [written for written in first if written is not None]
    value = bytes([first.index(revision)])
    assert await control.get_versioned(key) == Versioned(value, revision)
    await control.put(world.prefix + "other", b"1")
    later = await control.put_at(key, b"later", revision)
    assert later is not None
    assert later > revision
    assert await control.put_at(key, b"too late", revision) is None
    assert await control.get_versioned(key) == Versioned(b"later", later)
    await control.delete(key)
    assert await control.put_at(key, b"gone", later) is None
    again = await control.put_at(key, b"again", 0)
    assert again is not None
    assert again > later


async def test_a_watch_tells_revisions(world: World) -> None:
    control = await world.connect()
    key = world.prefix + "config"
    listed = await control.put_at(key, b"1", 0)
    events = control.watch_prefix(world.prefix)
    listing = await following(events)
    assert isinstance(listing, Listing)
    assert listing.revisions == {key: listed}
    written = await control.put_at(key, b"2", listed or 0)
    put = await following(events)
    assert isinstance(put, Put)
    assert put.revision == written


async def test_a_lease_that_is_not_kept_takes_its_keys_along(world: World) -> None:
    control, watcher = await world.connect(), await world.connect()
    events = watcher.watch_prefix(world.prefix)
    assert await following(events) == Listing({})
    lease = await control.grant_lease(1.0)
    assert 1.0 <= lease.ttl_s <= 3.0
    await control.put(world.prefix + "a", b"1", lease)
    await control.put(world.prefix + "stays", b"2")
    assert await following(events) == Put(world.prefix + "a", b"1")
    assert await following(events) == Put(world.prefix + "stays", b"2")
    assert await following(events) == Deleted(world.prefix + "a")
    assert await lease.keep_alive() is False
    with pytest.raises(LeaseLostError):
        await control.put(world.prefix + "a", b"1", lease)
    await lease.revoke()
    assert control.connected


async def test_a_lease_that_is_kept_stays(world: World) -> None:
    control = await world.connect()
    lease = await control.grant_lease(2.0)
    await control.put(world.prefix + "a", b"1", lease)
    loop = asyncio.get_running_loop()
    end_s = loop.time() + 1.5 * lease.ttl_s
    while loop.time() < end_s:
        assert await lease.keep_alive() is True
        await asyncio.sleep(lease.ttl_s / 3)
    assert await control.get(world.prefix + "a") == b"1"


async def test_revoking_a_lease_takes_its_keys_at_once(world: World) -> None:
    control = await world.connect()
    lease = await control.grant_lease(60.0)
    await control.put(world.prefix + "a", b"1", lease)
    await lease.revoke()
    assert await control.get(world.prefix + "a") is None
    assert await lease.keep_alive() is False
    await lease.revoke()


async def test_a_key_put_again_without_the_lease_outlives_it(world: World) -> None:
    control = await world.connect()
    lease, successor = await control.grant_lease(60.0), await control.grant_lease(60.0)
    await control.put(world.prefix + "a", b"old", lease)
    await control.put(world.prefix + "a", b"new", successor)
    await lease.revoke()
    assert await control.get(world.prefix + "a") == b"new"
    await successor.revoke()


async def test_a_watch_lists_then_tells_changes_in_order(world: World) -> None:
    control, watcher = await world.connect(), await world.connect()
    await control.put(world.prefix + "a", b"1")
    events = watcher.watch_prefix(world.prefix)
    assert await following(events) == Listing({world.prefix + "a": b"1"})
    expected: list[WatchEvent] = []
    for number in range(50):
        key, value = f"{world.prefix}k{number % 5}", str(number).encode()
        await control.put(key, value)
        expected.append(Put(key, value))
    await control.delete(world.prefix + "a")
    expected.append(Deleted(world.prefix + "a"))
    await control.put("/elsewhere", b"not ours")
    assert [await following(events) for _ in expected] == expected


async def test_a_change_between_listing_and_watch_is_not_lost(world: World) -> None:
    control, watcher = await world.connect(), await world.connect()
    events = watcher.watch_prefix(world.prefix)
    seen: set[str] = set()
    writing = asyncio.create_task(_write(control, world.prefix, 200))
    async with asyncio.timeout(WAIT_S):
        async for event in events:
            if isinstance(event, Listing):
                seen = set(event.entries)
            elif isinstance(event, Put):
                seen.add(event.key)
            if len(seen) == 200:
                break
    await writing


async def _write(control: ControlPlane, prefix: str, count: int) -> None:
    for number in range(count):
        await control.put(f"{prefix}{number}", b"x")


async def test_close_ends_the_watches_and_refuses_calls(world: World) -> None:
    control = await world.connect()
    events = control.watch_prefix(world.prefix)
    await following(events)
    waiting = asyncio.create_task(anext(events, None))
    await asyncio.sleep(0)
    await control.close()
    assert await asyncio.wait_for(waiting, WAIT_S) is None
    with pytest.raises(DisconnectedError):
        await control.get("a")


# An outage: the fake is cut off, the real server is ended and started again.


@dataclass
class Outage:
    world: World
    begin: Callable[[], Awaitable[None]]
    end: Callable[[], Awaitable[None]]


@pytest.fixture(params=["fake", "real"])
async def outage(request: pytest.FixtureRequest) -> AsyncIterator[Outage]:
    if request.param == "fake":
        async with fake_world() as made:
            connect = made.connect
            controls: list[FakeControlPlane] = []

            async def remember() -> ControlPlane:
                control = await connect()
                assert isinstance(control, FakeControlPlane)
                controls.append(control)
                return control

            async def begin() -> None:
                for control in controls:
                    control.cut()

            async def end() -> None:
                for control in controls:
                    control.restore()

            made.connect = remember
            yield Outage(made, begin, end)
        return
    server: ServerProcess = request.getfixturevalue("own_etcd")
    async with real_world(server.url) as made:

        async def kill() -> None:
            await asyncio.to_thread(server.kill)

        async def restart() -> None:
            await asyncio.to_thread(server.start)

        yield Outage(made, kill, restart)


async def test_an_outage_is_survived(outage: Outage) -> None:
    prefix = outage.world.prefix
    control, watcher = await outage.world.connect(), await outage.world.connect()
    await control.put(prefix + "a", b"1")
    lease = await control.grant_lease(30.0)
    await control.put(prefix + "leased", b"1", lease)
    events = watcher.watch_prefix(prefix)
    assert await following(events) == Listing({prefix + "a": b"1", prefix + "leased": b"1"})
    await outage.begin()
    for _ in range(2):
        with pytest.raises(DisconnectedError):
            await asyncio.wait_for(control.get(prefix + "a"), WAIT_S)
        with pytest.raises(DisconnectedError):
            await asyncio.wait_for(lease.keep_alive(), WAIT_S)
        with pytest.raises(DisconnectedError):
            await asyncio.wait_for(control.put_if_absent(prefix + "b", b"2"), WAIT_S)
    assert not control.connected
    await outage.end()
    await until_success(lambda: control.put(prefix + "a", b"2"))
    assert control.connected
    assert await lease.keep_alive() is True
    # The watch starts over; whether before or after the put, the last word must come.
    latest: dict[str, bytes] = {}
    async with asyncio.timeout(WAIT_S):
        async for event in events:
            if isinstance(event, Listing):
                latest = dict(event.entries)
            elif isinstance(event, Put):
                latest[event.key] = event.value
            if latest.get(prefix + "a") == b"2":
                break
    await control.put(prefix + "c", b"3")
    await until_event(events, Put(prefix + "c", b"3"))


async def until_success(call: Callable[[], Awaitable[None]]) -> None:
    async with asyncio.timeout(WAIT_S):
        while True:
            try:
                return await call()
            except DisconnectedError:
                await asyncio.sleep(0.05)


# What only a real server can show.


async def test_a_server_that_hangs_fails_calls_in_time(own_etcd: ServerProcess) -> None:
    async with real_world(own_etcd.url) as world:
        control = await world.connect()
        own_etcd.pause()
        try:
            calls = [control.get(f"{number}") for number in range(8)]
            outcomes = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 5.0)
            assert all(isinstance(outcome, DisconnectedError) for outcome in outcomes)
        finally:
            own_etcd.resume()
        await until_success(lambda: control.put("a", b"1"))


async def test_a_watch_of_a_compacted_revision_starts_over(
    etcd: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between a listing and its watch the server forgot the revision."""
    list_keys = etcd_control._list
    calls = 0

    def outdated(client: object, prefix: str) -> tuple[int, Listing]:
        nonlocal calls
        calls += 1
        revision, listing = list_keys(client, prefix)
        return (1 if calls == 1 else revision), listing

    monkeypatch.setattr(etcd_control, "_list", outdated)
    async with real_world(etcd.url) as world:
        control = await world.connect()
        key = world.prefix + "k"
        for value in (b"1", b"2"):
            await control.put(key, value)
        await asyncio.to_thread(_compact, etcd)
        events = control.watch_prefix(world.prefix)
        assert await following(events) == Listing({key: b"2"})
        assert await following(events) == Listing({key: b"2"})
        await control.put(key, b"3")
        assert await following(events) == Put(key, b"3")


def _compact(server: ServerProcess) -> None:
    from etcd3 import client

    host, _, port = server.url.removeprefix("http://").partition(":")
    etcd = client(host=host, port=int(port), timeout=WAIT_S)
    revision = etcd.get_response("/k").header.revision
    etcd.compact(revision, physical=True)
    etcd.close()


async def test_a_watch_outlives_an_error_that_nobody_foresaw(
    etcd: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its thread would end without a word, and the registry stand still for good."""
    list_keys = etcd_control._list
    calls = 0

    def broken_once(client: object, prefix: str) -> tuple[int, Listing]:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise ValueError("broken")
        return list_keys(client, prefix)

    monkeypatch.setattr(etcd_control, "_list", broken_once)
    async with real_world(etcd.url) as world:
        control = await world.connect()
        events = control.watch_prefix(world.prefix)
        assert await following(events) == Listing({})


async def test_a_watcher_that_falls_behind_gets_a_new_listing(
    etcd: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(etcd_control, "EVENTS_MAX", 100)
    async with real_world(etcd.url) as world:
        watcher = await world.connect()
        assert isinstance(watcher, EtcdControl)
        events = watcher.watch_prefix(world.prefix)
        assert await following(events) == Listing({})
        await asyncio.to_thread(_fill, etcd, world.prefix, 1000)
        restarts = watcher.metrics.registry
        await eventually(lambda: bool(restarts.get_sample_value("moonpool_control_watch_restarts_total")))
        seen: set[str] = set()
        listings = 0
        async with asyncio.timeout(WAIT_S):
            while len(seen) < 1000:
                event = await anext(events)
                if isinstance(event, Listing):
                    listings += 1
                    seen = set(event.entries)
                elif isinstance(event, Put):
                    seen.add(event.key)
        assert listings == 1


def _fill(server: ServerProcess, prefix: str, count: int) -> None:
    from etcd3 import client

    host, _, port = server.url.removeprefix("http://").partition(":")
    etcd = client(host=host, port=int(port), timeout=WAIT_S)
    ops = [etcd.transactions.put(f"{prefix}{number}", "x") for number in range(count)]
    for start in range(0, count, 100):
        etcd.transaction(compare=[], success=ops[start : start + 100], failure=[])
    etcd.close()


async def test_several_servers_are_tried_in_turn(etcd: ServerProcess) -> None:
    control = await connected(f"http://127.0.0.1:{free_port()},{etcd.url}")
    try:
        await control.put("/turn", b"1")
        events = control.watch_prefix("/turn")
        assert await following(events) == Listing({"/turn": b"1"})
    finally:
        await control.close()


async def test_connecting_to_nobody_fails_in_time() -> None:
    with pytest.raises(DisconnectedError, match=r"0\.5 s"):
        await asyncio.wait_for(connected(f"http://127.0.0.1:{free_port()}", timeout_s=0.5), WAIT_S)


@pytest.mark.parametrize(
    "url", ["", "127.0.0.1:2379", "https://a:1", "http://", "http://a:1,x", "http://a:x"]
)
async def test_a_malformed_url_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="etcd_url"):
        await connected(url)


async def test_a_url_that_is_refused_keeps_its_password() -> None:
    with pytest.raises(ConfigError, match="etcd_url") as failure:
        await connected("http://me:secret@a:1")
    assert "secret" not in str(failure.value)


async def test_no_thread_or_process_stays_behind(etcd: ServerProcess) -> None:
    script = f"""
import asyncio
from cluster.etcd_control import EtcdControl
from cluster.logs import Logger
from cluster.metrics import ServiceMetrics

async def main():
    control = await EtcdControl.connect("{etcd.url}", metrics=ServiceMetrics(), log=Logger(), timeout_s=5)
    events = control.watch_prefix("/x")
    await anext(events)
    await control.close()

asyncio.run(main())
"""
    done = await asyncio.to_thread(
        subprocess.run, [sys.executable, "-c", script], capture_output=True, timeout=WAIT_S, check=False
    )
    assert (done.returncode, done.stderr) == (0, b"")
