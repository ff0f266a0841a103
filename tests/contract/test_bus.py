"""What every bus promises, over the fake and over a real NATS server."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, replace
from urllib.parse import urlsplit

import nats as nats_client
import pytest
from nats.aio.client import Client
from tests.support.eventually import eventually
from tests.support.relay import Relay

from cluster import subjects, wire
from cluster.bus import Bus, Received
from cluster.delivery import RawMessage
from cluster.errors import (
    ConfigError,
    DeadlineError,
    DisconnectedError,
    NoResponderError,
    ProtocolError,
    RetryableError,
)
from cluster.logs import Level, Logger
from cluster.messages import (
    Accepted,
    Cancel,
    Describe,
    HandlerFailed,
    InventoryChunk,
    InventoryRequest,
    StreamBatch,
)
from cluster.metrics import ServiceMetrics
from cluster.nats_bus import NatsBus
from cluster.nats_connection import NatsConnection, server_urls
from cluster.testing import FakeBroker, FakeBus
from cluster.tracing import CLIENT_REQUEST_ID_CHARS_MAX, TraceContext
from kvindex.core import InstanceId, Tier
from moonpool.servers import ServerProcess, nats_server
from policy.core import RequestId

pytestmark = pytest.mark.contract

WAIT_S = 5.0
SUBJECT = subjects.instance(InstanceId("target"))


def accepted(number: int = 1) -> Accepted:
    return Accepted(RequestId(f"r{number}"), number)


def cancel(number: int = 1) -> Cancel:
    return Cancel(RequestId(f"r{number}"), number)


@dataclass
class World:
    """Buses of one broker, and how to send bytes that no bus would send."""

    connect: Callable[[str], Awaitable[Bus]]
    publish_raw: Callable[[str, bytes], Awaitable[None]]
    request_raw: Callable[[str, bytes], Awaitable[object]]
    metrics: dict[str, ServiceMetrics]

    def dropped(self, instance: str, family: str, reason: str) -> float:
        registry = self.metrics[instance].registry
        labels = {"family": family, "reason": reason}
        return registry.get_sample_value("moonpool_bus_dropped_messages_total", labels) or 0.0


@contextlib.asynccontextmanager
async def fake_world() -> AsyncIterator[World]:
    broker = FakeBroker()
    buses: list[FakeBus] = []
    metrics: dict[str, ServiceMetrics] = {}

    async def connect(instance: str) -> Bus:
        metrics[instance] = ServiceMetrics()
        buses.append(FakeBus(broker, instance, metrics=metrics[instance], log=Logger(Level.ERROR)))
        return buses[-1]

    async def publish_raw(subject: str, data: bytes) -> None:
        broker.send(RawMessage(subject, data, None, None))

    async def request_raw(subject: str, data: bytes) -> object:
        replies: asyncio.Queue[bytes] = asyncio.Queue()
        broker.send(RawMessage(subject, data, None, replies.put))
        return wire.decode(await asyncio.wait_for(replies.get(), WAIT_S))[1]

    yield World(connect, publish_raw, request_raw, metrics)
    for bus in buses:
        await bus.close()


@contextlib.asynccontextmanager
async def real_world(url: str) -> AsyncIterator[World]:
    outsider = await nats_client.connect(url)
    buses: list[NatsBus] = []
    metrics: dict[str, ServiceMetrics] = {}

    async def connect(instance: str) -> Bus:
        metrics[instance] = ServiceMetrics()
        log = Logger(Level.ERROR)
        bus = await NatsBus.connect(
            url, InstanceId(instance), 1, metrics=metrics[instance], log=log, timeout_s=WAIT_S
        )
        buses.append(bus)
        return bus

    async def request_raw(subject: str, data: bytes) -> object:
        reply = await outsider.request(subject, data, timeout=WAIT_S)
        return wire.decode(reply.data)[1]

    yield World(connect, outsider.publish, request_raw, metrics)
    for bus in buses:
        await bus.close()
    await outsider.close()


@pytest.fixture(params=["fake", "real"])
async def world(request: pytest.FixtureRequest) -> AsyncIterator[World]:
    if request.param == "fake":
        async with fake_world() as made:
            yield made
    else:
        server: ServerProcess = request.getfixturevalue("nats")
        async with real_world(server.url) as made:
            yield made


async def subscribed(bus: Bus, subject: str, handler: object, **options: object) -> object:
    """Subscribe and let the server know before anybody else sends."""
    subscription = await bus.subscribe(subject, handler, **options)
    await bus.flush(timeout_s=WAIT_S)
    return subscription


class Collector:
    """A handler that keeps what it got."""

    def __init__(self) -> None:
        self.received: asyncio.Queue[Received] = asyncio.Queue()

    async def __call__(self, received: Received) -> None:
        await self.received.put(received)

    async def take(self, count: int) -> list[Received]:
        return [await asyncio.wait_for(self.received.get(), WAIT_S) for _ in range(count)]


async def test_published_messages_arrive_with_their_envelope(world: World) -> None:
    sender, receiver = await world.connect("a"), await world.connect("b")
    collector = Collector()
    await subscribed(receiver, subjects.LOAD_ALL, collector, concurrency_max=1)
    trace = replace(TraceContext.new(), client_request_id="of a client: 7")
    await sender.publish(subjects.load(InstanceId("a")), cancel(1), trace=trace)
    await sender.publish(subjects.load(InstanceId("a")), cancel(2))
    await sender.publish(subjects.load(InstanceId("z")), cancel(3))
    first, second, third = await collector.take(3)
    assert (first.body, second.body, third.body) == (cancel(1), cancel(2), cancel(3))
    assert first.subject == subjects.load(InstanceId("a"))
    assert (first.envelope.sender, first.envelope.incarnation, first.envelope.kind) == ("a", 1, "cancel")
    assert [m.envelope.seq for m in (first, second, third)] == [1, 2, 1], "seq counts per subject"
    assert first.trace == trace
    assert second.trace is None


async def test_a_request_gets_the_handlers_reply(world: World) -> None:
    asker, answerer = await world.connect("a"), await world.connect("b")

    async def handler(received: Received) -> Accepted:
        assert isinstance(received.body, Cancel)
        return Accepted(received.body.request_id, received.body.attempt)

    await subscribed(answerer, SUBJECT, handler)
    replies = await asyncio.gather(
        *(asker.request(SUBJECT, cancel(number), timeout_s=WAIT_S) for number in range(20))
    )
    assert replies == [accepted(number) for number in range(20)]


async def test_a_request_that_nobody_listens_to_fails_at_once(world: World) -> None:
    asker = await world.connect("a")
    with pytest.raises(NoResponderError):
        await asyncio.wait_for(asker.request(SUBJECT, cancel(), timeout_s=60.0), WAIT_S)


async def test_a_request_without_an_answer_ends_at_its_deadline(world: World) -> None:
    asker, answerer = await world.connect("a"), await world.connect("b")
    await subscribed(answerer, SUBJECT, Collector())
    with pytest.raises(DeadlineError, match=r"0\.05 s"):
        await asker.request(SUBJECT, cancel(), timeout_s=0.05)


async def test_a_handler_that_raises_fails_the_request_and_lives_on(world: World) -> None:
    asker, answerer = await world.connect("a"), await world.connect("b")
    calls = 0

    async def handler(_: Received) -> Accepted:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise RetryableError("no room today")
        return accepted()

    await subscribed(answerer, SUBJECT, handler)
    with pytest.raises(RetryableError, match="no room today"):
        await asker.request(SUBJECT, cancel(), timeout_s=WAIT_S)
    assert await asker.request(SUBJECT, cancel(), timeout_s=WAIT_S) == accepted()


async def test_one_request_can_have_many_replies_in_order(world: World) -> None:
    asker, answerer = await world.connect("a"), await world.connect("b")

    async def handler(_: Received) -> tuple[InventoryChunk, ...]:
        return tuple(InventoryChunk(7, chunk, 50, Tier.DRAM, b"", b"") for chunk in range(50))

    await subscribed(answerer, SUBJECT, handler)
    chunks = []
    async for chunk in asker.request_many(SUBJECT, InventoryRequest(), timeout_s=WAIT_S):
        assert isinstance(chunk, InventoryChunk)
        chunks.append(chunk.chunk)
        if len(chunks) == chunk.chunks:
            break
    assert chunks == list(range(50))


async def test_replies_may_be_made_one_by_one(world: World) -> None:
    asker, answerer = await world.connect("a"), await world.connect("b")
    made = 0

    async def handler(_: Received) -> AsyncIterator[InventoryChunk]:
        async def chunks() -> AsyncIterator[InventoryChunk]:
            nonlocal made
            for chunk in range(50):
                made += 1
                yield InventoryChunk(7, chunk, 50, Tier.DRAM, b"", b"")
            raise RetryableError("no more today")

        return chunks()

    await subscribed(answerer, SUBJECT, handler)
    chunks = []

    async def collect() -> None:
        async for chunk in asker.request_many(SUBJECT, InventoryRequest(), timeout_s=WAIT_S):
            assert isinstance(chunk, InventoryChunk)
            chunks.append(chunk.chunk)

    with pytest.raises(RetryableError, match="no more today"):
        await collect()
    assert chunks == list(range(50))
    assert made == 50


async def test_many_replies_end_at_the_deadline_of_the_next(world: World) -> None:
    asker, answerer = await world.connect("a"), await world.connect("b")

    async def handler(_: Received) -> Accepted:
        return accepted()

    await subscribed(answerer, SUBJECT, handler)
    replies = asker.request_many(SUBJECT, cancel(), timeout_s=0.2)
    assert await anext(replies) == accepted()
    with pytest.raises(DeadlineError):
        await anext(replies)


async def test_many_replies_from_nobody(world: World) -> None:
    asker = await world.connect("a")
    with pytest.raises(NoResponderError):
        await anext(asker.request_many(SUBJECT, cancel(), timeout_s=WAIT_S))


async def test_a_queue_group_shares_the_messages(world: World) -> None:
    asker, one, two = [await world.connect(name) for name in "abc"]

    def answer(name: str) -> object:
        async def handler(_: Received) -> Accepted:
            return Accepted(RequestId(name), 1)

        return handler

    for bus, name in ((one, "one"), (two, "two")):
        await subscribed(bus, subjects.SCHEDULE, answer(name), queue=subjects.CONDUCTOR_QUEUE)
    replies = [await asker.request(subjects.SCHEDULE, cancel(), timeout_s=WAIT_S) for _ in range(64)]
    assert {reply.request_id for reply in replies} == {"one", "two"}


async def test_concurrency_one_keeps_the_order_of_arrival(world: World) -> None:
    sender, receiver = await world.connect("a"), await world.connect("b")
    order: list[int] = []
    running = 0
    done = asyncio.Event()

    async def handler(received: Received) -> None:
        nonlocal running
        running += 1
        assert running == 1
        assert isinstance(received.body, Cancel)
        # The first takes longest: a bus that does not wait would overtake it.
        await asyncio.sleep(0.002 * (10 - received.body.attempt))
        order.append(received.body.attempt)
        running -= 1
        if len(order) == 10:
            done.set()

    await subscribed(receiver, SUBJECT, handler, concurrency_max=1)
    for number in range(10):
        await sender.publish(SUBJECT, cancel(number))
    await asyncio.wait_for(done.wait(), WAIT_S)
    assert order == list(range(10))


async def test_no_more_than_concurrency_max_handlers_run(world: World) -> None:
    sender, receiver = await world.connect("a"), await world.connect("b")
    running = peak = finished = 0
    gate, three_run, all_done = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def handler(_: Received) -> None:
        nonlocal running, peak, finished
        running += 1
        peak = max(peak, running)
        if running == 3:
            three_run.set()
        await gate.wait()
        running -= 1
        finished += 1
        if finished == 10:
            all_done.set()

    await subscribed(receiver, SUBJECT, handler, concurrency_max=3)
    for number in range(10):
        await sender.publish(SUBJECT, cancel(number))
    await asyncio.wait_for(three_run.wait(), WAIT_S)
    await receiver.flush(timeout_s=WAIT_S)
    gate.set()
    await asyncio.wait_for(all_done.wait(), WAIT_S)
    assert peak == 3


async def test_who_follows_takes_all_in_order_however_many_handlers_wait(world: World) -> None:
    """Each handler makes more work for the event loop; what is followed does not queue behind it."""
    sender, receiver = await world.connect("a"), await world.connect("b")
    taken: list[int] = []
    gate = asyncio.Event()
    handled = 0

    async def handler(_: Received) -> None:
        nonlocal handled
        await gate.wait()
        handled += 1

    def take(received: Received) -> None:
        assert isinstance(received.body, Cancel)
        taken.append(received.body.attempt)

    await subscribed(receiver, SUBJECT, handler)
    following = await receiver.follow(SUBJECT, take)
    await receiver.flush(timeout_s=WAIT_S)
    for number in range(200):
        await sender.publish(SUBJECT, cancel(number))
    await eventually(lambda: taken == list(range(200)))
    assert handled == 0
    gate.set()
    await eventually(lambda: handled == 200)
    await following.unsubscribe()
    await sender.publish(SUBJECT, cancel(200))
    await eventually(lambda: handled == 201)
    assert len(taken) == 200


async def test_one_who_follows_and_raises_is_counted_and_goes_on(world: World) -> None:
    sender, receiver = await world.connect("a"), await world.connect("b")
    taken: list[int] = []

    def take(received: Received) -> None:
        assert isinstance(received.body, Cancel)
        if received.body.attempt == 0:
            raise ProtocolError("not for us")
        if received.body.attempt == 1:
            raise RuntimeError("a bug")
        taken.append(received.body.attempt)

    await receiver.follow(SUBJECT, take)
    await receiver.flush(timeout_s=WAIT_S)
    for number in range(3):
        await sender.publish(SUBJECT, cancel(number))
    await eventually(lambda: taken == [2])
    assert world.dropped("b", "instance", "refused") == 1


async def test_what_waits_is_bounded_and_the_loss_is_counted(world: World) -> None:
    sender, receiver = await world.connect("a"), await world.connect("b")
    gate, started = asyncio.Event(), asyncio.Event()
    handled = 0

    async def handler(_: Received) -> None:
        nonlocal handled
        started.set()
        await gate.wait()
        handled += 1

    subscription = await subscribed(receiver, SUBJECT, handler, concurrency_max=1, pending_max=5)
    await sender.publish(SUBJECT, cancel())
    await asyncio.wait_for(started.wait(), WAIT_S)
    for number in range(50):
        await sender.publish(SUBJECT, cancel(number))
    await sender.flush(timeout_s=WAIT_S)
    await eventually(lambda: world.dropped("b", "instance", "overflow") >= 40)
    gate.set()
    # One ran, at most one was held by the bus, pending_max waited.
    await eventually(lambda: handled + world.dropped("b", "instance", "overflow") == 51)
    assert 6 <= handled <= 7
    await subscription.unsubscribe()


async def test_unsubscribe_waits_for_handlers_and_starts_no_more(world: World) -> None:
    sender, receiver = await world.connect("a"), await world.connect("b")
    gate, started = asyncio.Event(), asyncio.Event()
    handled = 0

    async def handler(_: Received) -> None:
        nonlocal handled
        started.set()
        await gate.wait()
        handled += 1

    subscription = await subscribed(receiver, SUBJECT, handler, concurrency_max=1)
    for number in range(3):
        await sender.publish(SUBJECT, cancel(number))
    await asyncio.wait_for(started.wait(), WAIT_S)
    ending = asyncio.create_task(subscription.unsubscribe())
    await asyncio.wait({ending}, timeout=0.05)
    assert not ending.done(), "it waits for the handler that runs"
    gate.set()
    await asyncio.wait_for(ending, WAIT_S)
    assert handled == 1
    await receiver.flush(timeout_s=WAIT_S)
    with pytest.raises(NoResponderError):
        await sender.request(SUBJECT, cancel(), timeout_s=WAIT_S)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"not json",
        b"[]",
        b'{"v":1}',
        b'{"v":1,"kind":"nothing","sender":"a","incarnation":1,"seq":1,"sent_at_s":1,"body":{}}',
        b'{"v":1,"kind":"cancel","sender":"a","incarnation":1,"seq":1,"sent_at_s":1,"body":{"attempt":"x"}}',
        b"\xff\xfe",
        b"[" * 100_000,
    ],
)
async def test_malformed_messages_are_counted_and_dropped_and_requests_answered(
    world: World, data: bytes
) -> None:
    asker, receiver = await world.connect("a"), await world.connect("b")
    collector = Collector()
    await subscribed(receiver, SUBJECT, collector, concurrency_max=1)
    await world.publish_raw(SUBJECT, data)
    answer = await world.request_raw(SUBJECT, data)
    assert isinstance(answer, HandlerFailed)
    assert "malformed" in answer.detail or "unknown" in answer.detail
    assert world.dropped("b", "instance", "malformed") == 2
    await asker.publish(SUBJECT, cancel(5))
    assert [message.body for message in await collector.take(1)] == [cancel(5)]


async def test_unknown_fields_and_a_bad_trace_header_are_ignored(world: World) -> None:
    receiver = await world.connect("b")
    collector = Collector()
    await subscribed(receiver, SUBJECT, collector)
    await world.publish_raw(
        SUBJECT,
        b'{"v":2,"kind":"describe","sender":"a","incarnation":1,"seq":1,"sent_at_s":1,'
        b'"body":{"later":1},"also":2}',
    )
    (message,) = await collector.take(1)
    assert message.body == Describe()
    assert message.envelope.v == 2


async def test_a_message_that_is_too_large_is_refused_where_it_is_sent(world: World) -> None:
    sender, answerer = await world.connect("a"), await world.connect("b")
    huge = InventoryChunk(1, 0, 1, Tier.DRAM, bytes(1024 * 1024), b"")
    with pytest.raises(ProtocolError, match="limit"):
        await sender.publish(SUBJECT, huge)

    async def handler(_: Received) -> InventoryChunk:
        return huge

    await subscribed(answerer, SUBJECT, handler)
    with pytest.raises(RetryableError, match="limit"):
        await sender.request(SUBJECT, cancel(), timeout_s=WAIT_S)
    assert sender.connected
    assert answerer.connected


@pytest.mark.parametrize("subject", ["", "two words", "line\r\nbreak"])
async def test_what_is_no_subject_is_refused_where_it_is_sent(world: World, subject: str) -> None:
    sender = await world.connect("a")
    with pytest.raises(ProtocolError, match="subject"):
        await sender.publish(subject, cancel())
    assert sender.connected


async def test_the_largest_message_fits_with_its_trace(world: World) -> None:
    sender, receiver = await world.connect("a"), await world.connect("b")
    collector = Collector()
    await subscribed(receiver, SUBJECT, collector)
    big = InventoryChunk(1, 0, 1, Tier.DRAM, bytes(785_900), b"")
    assert 1024 * 1024 - 1000 < len(wire.encode(big, InstanceId("a"), 1, 1, 1.0)) < 1024 * 1024 - 256
    trace = replace(TraceContext.new(), client_request_id="x" * CLIENT_REQUEST_ID_CHARS_MAX)
    await sender.publish(SUBJECT, big, trace=trace)
    (message,) = await collector.take(1)
    assert message.body == big


async def test_a_closed_bus_says_so(world: World) -> None:
    bus = await world.connect("a")
    states: list[bool] = []
    bus.on_connection(states.append)
    await bus.close()
    assert not bus.connected
    assert states == [False]
    with pytest.raises(DisconnectedError):
        await bus.publish(SUBJECT, cancel())
    with pytest.raises(DisconnectedError):
        await bus.request(SUBJECT, cancel(), timeout_s=WAIT_S)


class LateAfterPing(Relay):
    """A network that delivers late what was sent together with a PING and after it."""

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while part := await reader.read(65_536):
            before, ping, after = part.partition(b"PING\r\n")
            writer.write(before + ping)
            if after:
                await asyncio.sleep(0.2)
                writer.write(after)
        writer.close()


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
            buses: list[FakeBus] = []

            async def remember(instance: str) -> Bus:
                bus = await connect(instance)
                assert isinstance(bus, FakeBus)
                buses.append(bus)
                return bus

            async def begin() -> None:
                for bus in buses:
                    bus.disconnect()

            async def end() -> None:
                for bus in reversed(buses):
                    bus.reconnect()

            made.connect = remember
            yield Outage(made, begin, end)
        return
    server: ServerProcess = request.getfixturevalue("own_nats")
    async with real_world(server.url) as made:

        async def kill() -> None:
            await asyncio.to_thread(server.kill)

        async def restart() -> None:
            await asyncio.to_thread(server.start)

        yield Outage(made, kill, restart)


async def test_an_outage_is_survived(outage: Outage) -> None:
    asker, answerer = await outage.world.connect("a"), await outage.world.connect("b")
    states: asyncio.Queue[bool] = asyncio.Queue()
    asker.on_connection(states.put_nowait)
    collector = Collector()

    async def handler(_: Received) -> Accepted:
        return accepted()

    await subscribed(answerer, SUBJECT, handler)
    await subscribed(answerer, subjects.stream(InstanceId("b")), collector, concurrency_max=1)
    await outage.begin()
    assert await asyncio.wait_for(states.get(), WAIT_S) is False
    assert not asker.connected
    with pytest.raises(DisconnectedError):
        await asker.request(SUBJECT, cancel(), timeout_s=WAIT_S)
    with pytest.raises(DisconnectedError):
        await asker.flush(timeout_s=WAIT_S)
    await outage.end()
    assert await asyncio.wait_for(states.get(), WAIT_S) is True
    await eventually(lambda: answerer.connected)
    assert await asker.request(SUBJECT, cancel(), timeout_s=WAIT_S) == accepted()
    await asker.publish(subjects.stream(InstanceId("b")), StreamBatch())
    assert [message.body for message in await collector.take(1)] == [StreamBatch()]


async def test_what_is_published_in_an_outage_waits_up_to_a_bound(outage: Outage) -> None:
    bus = await outage.world.connect("a")
    await outage.begin()
    await eventually(lambda: not bus.connected)
    body = InventoryChunk(1, 0, 1, Tier.DRAM, bytes(700_000), b"")
    for _ in range(8):
        await bus.publish(SUBJECT, body)
    with pytest.raises(DisconnectedError, match="8388608 bytes"):
        await bus.publish(SUBJECT, body)


async def test_buffered_messages_arrive_after_the_outage(outage: Outage) -> None:
    # One bus both ways: with two, whoever reconnects first decides whether anybody listens.
    bus = await outage.world.connect("a")
    collector = Collector()
    await subscribed(bus, SUBJECT, collector, concurrency_max=1)
    await outage.begin()
    await eventually(lambda: not bus.connected)
    for number in range(3):
        await bus.publish(SUBJECT, cancel(number))
    await outage.end()
    assert [message.body for message in await collector.take(3)] == [cancel(number) for number in range(3)]


async def test_a_callback_that_breaks_stops_no_other(outage: Outage) -> None:
    def broken(_: bool) -> None:
        raise ValueError("broken")

    bus = await outage.world.connect("a")
    states: asyncio.Queue[bool] = asyncio.Queue()
    bus.on_connection(broken)
    bus.on_connection(states.put_nowait)
    await outage.begin()
    assert await asyncio.wait_for(states.get(), WAIT_S) is False
    await outage.end()
    assert await asyncio.wait_for(states.get(), WAIT_S) is True
    await bus.flush(timeout_s=WAIT_S)


# What only a real server can show.


async def test_a_flush_waits_for_subscriptions_that_the_network_delays(nats: ServerProcess) -> None:
    port = urlsplit(nats.url).port
    assert port is not None
    async with LateAfterPing.running(port) as relay, real_world(nats.url) as world:
        sender = await world.connect("a")
        receiver = await NatsBus.connect(
            f"nats://127.0.0.1:{relay.port}",
            InstanceId("b"),
            1,
            metrics=ServiceMetrics(),
            log=Logger(Level.ERROR),
            timeout_s=WAIT_S,
        )
        try:
            for number in range(3):
                collector = Collector()
                subject = subjects.load(InstanceId(f"late{number}"))
                await subscribed(receiver, subject, collector)
                await sender.publish(subject, cancel(number))
                assert [message.body for message in await collector.take(1)] == [cancel(number)]
        finally:
            await receiver.close()


async def thrown_out(connection: NatsConnection) -> None:
    await connection.client._send_command(b"NONSENSE\r\n")
    await connection.client._flush_pending()


async def test_a_client_that_cannot_take_over_is_not_the_last(own_nats: ServerProcess) -> None:
    clients: list[Client] = []

    async def equip(client: Client) -> None:
        clients.append(client)
        if len(clients) == 2:
            raise ValueError("an error that nobody foresaw")

    connection = NatsConnection([own_nats.url], "a", ServiceMetrics(), Logger(Level.ERROR), equip)
    await connection.open(WAIT_S)
    try:
        await thrown_out(connection)
        await eventually(lambda: len(clients) == 3 and connection.connected)
        await connection.flush(WAIT_S)
    finally:
        await connection.close()


async def test_a_client_that_was_lost_as_it_took_over_does_not_live_on(own_nats: ServerProcess) -> None:
    """It would come back by itself, and everything would be received twice."""
    clients: list[Client] = []

    async def equip(client: Client) -> None:
        clients.append(client)
        if len(clients) == 2:
            await asyncio.to_thread(own_nats.kill)
            await eventually(lambda: not client.is_connected)

    connection = NatsConnection([own_nats.url], "a", ServiceMetrics(), Logger(Level.ERROR), equip)
    await connection.open(WAIT_S)
    try:
        await thrown_out(connection)
        await eventually(lambda: not own_nats.alive)
        await asyncio.to_thread(own_nats.start)
        # Either it comes back itself before the next one is made, or the next one takes over.
        await eventually(lambda: connection.connected and connection.client.is_connected)
        await eventually(
            lambda: all(client.is_closed for client in clients if client is not connection.client)
        )
        assert [client for client in clients if client.is_connected] == [connection.client]
    finally:
        await connection.close()


async def test_a_server_that_ends_in_order_is_found_again(own_nats: ServerProcess) -> None:
    async with real_world(own_nats.url) as world:
        bus = await world.connect("a")
        collector = Collector()
        await subscribed(bus, SUBJECT, collector)
        await asyncio.to_thread(own_nats.stop)
        await eventually(lambda: not bus.connected)
        await asyncio.to_thread(own_nats.start)
        await eventually(lambda: bus.connected)
        await bus.publish(SUBJECT, cancel())
        assert [message.body for message in await collector.take(1)] == [cancel()]


async def test_a_client_that_the_server_throws_out_comes_back(own_nats: ServerProcess) -> None:
    """A protocol error closes a nats-py client for good; the bus must not end with it."""
    async with real_world(own_nats.url) as world:
        bus = await world.connect("a")
        assert isinstance(bus, NatsBus)
        states: asyncio.Queue[bool] = asyncio.Queue()
        bus.on_connection(states.put_nowait)
        collector = Collector()
        await subscribed(bus, SUBJECT, collector)
        await thrown_out(bus._connection)
        assert await asyncio.wait_for(states.get(), WAIT_S) is False
        assert await asyncio.wait_for(states.get(), WAIT_S) is True
        await bus.flush(timeout_s=WAIT_S)
        await bus.publish(SUBJECT, cancel())
        assert [message.body for message in await collector.take(1)] == [cancel()]


async def test_a_server_that_hangs_with_full_sockets_counts_as_lost(own_nats: ServerProcess) -> None:
    async with real_world(own_nats.url) as world:
        bus = await world.connect("a")
        states: asyncio.Queue[bool] = asyncio.Queue()
        bus.on_connection(states.put_nowait)
        collector = Collector()
        await subscribed(bus, SUBJECT, collector, concurrency_max=1)
        own_nats.pause()
        try:
            body = InventoryChunk(1, 0, 1, Tier.DRAM, bytes(700_000), b"")
            for _ in range(8):
                await bus.publish(subjects.DECISION, body)
            assert await asyncio.wait_for(states.get(), 20.0) is False
        finally:
            own_nats.resume()
        assert await asyncio.wait_for(states.get(), 20.0) is True
        await bus.flush(timeout_s=WAIT_S)
        await bus.publish(SUBJECT, cancel())
        assert [message.body for message in await collector.take(1)] == [cancel()]


async def test_connecting_to_nobody_fails_in_time() -> None:
    with pytest.raises(DisconnectedError, match=r"0\.3 s"):
        await asyncio.wait_for(
            NatsBus.connect(
                "nats://127.0.0.1:1",
                InstanceId("a"),
                1,
                metrics=ServiceMetrics(),
                log=Logger(Level.ERROR),
                timeout_s=0.3,
            ),
            WAIT_S,
        )


@pytest.mark.parametrize(
    "url", ["", "http://a:1", "nats://", "nats://a:1,", "nats://me:secret@a:x", "nats://[::1", "nats://a:1/x"]
)
async def test_a_malformed_url_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="nats_url") as failure:
        await NatsBus.connect(
            url, InstanceId("a"), 1, metrics=ServiceMetrics(), log=Logger(Level.ERROR), timeout_s=0.1
        )
    assert "secret" not in str(failure.value)


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("nats://a:1, tls://me:secret@b:2", ["nats://a:1", "tls://me:secret@b:2"]),
        ("nats://a", ["nats://a:4222"]),
        ("a:1", ["nats://a:1"]),
        ("nats://[::1]", ["nats://[::1]:4222"]),
    ],
)
def test_scheme_and_port_may_be_left_out(url: str, expected: list[str]) -> None:
    assert server_urls(url) == expected


async def test_user_and_password_in_the_url(tmp_path: object) -> None:
    with nats_server(tmp_path, options=("--user", "me", "--pass", "secret")) as server:

        def connecting(url: str) -> Awaitable[NatsBus]:
            return NatsBus.connect(
                url, InstanceId("a"), 1, metrics=ServiceMetrics(), log=Logger(Level.ERROR), timeout_s=2.0
            )

        bus = await connecting(server.url.replace("//", "//me:secret@"))
        await bus.close()
        with pytest.raises(DisconnectedError) as failure:
            await connecting(server.url.replace("//", "//me:wrong@"))
        assert "wrong" not in str(failure.value)
