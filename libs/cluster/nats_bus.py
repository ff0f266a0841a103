"""The bus over NATS: messages, replies and subscriptions on one `NatsConnection`.

Facts of nats-py that shape this file: callbacks of one subscription run one after the other, so each hands
its message to a bounded runner; with nobody listening the server answers a request with status 503.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator

from nats.aio.client import Client
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
        self._waiting: dict[str, asyncio.Queue[Msg]] = {}
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
        self._metrics.bus_sent.labels(subjects.family(subject)).inc()

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
        if not self.connected:
            raise DisconnectedError("the bus is disconnected")
        self._next_token += 1
        token = str(self._next_token)
        queue: asyncio.Queue[Msg] = asyncio.Queue(REPLIES_PENDING_MAX)
        self._waiting[token] = queue
        family = subjects.family(subject)
        try:
            with self._observed(family):
                data = self._stamp.encode(subject, body)
                await self._connection.send(subject, data, _headers(trace), f"{self._inbox}.{token}")
                self._metrics.bus_sent.labels(family).inc()
                reply = await self._next_reply(subject, queue, timeout_s)
            while True:
                yield reply
                reply = await self._next_reply(subject, queue, timeout_s)
        finally:
            del self._waiting[token]

    @contextlib.contextmanager
    def _observed(self, family: str) -> Iterator[None]:
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
            self._metrics.bus_request_s.labels(family, outcome).observe(elapsed_s)

    async def _next_reply(self, subject: str, queue: "asyncio.Queue[Msg]", timeout_s: float) -> object:
        try:
            async with asyncio.timeout(timeout_s):
                message = await queue.get()
        except TimeoutError as error:
            raise DeadlineError(f"no answer on {subject} within {timeout_s:g} s") from error
        if message.headers and message.headers.get("Status") == _NO_RESPONDERS:
            raise NoResponderError(f"nobody listens on {subject}")
        return read_reply(message.data)

    async def _respond(self, reply_subject: str, data: bytes) -> None:
        await self._connection.send(reply_subject, data, {})

    async def _equip(self, client: Client) -> None:
        self._inbox = client.new_inbox()
        await client.subscribe(f"{self._inbox}.*", cb=self._on_reply)
        for subscription in tuple(self._subscriptions):
            await subscription.attach(client)

    async def _on_reply(self, message: Msg) -> None:
        queue = self._waiting.get(message.subject.rpartition(".")[2])
        if queue is None:
            return
        try:
            queue.put_nowait(message)
        except asyncio.QueueFull:
            self._metrics.bus_dropped.labels("reply", "overflow").inc()
            self._log.warning("message dropped", subject="reply", reason="overflow")


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

    async def attach(self, client: Client) -> None:
        self._attached = await client.subscribe(
            self._subject,
            self._queue,
            self._on_message,
            pending_msgs_limit=self._pending_max,
            pending_bytes_limit=SUBSCRIPTION_BYTES_MAX,
        )

    async def unsubscribe(self) -> None:
        await self.stop(None)

    async def stop(self, timeout_s: float | None) -> None:
        self._forget(self)
        if self._attached is not None:
            with contextlib.suppress(*CLIENT_ERRORS):
                await self._attached.unsubscribe()
        await self._runner.stop(timeout_s)

    async def _on_message(self, message: Msg) -> None:
        respond = None
        if message.reply:
            reply_subject = message.reply

            async def respond(data: bytes) -> None:
                await self._respond(reply_subject, data)

        headers = message.headers or {}
        await self._runner.deliver(
            RawMessage(
                message.subject,
                message.data,
                headers.get(TRACE_HEADER),
                respond,
                headers.get(CLIENT_ID_HEADER),
            )
        )


def _headers(trace: TraceContext | None) -> dict[str, str]:
    if trace is None:
        return {}
    headers = {TRACE_HEADER: trace.traceparent()}
    if trace.client_request_id:
        headers[CLIENT_ID_HEADER] = trace.client_request_id
    return headers
