"""The bus over NATS: messages, replies and subscriptions on one `NatsConnection`.

Facts of nats-py that shape this file: callbacks of one subscription run one after the other, so each hands
its message to a bounded runner; with nobody listening the server answers a request with status 503.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from functools import partial

from nats.aio.msg import Msg
from nats.aio.subscription import Subscription as ClientSubscription

from cluster import subjects
from cluster.bus import Handler, Take
from cluster.delivery import (
    CLIENT_ID_HEADER,
    TRACE_HEADER,
    HandlerRunner,
    InOrderRunner,
    RawMessage,
    Runner,
    Stamp,
    read_reply,
)
from cluster.errors import DeadlineError, DisconnectedError, NoResponderError
from cluster.logs import Logger, without_credentials
from cluster.metrics import ServiceMetrics
from cluster.nats_client import DirectClient
from cluster.nats_connection import CLIENT_ERRORS, NatsConnection, server_urls
from cluster.tracing import TraceContext
from kvindex.core import InstanceId

REPLIES_PENDING_MAX = 4096
SUBSCRIPTION_BYTES_MAX = 64 * 1024 * 1024
HANDLERS_CLOSE_S_MAX = 5.0

_NO_RESPONDERS = "503"


class NatsBus:
    """Implements `cluster.bus.Bus`; make one with `connect`."""

    def __init__(
        self, url: str, instance: InstanceId, incarnation: int, metrics: ServiceMetrics, log: Logger
    ) -> None:
        self._metrics = metrics
        self._log = log
        self._stamp = Stamp(instance, incarnation)
        self._connection = NatsConnection(server_urls(url), instance, metrics, log, self._equip)
        self._inbox = ""
        self._waiting: dict[str, Callable[[Msg], None]] = {}
        """By token: who takes the replies to a request."""
        self._next_token = 0
        self._subscriptions: set[_NatsSubscription] = set()

    @classmethod
    async def connect(
        cls,
        url: str,
        instance: InstanceId,
        incarnation: int,
        *,
        metrics: ServiceMetrics,
        log: Logger,
        timeout_s: float,
    ) -> "NatsBus":
        """A connected bus. `url` may be several, separated by commas, carry `user:password@` and ask for
        TLS with `tls://`.

        Raises DisconnectedError where no server answers within `timeout_s`, ConfigError for a bad URL.
        """
        bus = cls(url, instance, incarnation, metrics, log)
        try:
            await bus._connection.open(timeout_s)
        except DisconnectedError as error:
            raise DisconnectedError(f"{error} at {without_credentials(url)}") from error
        return bus

    @property
    def instance(self) -> InstanceId:
        return self._stamp.instance

    @property
    def incarnation(self) -> int:
        return self._stamp.incarnation

    @property
    def connected(self) -> bool:
        return self._connection.connected

    def on_connection(self, callback: Callable[[bool], None]) -> None:
        self._connection.on_change(callback)

    async def publish(self, subject: str, body: object, *, trace: TraceContext | None = None) -> None:
        await self._connection.send(subject, self._stamp.encode(subject, body), _headers(trace))
        self._metrics.count_sent(subjects.family(subject))

    async def request(
        self, subject: str, body: object, *, timeout_s: float, trace: TraceContext | None = None
    ) -> object:
        loop = asyncio.get_running_loop()
        reply: asyncio.Future[Msg] = loop.create_future()
        # One timer, and no task, queue or generator: there are three of these to each client's request.
        timer = loop.call_later(timeout_s, _fail, reply, DeadlineError(_unanswered(subject, timeout_s)))
        with self._awaited(partial(_take_one, reply)) as token, self._observed(subject):
            try:
                await self._ask(subject, body, token, trace)
                message = await reply
            finally:
                timer.cancel()
            return _body_of(subject, message)

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
    ) -> "_NatsSubscription":
        runner = HandlerRunner(handler, concurrency_max, self._stamp, self._metrics, self._log)
        return await self._subscribed(subject, queue, pending_max, runner)

    async def follow(self, subject: str, take: Take, *, pending_max: int = 4096) -> "_NatsSubscription":
        return await self._subscribed(
            subject, "", pending_max, InOrderRunner(take, self._stamp, self._metrics, self._log)
        )

    async def flush(self, *, timeout_s: float) -> None:
        await self._connection.flush(timeout_s)

    async def close(self) -> None:
        """Let running handlers end (at most HANDLERS_CLOSE_S_MAX), send what is buffered, disconnect."""
        stops = [subscription.stop(HANDLERS_CLOSE_S_MAX) for subscription in tuple(self._subscriptions)]
        await asyncio.gather(*stops)
        await self._connection.close()

    async def _subscribed(
        self, subject: str, queue: str, pending_max: int, runner: Runner
    ) -> "_NatsSubscription":
        subscription = _NatsSubscription(
            subject, queue, pending_max, runner, self._respond, self._subscriptions.discard
        )
        self._subscriptions.add(subscription)
        try:
            await subscription.attach(self._connection.client)
        except CLIENT_ERRORS as error:
            if self.connected:
                self._subscriptions.discard(subscription)
                raise
            # The client is being replaced; the next one takes all subscriptions.
            self._log.warning("subscribed while the bus is down", subject=subject, error=error)
        return subscription

    async def _replies(
        self, subject: str, body: object, timeout_s: float, trace: TraceContext | None
    ) -> AsyncGenerator[object, None]:
        queue: asyncio.Queue[Msg] = asyncio.Queue(REPLIES_PENDING_MAX)
        with self._awaited(partial(self._queue_reply, queue)) as token:
            with self._observed(subject):
                await self._ask(subject, body, token, trace)
                reply = await self._next_reply(subject, queue, timeout_s)
            while True:
                yield reply
                reply = await self._next_reply(subject, queue, timeout_s)

    @contextlib.contextmanager
    def _awaited(self, take: Callable[[Msg], None]) -> Iterator[str]:
        """The token by which replies are told from others; within, `take` gets them."""
        self._next_token += 1
        token = str(self._next_token)
        self._waiting[token] = take
        try:
            yield token
        finally:
            del self._waiting[token]

    async def _ask(self, subject: str, body: object, token: str, trace: TraceContext | None) -> None:
        if not self.connected:
            raise DisconnectedError("the bus is disconnected")
        data = self._stamp.encode(subject, body)
        await self._connection.send(subject, data, _headers(trace), f"{self._inbox}.{token}")
        self._metrics.count_sent(subjects.family(subject))

    def _queue_reply(self, queue: "asyncio.Queue[Msg]", message: Msg) -> None:
        try:
            queue.put_nowait(message)
        except asyncio.QueueFull:
            self._metrics.bus_dropped.labels("reply", "overflow").inc()
            self._log.warning("message dropped", subject="reply", reason="overflow")

    @contextlib.contextmanager
    def _observed(self, subject: str) -> Iterator[None]:
        """Measure what runs within, until the first reply or error."""
        started_s = asyncio.get_running_loop().time()
        outcome = "error"
        try:
            yield
            outcome = "reply"
        except DeadlineError:
            outcome = "timeout"
            raise
        except NoResponderError:
            outcome = "no_responder"
            raise
        finally:
            elapsed_s = asyncio.get_running_loop().time() - started_s
            self._metrics.observe_request(subjects.family(subject), outcome, elapsed_s)

    async def _next_reply(self, subject: str, queue: "asyncio.Queue[Msg]", timeout_s: float) -> object:
        try:
            async with asyncio.timeout(timeout_s):
                message = await queue.get()
        except TimeoutError as error:
            raise DeadlineError(_unanswered(subject, timeout_s)) from error
        return _body_of(subject, message)

    async def _respond(self, reply_subject: str, data: bytes) -> None:
        await self._connection.send(reply_subject, data, None)

    async def _equip(self, client: DirectClient) -> None:
        self._inbox = client.new_inbox()
        inbox = await client.subscribe(f"{self._inbox}.*", cb=self._on_reply)
        client.take_directly(inbox, self._take_reply)
        for subscription in tuple(self._subscriptions):
            await subscription.attach(client)

    async def _on_reply(self, message: Msg) -> None:
        self._take_reply(message)

    def _take_reply(self, message: Msg) -> bool:
        take = self._waiting.get(message.subject.rpartition(".")[2])
        if take is not None:
            take(message)
        return True


class _NatsSubscription:
    """One subscription; outlives the client that carries it."""

    def __init__(
        self,
        subject: str,
        queue: str,
        pending_max: int,
        runner: Runner,
        respond: Callable[[str, bytes], Awaitable[None]],
        forget: Callable[["_NatsSubscription"], None],
    ) -> None:
        self._subject = subject
        self._queue = queue
        self._pending_max = pending_max
        self._runner = runner
        self._respond = respond
        self._forget = forget
        self._attached: ClientSubscription | None = None

    async def attach(self, client: DirectClient) -> None:
        self._attached = await client.subscribe(
            self._subject,
            self._queue,
            self._on_message,
            pending_msgs_limit=self._pending_max,
            pending_bytes_limit=SUBSCRIPTION_BYTES_MAX,
        )
        client.take_directly(self._attached, self._take_now)

    async def unsubscribe(self) -> None:
        await self.stop(None)

    async def stop(self, timeout_s: float | None) -> None:
        self._forget(self)
        if self._attached is not None:
            with contextlib.suppress(*CLIENT_ERRORS):
                await self._attached.unsubscribe()
        await self._runner.stop(timeout_s)

    async def _on_message(self, message: Msg) -> None:
        await self._runner.deliver(self._raw(message))

    def _take_now(self, message: Msg) -> bool:
        return self._runner.deliver_now(self._raw(message))

    def _raw(self, message: Msg) -> RawMessage:
        respond = partial(self._respond, message.reply) if message.reply else None
        headers = message.headers
        if not headers:
            return RawMessage(message.subject, message.data, None, respond)
        trace, client_id = headers.get(TRACE_HEADER), headers.get(CLIENT_ID_HEADER)
        return RawMessage(message.subject, message.data, trace, respond, client_id)


def _take_one(reply: "asyncio.Future[Msg]", message: Msg) -> None:
    if not reply.done():
        reply.set_result(message)


def _fail(reply: "asyncio.Future[Msg]", error: Exception) -> None:
    if not reply.done():
        reply.set_exception(error)


def _unanswered(subject: str, timeout_s: float) -> str:
    return f"no answer on {subject} within {timeout_s:g} s"


def _body_of(subject: str, message: Msg) -> object:
    if message.headers and message.headers.get("Status") == _NO_RESPONDERS:
        raise NoResponderError(f"nobody listens on {subject}")
    return read_reply(message.data)


def _headers(trace: TraceContext | None) -> bytes | None:
    """As NATS has them on the wire; neither value can hold a line's end."""
    if trace is None:
        return None
    lines = f"NATS/1.0\r\n{TRACE_HEADER}: {trace.traceparent()}\r\n"
    if trace.client_request_id:
        lines += f"{CLIENT_ID_HEADER}: {trace.client_request_id}\r\n"
    return f"{lines}\r\n".encode()
