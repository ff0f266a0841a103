"""The lifecycle over fakes: order of steps, registration, readiness, load, ends of every kind."""

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace

import aiohttp
import pytest
from tests.support.eventually import eventually
from tests.support.records import MODEL_INFO, worker
from tests.support.service import EchoApp

from cluster import keys, subjects
from cluster.bus import Bus, Received
from cluster.context import ServiceConfig
from cluster.control import ControlPlane
from cluster.errors import ConfigError, DisconnectedError, RetryableError
from cluster.http_options import HttpOptions
from cluster.logs import Logger
from cluster.messages import Accepted, Cancel, Commit, Describe, InstanceRecord
from cluster.metrics import ServiceMetrics
from cluster.service import ServiceContext, Stop, serve
from cluster.testing import FakeBroker, FakeBus, FakeControlPlane, FakeStore
from cluster.wire import decode_record, encode_record
from kvindex.core import InstanceId
from policy.core import InstanceState, LoadSnapshot, RequestId, Role

pytestmark = pytest.mark.unit

WAIT_S = 5.0
NAME = InstanceId("echo-1")
CONFIG = ServiceConfig(instance=NAME, log_level="error", drain_s_max=0.2, lease_ttl_s=0.15, connect_s_max=1.0)


@dataclass
class Cluster:
    """One service under test and the world around it."""

    broker: FakeBroker
    store: FakeStore
    stop: Stop
    bus: FakeBus | None = None
    control: FakeControlPlane | None = None
    app: EchoApp | None = None
    running: "asyncio.Task[int] | None" = None

    async def connect(
        self,
        config: ServiceConfig,
        instance: InstanceId,
        incarnation: int,
        metrics: ServiceMetrics,
        log: Logger,
    ) -> tuple[Bus, ControlPlane]:
        self.bus = FakeBus(self.broker, instance, incarnation, metrics, log)
        self.control = self.store.control()
        return self.bus, self.control

    def build(self, context: ServiceContext) -> EchoApp:
        self.app = EchoApp(context)
        return self.app

    def launch(self, config: ServiceConfig = CONFIG, build: Callable[..., object] | None = None) -> None:
        self.running = asyncio.create_task(
            serve(
                config,
                (Role.PREFILL, Role.DECODE),
                build or self.build,
                self.stop,
                connect=self.connect,
                http=HttpOptions(request_bytes_max=1000),
            )
        )

    async def registered(self) -> InstanceRecord:
        async with asyncio.timeout(WAIT_S):
            async for _ in self.store.control().watch_prefix(keys.INSTANCES):
                if keys.instance(NAME) in self.store.entries:
                    return decode_record(self.store.entries[keys.instance(NAME)], InstanceRecord)
        raise AssertionError

    async def end(self) -> int:
        assert self.running is not None
        if self.app is not None:
            self.app.drained.set()
        self.stop.ask()
        return await asyncio.wait_for(self.running, WAIT_S)


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    made = Cluster(FakeBroker(), FakeStore(), Stop())
    yield made
    if made.running is not None and not made.running.done():
        made.running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await made.running


async def get(record: InstanceRecord, path: str) -> tuple[int, dict[str, object]]:
    async with aiohttp.ClientSession() as session, session.get(record.http_url + path) as answer:
        return answer.status, await answer.json()


async def test_a_life_in_order(cluster: Cluster) -> None:
    cluster.launch()
    record = await cluster.registered()
    assert record.instance == NAME
    assert record.roles == (Role.PREFILL, Role.DECODE)
    assert record.blocks == 7
    assert record.incarnation > 1_700_000_000_000_000
    assert await cluster.end() == 0
    assert cluster.app is not None
    assert cluster.app.steps == ["start", "drain", "close"]
    assert cluster.store.entries.keys() == {keys.SEED}
    assert cluster.broker.subscriptions == []
    with pytest.raises(aiohttp.ClientConnectorError):
        await get(record, "/live")


async def test_it_is_registered_only_once_it_is_ready(cluster: Cluster) -> None:
    gate = asyncio.Event()

    class SlowApp(EchoApp):
        async def start(self) -> InstanceRecord:
            record = await super().start()
            await gate.wait()
            return record

    apps: list[SlowApp] = []

    def build(context: ServiceContext) -> SlowApp:
        apps.append(SlowApp(context))
        return apps[0]

    cluster.launch(build=build)
    await eventually(lambda: bool(apps) and apps[0].steps == ["start"])
    record = apps[0].context.record()
    assert (await get(record, "/live"))[0] == 200
    status, health = await get(record, "/ready")
    assert (status, health["reason"]) == (503, "starting")
    assert keys.instance(NAME) not in cluster.store.entries
    gate.set()
    await cluster.registered()
    status, health = await get(record, "/ready")
    assert (status, health["ready"], health["registered"]) == (200, True, True)


async def test_the_admin_routes_and_those_of_the_service(cluster: Cluster) -> None:
    cluster.launch()
    record = await cluster.registered()
    assert (await get(record, "/version"))[1].keys() == {"version"}
    assert (await get(record, "/health"))[1]["instance"] == NAME
    async with aiohttp.ClientSession(record.http_url) as session:
        async with session.get("/metrics") as answer:
            text = await answer.text()
            assert answer.headers["Content-Type"].startswith("text/plain; version=")
            assert "moonpool_registered 1.0" in text
            assert f'instance="{NAME}"' in text
        async with session.post("/echo", data=b"x" * 1000) as answer:
            assert await answer.read() == b"x" * 1000
        async with session.post("/echo", data=b"x" * 1001) as answer:
            assert answer.status == 413


async def test_ready_tells_the_truth(cluster: Cluster) -> None:
    cluster.launch()
    record = await cluster.registered()
    assert cluster.bus is not None
    assert cluster.app is not None
    cluster.bus.disconnect()
    assert await get(record, "/ready") == (503, await reason_of(record, "bus disconnected"))
    assert (await get(record, "/live"))[0] == 200
    cluster.bus.reconnect()
    assert (await get(record, "/ready"))[0] == 200
    cluster.stop.ask()
    await asyncio.wait_for(cluster.app.drain_started.wait(), WAIT_S)
    await reason_of(record, "draining")


async def reason_of(record: InstanceRecord, reason: str) -> dict[str, object]:
    health = (await get(record, "/ready"))[1]
    assert health["reason"] == reason
    return health


async def test_messages_go_to_the_handler_of_their_class(cluster: Cluster) -> None:
    cluster.launch()
    await cluster.registered()
    peer = cluster.broker.bus("peer")
    subject = subjects.instance(NAME)
    request = RequestId("r")
    assert await peer.request(subject, Cancel(request, 1), timeout_s=WAIT_S) == Accepted(request, 1)
    load = await peer.request(subject, Describe(), timeout_s=WAIT_S)
    assert isinstance(load, LoadSnapshot)
    assert (load.instance, load.state) == (NAME, InstanceState.SERVING)
    assert cluster.app is not None
    with pytest.raises(RetryableError, match="not for this instance"):
        await peer.request(subject, Commit(request, 1, 1, 1, 1, "", 1, 0), timeout_s=WAIT_S)
    registry = cluster.app.context.metrics.registry
    labels = {"family": "instance", "reason": "refused"}
    assert registry.get_sample_value("moonpool_bus_dropped_messages_total", labels) == 1


async def test_load_is_published_at_intervals_and_on_change(cluster: Cluster) -> None:
    loads: asyncio.Queue[tuple[float, LoadSnapshot]] = asyncio.Queue()

    async def collect(received: Received) -> None:
        assert isinstance(received.body, LoadSnapshot)
        await loads.put((asyncio.get_running_loop().time(), received.body))

    await cluster.broker.bus("peer").subscribe(subjects.LOAD_ALL, collect)
    cluster.launch()
    await cluster.registered()
    assert cluster.app is not None
    first_s, _ = await asyncio.wait_for(loads.get(), WAIT_S)
    for number in range(1, 50):
        cluster.app.requests = number
        cluster.app.context.load_changed()
    second_s, second = await asyncio.wait_for(loads.get(), WAIT_S)
    assert second.requests == 49, "changes in quick succession make one snapshot, with the last state"
    assert 0.09 <= second_s - first_s < 0.8
    third_s, _ = await asyncio.wait_for(loads.get(), WAIT_S)
    assert third_s - second_s > 0.8, "without a change, the interval"
    cluster.stop.ask()
    await asyncio.wait_for(cluster.app.drain_started.wait(), WAIT_S)
    _, last = await asyncio.wait_for(loads.get(), WAIT_S)
    assert last.state is InstanceState.DRAINING


async def test_drain_is_bounded(cluster: Cluster) -> None:
    cluster.launch()
    await cluster.registered()
    assert cluster.running is not None
    cluster.stop.ask()
    # Never drained: 0.2 s of drain_s_max and the slack.
    assert await asyncio.wait_for(cluster.running, 3.0) == 0
    assert cluster.app is not None
    assert cluster.app.steps == ["start", "drain", "close"]


async def test_while_it_drains_it_is_still_registered_and_answers(cluster: Cluster) -> None:
    cluster.launch(replace(CONFIG, drain_s_max=60.0))
    await cluster.registered()
    assert cluster.app is not None
    cluster.stop.ask()
    await asyncio.wait_for(cluster.app.drain_started.wait(), WAIT_S)
    assert keys.instance(NAME) in cluster.store.entries
    load = await cluster.broker.bus("peer").request(subjects.instance(NAME), Describe(), timeout_s=WAIT_S)
    assert isinstance(load, LoadSnapshot)
    assert load.state is InstanceState.DRAINING


async def test_a_second_wish_ends_the_drain_at_once(cluster: Cluster) -> None:
    cluster.launch(replace(CONFIG, drain_s_max=60.0))
    await cluster.registered()
    assert cluster.app is not None
    assert cluster.running is not None
    cluster.stop.ask()
    await asyncio.wait_for(cluster.app.drain_started.wait(), WAIT_S)
    cluster.stop.ask()
    assert await asyncio.wait_for(cluster.running, WAIT_S) == 0
    assert cluster.app.steps == ["start", "drain", "close"]


async def test_a_stop_while_starting_needs_no_drain(cluster: Cluster) -> None:
    class StuckApp(EchoApp):
        async def start(self) -> InstanceRecord:
            await super().start()
            await asyncio.Event().wait()
            raise AssertionError

    apps: list[StuckApp] = []

    def build(context: ServiceContext) -> StuckApp:
        apps.append(StuckApp(context))
        return apps[0]

    cluster.launch(build=build)
    await eventually(lambda: bool(apps) and apps[0].steps == ["start"])
    assert await cluster.end() == 0
    assert apps[0].steps == ["start", "close"]
    assert keys.instance(NAME) not in cluster.store.entries


async def test_a_stop_while_the_registry_is_awaited_ends_it(cluster: Cluster) -> None:
    """The control plane went away right after it was connected to."""

    async def connect(*arguments: object) -> tuple[Bus, ControlPlane]:
        connections = await cluster.connect(*arguments)
        cluster.control.cut()
        return connections

    config = replace(CONFIG, connect_s_max=60.0)
    running = asyncio.create_task(
        serve(config, (Role.PREFILL,), cluster.build, cluster.stop, connect=connect)
    )
    await eventually(lambda: cluster.control is not None)
    cluster.stop.ask()
    assert await asyncio.wait_for(running, WAIT_S) == 0
    assert cluster.app is None


async def test_a_start_that_fails_ends_with_status_1_and_closes(cluster: Cluster) -> None:
    class BrokenApp(EchoApp):
        async def start(self) -> InstanceRecord:
            await super().start()
            raise OSError("no such model")

    apps: list[BrokenApp] = []

    def build(context: ServiceContext) -> BrokenApp:
        apps.append(BrokenApp(context))
        return apps[0]

    cluster.launch(build=build)
    assert cluster.running is not None
    assert await asyncio.wait_for(cluster.running, WAIT_S) == 1
    assert apps[0].steps == ["start", "close"]


async def test_what_takes_long_to_build_is_awaited(cluster: Cluster) -> None:
    building, gate = asyncio.Event(), asyncio.Event()

    async def build(context: ServiceContext) -> EchoApp:
        building.set()
        await gate.wait()
        return cluster.build(context)

    cluster.launch(build=build)
    await asyncio.wait_for(building.wait(), WAIT_S)
    assert cluster.store.entries.keys() == {keys.SEED}
    gate.set()
    await cluster.registered()
    assert await cluster.end() == 0


async def test_a_signal_ends_what_is_built_still(cluster: Cluster) -> None:
    building = asyncio.Event()

    async def build(_: ServiceContext) -> EchoApp:
        building.set()
        await asyncio.Event().wait()
        raise AssertionError

    cluster.launch(build=build)
    await asyncio.wait_for(building.wait(), WAIT_S)
    assert await cluster.end() == 0


async def test_a_setting_that_turns_out_wrong_while_it_is_built_is_told(cluster: Cluster) -> None:
    async def build(_: ServiceContext) -> EchoApp:
        await asyncio.sleep(0)
        raise ConfigError("ssd_folder: no such disk")

    cluster.launch(build=build)
    assert cluster.running is not None
    with pytest.raises(ConfigError, match="no such disk"):
        await asyncio.wait_for(cluster.running, WAIT_S)


async def test_a_service_that_cannot_go_on_ends_with_status_1(cluster: Cluster) -> None:
    cluster.launch()
    await cluster.registered()
    assert cluster.app is not None
    assert cluster.running is not None
    cluster.app.context.fail("the engine died")
    assert await asyncio.wait_for(cluster.running, WAIT_S) == 1
    assert cluster.app.steps == ["start", "close"]
    assert keys.instance(NAME) not in cluster.store.entries


async def test_a_lost_lease_is_registered_again_under_the_same_incarnation(cluster: Cluster) -> None:
    cluster.launch()
    first = await cluster.registered()
    cluster.store.expire_leases()
    assert keys.instance(NAME) not in cluster.store.entries
    assert await cluster.registered() == first


async def test_a_store_that_lost_everything_is_filled_again(cluster: Cluster) -> None:
    cluster.launch()
    first = await cluster.registered()
    cluster.store.wipe()
    assert await cluster.registered() == first


async def test_an_outage_of_the_control_plane_stops_nothing(cluster: Cluster) -> None:
    cluster.launch()
    record = await cluster.registered()
    assert cluster.control is not None
    cluster.control.cut()
    # Longer than the lease: it ends without us knowing.
    await eventually(lambda: keys.instance(NAME) not in cluster.store.entries)
    status, health = await get(record, "/ready")
    assert (status, health["control_connected"]) == (200, False)
    peer = cluster.broker.bus("peer")
    request = RequestId("r")
    answer = await peer.request(subjects.instance(NAME), Cancel(request, 1), timeout_s=WAIT_S)
    assert answer == Accepted(request, 1)
    assert cluster.app is not None
    assert NAME in cluster.app.context.registry.instances
    cluster.control.restore()
    assert await cluster.registered() == record


async def test_the_older_of_two_processes_with_one_name_goes(cluster: Cluster) -> None:
    cluster.launch()
    record = await cluster.registered()
    assert cluster.running is not None
    cluster.store.put(
        keys.instance(NAME), encode_record(replace(record, incarnation=record.incarnation + 1)), None
    )
    assert await asyncio.wait_for(cluster.running, WAIT_S) == 1
    left = decode_record(cluster.store.entries[keys.instance(NAME)], InstanceRecord)
    assert left.incarnation == record.incarnation + 1, "the newer one's registration stays"


class ServingApp(EchoApp):
    """An EchoApp that serves a model."""

    async def start(self) -> InstanceRecord:
        await super().start()
        return self.context.record(model=MODEL_INFO)


STRANGER = replace(worker("stranger", Role.DECODE), model=replace(MODEL_INFO, layers=1))
"""Serves the same model in another way, and is older than any process."""


async def test_a_model_that_is_served_in_another_way_ends_the_service_as_a_wrong_setting(
    cluster: Cluster,
) -> None:
    cluster.store.put(keys.instance(STRANGER.instance), encode_record(STRANGER), None)
    apps: list[ServingApp] = []
    cluster.launch(build=lambda context: apps.append(ServingApp(context)) or apps[0])
    assert cluster.running is not None
    with pytest.raises(ConfigError, match="layers is 30, but stranger, which is registered, has 1"):
        await asyncio.wait_for(cluster.running, WAIT_S)
    assert apps[0].steps == ["start", "close"]
    assert keys.instance(NAME) not in cluster.store.entries


async def test_of_two_that_came_at_once_the_younger_sees_the_other_in_the_registry(cluster: Cluster) -> None:
    apps: list[ServingApp] = []
    cluster.launch(build=lambda context: apps.append(ServingApp(context)) or apps[0])
    await cluster.registered()
    assert cluster.running is not None
    cluster.store.put(keys.instance(STRANGER.instance), encode_record(STRANGER), None)
    with pytest.raises(ConfigError, match="layers is 30"):
        await asyncio.wait_for(cluster.running, WAIT_S)
    assert cluster.store.entries.keys() == {keys.SEED, keys.instance(STRANGER.instance)}


async def test_all_services_share_one_seed(cluster: Cluster) -> None:
    cluster.launch()
    await cluster.registered()
    assert cluster.app is not None
    seed = cluster.app.context.cluster_seed
    assert len(seed) == 32
    assert cluster.store.entries[keys.SEED] == seed
    await cluster.end()
    cluster.stop = Stop()
    cluster.launch()
    await cluster.registered()
    assert cluster.app.context.cluster_seed == seed


async def test_a_cluster_that_does_not_answer_fails_the_start(cluster: Cluster) -> None:
    async def nobody(*_: object) -> tuple[Bus, ControlPlane]:
        raise DisconnectedError("no NATS server answers")

    status = await serve(CONFIG, (Role.GATEWAY,), cluster.build, Stop(), connect=nobody)
    assert status == 1
    assert cluster.app is None


async def test_a_registration_that_fails_at_first_is_tried_again(cluster: Cluster) -> None:
    def build(context: ServiceContext) -> EchoApp:
        app = cluster.build(context)
        assert cluster.control is not None
        app.on_start = cluster.control.cut
        return app

    cluster.launch(build=build)
    await eventually(lambda: cluster.app is not None and cluster.app.steps == ["start"])
    assert cluster.app is not None
    assert cluster.control is not None
    await reason_of(cluster.app.context.record(), "not registered")
    cluster.control.restore()
    await cluster.registered()


@pytest.mark.parametrize("name", ["a.b", "a b", "*", ">", "-a", "a/b", "x" * 65, "ä"])
async def test_a_name_that_cannot_be_in_a_subject_is_refused(cluster: Cluster, name: str) -> None:
    with pytest.raises(ConfigError, match="--instance"):
        await serve(replace(CONFIG, instance=name), (Role.DECODE,), cluster.build, Stop())


async def test_a_name_is_made_up_from_the_role(cluster: Cluster) -> None:
    cluster.launch(replace(CONFIG, instance=""))
    await eventually(lambda: cluster.app is not None)
    assert cluster.app is not None
    assert re.fullmatch(r"prefill-[0-9a-f]{8}", cluster.app.context.instance)
