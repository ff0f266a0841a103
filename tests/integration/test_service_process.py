"""A service as a process on real servers: signals, outages, exit statuses, logs."""

import asyncio
import contextlib
import json
import signal
import socket
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from cluster import keys, subjects
from cluster.control import ControlPlane, Listing, Put
from cluster.errors import RetryableError
from cluster.etcd_control import EtcdControl
from cluster.logs import Level, Logger
from cluster.messages import Accepted, Cancel, InstanceRecord
from cluster.metrics import ServiceMetrics
from cluster.nats_bus import NatsBus
from cluster.wire import decode_record
from kvindex.core import InstanceId
from moonpool.servers import ServerProcess
from policy.core import RequestId, Role

pytestmark = pytest.mark.integration

WAIT_S = 20.0
NAME = InstanceId("echo-1")
REPOSITORY = Path(__file__).parents[2]


@contextlib.asynccontextmanager
async def service(*flags: str) -> AsyncIterator[Process]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.support.echo_service", *flags, cwd=REPOSITORY, stdout=PIPE, stderr=PIPE
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()


async def ended(process: Process) -> tuple[int, str, str]:
    """Exit status, standard output, standard error."""
    out, err = await asyncio.wait_for(process.communicate(), WAIT_S)
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


@contextlib.asynccontextmanager
async def control_plane(etcd: ServerProcess) -> AsyncIterator[ControlPlane]:
    control = await EtcdControl.connect(
        etcd.url, metrics=ServiceMetrics(), log=Logger(Level.ERROR), timeout_s=WAIT_S
    )
    yield control
    await control.close()


async def registered(control: ControlPlane) -> InstanceRecord:
    key = keys.instance(NAME)
    async with asyncio.timeout(WAIT_S):
        async for event in control.watch_prefix(keys.INSTANCES):
            value = event.entries.get(key) if isinstance(event, Listing) else None
            if isinstance(event, Put) and event.key == key:
                value = event.value
            if value is not None:
                return decode_record(value, InstanceRecord)
    raise AssertionError("unreachable")


async def ready(session: aiohttp.ClientSession) -> None:
    """The record is in the control plane a moment before its owner says that it is."""
    async with asyncio.timeout(WAIT_S):
        while True:
            async with session.get("/ready") as answer:
                if answer.status == 200:
                    return


def flags(nats: ServerProcess, etcd: ServerProcess, *more: str) -> tuple[str, ...]:
    return ("--nats-url", nats.url, "--etcd-url", etcd.url, "--instance", NAME, "--lease-ttl-s", "2", *more)


async def test_sigterm_drains_and_ends_with_0(nats: ServerProcess, etcd: ServerProcess) -> None:
    async with control_plane(etcd) as control, service(*flags(nats, etcd)) as process:
        record = await registered(control)
        assert record.roles == (Role.GATEWAY,)
        async with aiohttp.ClientSession(record.http_url) as session:
            await ready(session)
        process.send_signal(signal.SIGTERM)
        status, out, err = await ended(process)
        assert (status, out) == (0, "")
        lines = [json.loads(line) for line in err.splitlines()]
        assert {line["service"] for line in lines} == {"gateway"}
        assert {line["instance"] for line in lines} == {NAME}
        assert "uvloop" in [line.get("loop") for line in lines]
        assert [line for line in lines if line["level"] in ("warning", "error")] == []
        assert await control.get(keys.instance(NAME)) is None, "deregistered, not left to the lease"


async def test_a_second_signal_ends_the_drain(nats: ServerProcess, etcd: ServerProcess) -> None:
    async with (
        control_plane(etcd) as control,
        service(*flags(nats, etcd, "--drain-for-s", "600", "--drain-s-max", "600")) as process,
    ):
        record = await registered(control)
        async with aiohttp.ClientSession(record.http_url) as session, asyncio.timeout(WAIT_S):
            await ready(session)
            process.send_signal(signal.SIGINT)
            draining = False
            while not draining:
                async with session.get("/ready") as answer:
                    draining = answer.status == 503
        process.send_signal(signal.SIGINT)
        assert (await ended(process))[0] == 0


async def test_it_lives_through_the_end_of_both_servers(
    own_nats: ServerProcess, own_etcd: ServerProcess
) -> None:
    async with control_plane(own_etcd) as control, service(*flags(own_nats, own_etcd)) as process:
        record = await registered(control)
        await asyncio.to_thread(own_etcd.kill)
        await asyncio.to_thread(own_nats.kill)
        async with aiohttp.ClientSession(record.http_url) as session, asyncio.timeout(WAIT_S):
            connected = True
            while connected:
                async with session.get("/health") as answer:
                    health = await answer.json()
                    connected = health["bus_connected"] or health["control_connected"]
            async with session.get("/live") as answer:
                assert answer.status == 200
        await asyncio.to_thread(own_etcd.start)
        await asyncio.to_thread(own_nats.start)
        assert await registered(control) == record
        bus = await NatsBus.connect(
            own_nats.url,
            InstanceId("asker"),
            1,
            metrics=ServiceMetrics(),
            log=Logger(Level.ERROR),
            timeout_s=WAIT_S,
        )
        request = RequestId("r")
        assert await _answer(bus, Cancel(request, 1)) == Accepted(request, 1)
        await bus.close()
        process.send_signal(signal.SIGTERM)
        assert (await ended(process))[0] == 0


async def _answer(bus: NatsBus, body: object) -> object:
    """The service's client may reconnect a moment later than ours."""
    async with asyncio.timeout(WAIT_S):
        while True:
            try:
                return await bus.request(subjects.instance(NAME), body, timeout_s=1.0)
            except RetryableError:
                await asyncio.sleep(0.05)


async def test_servers_that_are_not_there_end_it_with_1() -> None:
    async with service(
        *("--etcd-url", "http://127.0.0.1:1", "--nats-url", "nats://127.0.0.1:1", "--connect-s-max", "0.5")
    ) as process:
        status, _, err = await ended(process)
    last = json.loads(err.splitlines()[-1])
    assert (status, last["level"], last["message"]) == (1, "error", "service failed")
    assert "127.0.0.1:1" in last["error"]


@pytest.mark.parametrize(
    ("wrong", "word"),
    [
        (("--nonsense", "1"), "--nonsense"),
        (("--http-port", "70000"), "from 0 to 65535"),
        (("--etcd-url", "nowhere"), "etcd_url"),
        (("--log-level", "loud"), "--log-level"),
    ],
)
async def test_a_wrong_setting_ends_it_with_2_and_one_line(wrong: tuple[str, ...], word: str) -> None:
    async with service("--log-level", "error", *wrong) as process:
        status, out, err = await ended(process)
    assert (status, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert word in err


async def test_a_port_that_is_taken_ends_it_with_2() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        async with service("--http-port", str(port)) as process:
            status, _, err = await ended(process)
    assert status == 2
    assert f"--http-port {port}: Address already in use" in err


async def test_help_goes_to_standard_output() -> None:
    async with service("--help") as process:
        status, out, err = await ended(process)
    assert (status, err) == (0, "")
    assert "MOONPOOL_DRAIN_FOR_S" in out
