"""A bus in memory: one FakeBroker joins any number of FakeBus.

What it carries are real wire bytes, so a message that cannot be encoded fails here too.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable

from cluster import subjects
from cluster.bus import Handler, Take
from cluster.delivery import (
    HandlerRunner,
    InOrderRunner,
    RawMessage,
    Respond,
    Runner,
    Stamp,
    read_reply,
    tell_connection,
)
from cluster.errors import (
    DeadlineError,
    DisconnectedError,
    NoResponderError,
    ProtocolError,
)
from cluster.logs import Level, Logger
from cluster.metrics import ServiceMetrics
from cluster.tracing import TraceContext
from kvindex.core import InstanceId

PAYLOAD_BYTES_MAX = 1024 * 1024 - 256
BUFFERED_BYTES_MAX = 8 * 1024 * 1024


class FakeBroker:
    """Carries messages between its buses, in order, like a NATS server."""

    def __init__(self) -> None:
        self.subscriptions: list[_FakeSubscription] = []
        self._turns: dict[tuple[str, str], int] = {}

    def bus(self, instance: str, incarnation: int = 1) -> "FakeBus":
        return FakeBus(self, instance, incarnation)

    def listeners(self, subject: str) -> "list[_FakeSubscription]":
        """Every plain subscription, and one of each queue group in turn."""
        found = [s for s in self.subscriptions if s.bus.connected and _matches(s.pattern, subject)]
        chosen = [s for s in found if not s.queue]
        for group in sorted({(s.pattern, s.queue) for s in found if s.queue}):
            members = [s for s in found if (s.pattern, s.queue) == group]
            turn = self._turns.get(group, 0)
            self._turns[group] = turn + 1
            chosen.append(members[turn % len(members)])
        return chosen

    def send(self, raw: RawMessage) -> int:
        """How many got it."""
        listeners = self.listeners(raw.subject)
        for subscription in listeners:
            subscription.offer(raw)
        return len(listeners)


class FakeBus:
    """Implements `cluster.bus.Bus`. `disconnect` and `reconnect` play an outage."""

    def __init__(
        self,
        broker: FakeBroker,
        instance: str,
        incarnation: int = 1,
        metrics: ServiceMetrics | None = None,
        log: Logger | None = None,
    ) -> None:
        self.broker = broker
        self.metrics = metrics or ServiceMetrics()
        self.log = log or Logger(Level.ERROR)
        self._stamp = Stamp(InstanceId(instance), incarnation)
        self._connected = True
        self._callbacks: list[Callable[[bool], None]] = []
        self._buffered: list[RawMessage] = []
        self._buffered_bytes = 0
        self._closed = False

    @property
    def instance(self) -> InstanceId:
        return self._stamp.instance

    @property
    def incarnation(self) -> int:
        return self._stamp.incarnation

    @property
    def connected(self) -> bool:
        return self._connected

    def on_connection(self, callback: Callable[[bool], None]) -> None:
        self._callbacks.append(callback)

    def disconnect(self) -> None:
        self._set_connected(False)

    def reconnect(self) -> None:
        """Deliver what was published meanwhile, then tell the callbacks."""
        buffered, self._buffered, self._buffered_bytes = self._buffered, [], 0
        self._connected = True
        for raw in buffered:
            self.broker.send(raw)
        self._connected = False
        self._set_connected(True)

    async def publish(self, subject: str, body: object, *, trace: TraceContext | None = None) -> None:
        if self._closed:
            raise DisconnectedError("the bus is closed")
        data = self._encode(subject, body)
        raw = _raw(subject, data, trace, None)
        if self._connected:
            self.broker.send(raw)
        else:
            self._buffer(raw)
        self.metrics.bus_sent.labels(subjects.family(subject)).inc()

    async def request(
        self, subject: str, body: object, *, timeout_s: float, trace: TraceContext | None = None
    ) -> object:
        async with contextlib.aclosing(self._replies(subject, body, timeout_s, trace)) as replies:
            async for reply in replies:
                return reply
        raise AssertionError("replies end only by an error")

    def request_many(self, subject: str, body: object, *, timeout_s: float) -> AsyncIterator[object]:
        return self._replies(subject, body, timeout_s, None)

    async def subscribe(
        self,
        subject: str,
        handler: Handler,
        *,
        queue: str = "",
        concurrency_max: int = 64,
        pending_max: int = 4096,
    ) -> "_FakeSubscription":
        runner = HandlerRunner(handler, concurrency_max, self._stamp, self.metrics, self.log)
        return self._subscribed(subject, queue, pending_max, runner)

    async def follow(self, subject: str, take: Take, *, pending_max: int = 4096) -> "_FakeSubscription":
        return self._subscribed(
            subject, "", pending_max, InOrderRunner(take, self._stamp, self.metrics, self.log)
        )

    async def flush(self, *, timeout_s: float) -> None:
        if not self._connected:
            raise DisconnectedError("the bus is disconnected")

    async def close(self) -> None:
        self._closed = True
        for subscription in [s for s in self.broker.subscriptions if s.bus is self]:
            await subscription.unsubscribe()
        self._set_connected(False)

    def _subscribed(self, subject: str, queue: str, pending_max: int, runner: Runner) -> "_FakeSubscription":
        subscription = _FakeSubscription(self, subject, queue, pending_max, runner)
        self.broker.subscriptions.append(subscription)
        return subscription

    def _buffer(self, raw: RawMessage) -> None:
        if self._buffered_bytes + len(raw.data) > BUFFERED_BYTES_MAX:
            raise DisconnectedError(f"disconnected and {BUFFERED_BYTES_MAX} bytes are waiting already")
        self._buffered.append(raw)
        self._buffered_bytes += len(raw.data)

    def _encode(self, subject: str, body: object) -> bytes:
        if not subject or any(letter.isspace() for letter in subject):
            raise ProtocolError(f"{subject!r} is no subject")
        data = self._stamp.encode(subject, body)
        if len(data) > PAYLOAD_BYTES_MAX:
            raise ProtocolError(
                f"message of {len(data)} bytes on {subject}: the limit is {PAYLOAD_BYTES_MAX}"
            )
        return data

    async def _replies(
        self, subject: str, body: object, timeout_s: float, trace: TraceContext | None
    ) -> AsyncGenerator[object, None]:
        if not self._connected:
            raise DisconnectedError("the bus is disconnected")
        data = self._encode(subject, body)
        replies: asyncio.Queue[bytes] = asyncio.Queue()
        raw = _raw(subject, data, trace, self._reply_to(replies))
        if self.broker.send(raw) == 0:
            raise NoResponderError(f"nobody listens on {subject}")
        self.metrics.bus_sent.labels(subjects.family(subject)).inc()
        while True:
            try:
                async with asyncio.timeout(timeout_s):
                    reply = await replies.get()
            except TimeoutError as error:
                raise DeadlineError(f"no answer on {subject} within {timeout_s:g} s") from error
            yield read_reply(reply)

    def _reply_to(self, replies: "asyncio.Queue[bytes]") -> Respond:
        async def respond(data: bytes) -> None:
            if len(data) > PAYLOAD_BYTES_MAX:
                raise ProtocolError(f"reply of {len(data)} bytes: the limit is {PAYLOAD_BYTES_MAX}")
            if self._connected:
                replies.put_nowait(data)

        return respond

    def _set_connected(self, connected: bool) -> None:
        if connected == self._connected:
            return
        self._connected = connected
        self.metrics.bus_connected.set(connected)
        tell_connection(self._callbacks, connected, self.log)


class _FakeSubscription:
    def __init__(self, bus: FakeBus, pattern: str, queue: str, pending_max: int, runner: Runner) -> None:
        self.bus = bus
        self.pattern = pattern
        self.queue = queue
        self._pending: asyncio.Queue[RawMessage] = asyncio.Queue(pending_max)
        self._runner = runner
        self._pump = asyncio.create_task(self._deliver())

    def offer(self, raw: RawMessage) -> None:
        try:
            self._pending.put_nowait(raw)
        except asyncio.QueueFull:
            self.bus.metrics.bus_dropped.labels(subjects.family(raw.subject), "overflow").inc()

    async def unsubscribe(self) -> None:
        if self in self.bus.broker.subscriptions:
            self.bus.broker.subscriptions.remove(self)
        self._pump.cancel()
        await self._runner.stop()

    async def _deliver(self) -> None:
        while True:
            await self._runner.deliver(await self._pending.get())


def _matches(pattern: str, subject: str) -> bool:
    wanted, words = pattern.split("."), subject.split(".")
    if wanted[-1] == ">":
        return len(words) >= len(wanted) and all(map(_word_matches, wanted[:-1], words))
    return len(wanted) == len(words) and all(map(_word_matches, wanted, words))


def _word_matches(wanted: str, word: str) -> bool:
    return wanted in ("*", word)


def _raw(subject: str, data: bytes, trace: TraceContext | None, respond: Respond | None) -> RawMessage:
    if trace is None:
        return RawMessage(subject, data, None, respond)
    return RawMessage(subject, data, trace.traceparent(), respond, trace.client_request_id or None)
