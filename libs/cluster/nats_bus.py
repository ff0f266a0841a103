"""The bus over NATS.

Owns the connection and its recovery, the inbox for replies, and the bounds on what waits. Facts of
nats-py that shape this file: callbacks of one subscription run one after the other; what is published
while disconnected is kept and sent late; a server's `-ERR` closes the client for good, so a client that
closed by itself is replaced by a new one; `max_payload` counts the headers too, and a message over it
costs the connection.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription as ClientSubscription

from cluster import subjects
from cluster.bus import Handler
from cluster.delivery import TRACE_HEADER, HandlerRunner, RawMessage, Stamp, read_reply
from cluster.errors import DeadlineError, DisconnectedError, NoResponderError, ProtocolError
from cluster.logs import Logger, without_credentials
from cluster.metrics import ServiceMetrics
from cluster.tracing import TraceContext
from kvindex.core import InstanceId

CONNECT_S_MAX = 2
RECONNECT_WAIT_S = 0.2
PING_INTERVAL_S = 5
PINGS_UNANSWERED_MAX = 2
"""A silent connection counts as lost after about (1 + PINGS_UNANSWERED_MAX) · PING_INTERVAL_S."""
BUFFERED_BYTES_MAX = 8 * 1024 * 1024
"""What publishes may leave waiting for the connection, while it is down or slow."""
FLUSH_S_MAX = 5.0
HEADER_BYTES_MAX = 256
"""Room for our one header within the server's max_payload."""
REPLIES_PENDING_MAX = 4096
SUBSCRIPTION_BYTES_MAX = 64 * 1024 * 1024
HANDLERS_CLOSE_S_MAX = 5.0

_NO_RESPONDERS = "503"
_CLIENT_ERRORS = (nats.errors.Error, OSError, asyncio.TimeoutError)


class NatsBus:
    """Implements `cluster.bus.Bus`; make one with `connect`."""

    def __init__(
        self,
        urls: Sequence[str],
        instance: InstanceId,
        incarnation: int,
        metrics: ServiceMetrics,
        log: Logger,
    ) -> None:
        self._urls = list(urls)
        self._metrics = metrics
        self._log = log
        self._stamp = Stamp(instance, incarnation)
        self._client = Client()
        self._inbox = ""
        self._waiting: dict[str, asyncio.Queue[Msg]] = {}
        self._next_token = 0
        self._subscriptions: set[_NatsSubscription] = set()
        self._callbacks: list[Callable[[bool], None]] = []
        self._connected = False
        self._opening = False
        self._closing = False
        self._reopening: asyncio.Task[None] | None = None

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
        """A connected bus. `url` may be several, separated by commas, carry
        `user:password@` and ask for TLS with `tls://`.

        Raises DisconnectedError where no server answers within `timeout_s`.
        """
        bus = cls(url.split(","), instance, incarnation, metrics, log)
        try:
            await asyncio.wait_for(bus._open(), timeout_s)
        except _CLIENT_ERRORS as error:
            await bus.close()
            place = without_credentials(url)
            raise DisconnectedError(f"no NATS server answers at {place} within {timeout_s:g} s") from error
        return bus

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

    async def publish(self, subject: str, body: object, *, trace: TraceContext | None = None) -> None:
        await self._send(subject, self._stamp.encode(subject, body), trace)
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
        subscription = _NatsSubscription(
            subject, queue, pending_max, runner, self._respond, self._subscriptions.discard
        )
        self._subscriptions.add(subscription)
        try:
            await subscription.attach(self._client)
        except nats.errors.ConnectionClosedError:
            # The client is being replaced; the new one takes all subscriptions.
            self._log.warning("subscribed while the bus is down", subject=subject)
        return subscription

    async def flush(self, *, timeout_s: float) -> None:
        if not self._connected:
            raise DisconnectedError("the bus is disconnected")
        try:
            await asyncio.wait_for(self._client.flush(), timeout_s)
        except TimeoutError as error:
            raise DeadlineError(f"the bus did not answer a flush within {timeout_s:g} s") from error
        except _CLIENT_ERRORS as error:
            raise DisconnectedError(f"the bus is disconnected: {error}") from error

    async def close(self) -> None:
        """Let running handlers end (at most HANDLERS_CLOSE_S_MAX), send what is buffered, disconnect."""
        self._closing = True
        if self._reopening is not None:
            self._reopening.cancel()
        stops = [subscription.stop(HANDLERS_CLOSE_S_MAX) for subscription in tuple(self._subscriptions)]
        await asyncio.gather(*stops)
        with contextlib.suppress(*_CLIENT_ERRORS):
            await asyncio.wait_for(self._client.close(), CONNECT_S_MAX)
        self._set_connected(False)

    async def _replies(
        self, subject: str, body: object, timeout_s: float, trace: TraceContext | None
    ) -> AsyncGenerator[object, None]:
        if not self._connected:
            raise DisconnectedError("the bus is disconnected")
        family = subjects.family(subject)
        loop = asyncio.get_running_loop()
        self._next_token += 1
        token = str(self._next_token)
        queue: asyncio.Queue[Msg] = asyncio.Queue(REPLIES_PENDING_MAX)
        self._waiting[token] = queue
        started_s = loop.time()
        outcome = "error"
        observed = False
        try:
            data = self._stamp.encode(subject, body)
            await self._send(subject, data, trace, f"{self._inbox}.{token}")
            self._metrics.bus_sent.labels(family).inc()
            while True:
                reply = await self._next_reply(subject, queue, timeout_s)
                outcome = "reply"
                if not observed:
                    observed = True
                    self._observe(family, outcome, loop.time() - started_s)
                yield reply
        except DeadlineError:
            outcome = "timeout"
            raise
        except NoResponderError:
            outcome = "no_responder"
            raise
        finally:
            del self._waiting[token]
            if not observed:
                self._observe(family, outcome, loop.time() - started_s)

    def _observe(self, family: str, outcome: str, elapsed_s: float) -> None:
        self._metrics.bus_request_s.labels(family, outcome).observe(elapsed_s)

    async def _next_reply(self, subject: str, queue: "asyncio.Queue[Msg]", timeout_s: float) -> object:
        try:
            message = await asyncio.wait_for(queue.get(), timeout_s)
        except TimeoutError as error:
            raise DeadlineError(f"no answer on {subject} within {timeout_s:g} s") from error
        if message.headers and message.headers.get("Status") == _NO_RESPONDERS:
            raise NoResponderError(f"nobody listens on {subject}")
        return read_reply(message.data)

    async def _send(self, subject: str, data: bytes, trace: TraceContext | None, reply: str = "") -> None:
        payload_bytes_max = self._client.max_payload - HEADER_BYTES_MAX
        if len(data) > payload_bytes_max:
            raise ProtocolError(
                f"message of {len(data)} bytes on {subject}: the limit is {payload_bytes_max}"
            )
        headers = {TRACE_HEADER: trace.traceparent()} if trace else None
        try:
            await self._client.publish(subject, data, reply, headers)
        except nats.errors.OutboundBufferLimitError as error:
            raise DisconnectedError(
                f"the bus is disconnected and {BUFFERED_BYTES_MAX} bytes are waiting already"
            ) from error
        except _CLIENT_ERRORS as error:
            raise DisconnectedError(f"the bus is disconnected: {error}") from error

    async def _respond(self, reply_subject: str, data: bytes) -> None:
        await self._send(reply_subject, data, None)

    async def _open(self) -> None:
        """Connect a fresh client and give it the inbox and all subscriptions."""
        client = Client()
        self._client = client
        self._opening = True
        try:
            await client.connect(
                self._urls,
                name=self._stamp.instance,
                error_cb=self._on_error,
                disconnected_cb=self._on_disconnected,
                reconnected_cb=self._on_reconnected,
                closed_cb=self._on_closed,
                connect_timeout=CONNECT_S_MAX,
                reconnect_time_wait=RECONNECT_WAIT_S,  # type: ignore[arg-type]  # any number will do
                max_reconnect_attempts=-1,
                ping_interval=PING_INTERVAL_S,
                max_outstanding_pings=PINGS_UNANSWERED_MAX,
                pending_size=BUFFERED_BYTES_MAX,
                flush_timeout=FLUSH_S_MAX,
            )
            self._inbox = client.new_inbox()
            await client.subscribe(f"{self._inbox}.*", cb=self._on_reply)
            for subscription in tuple(self._subscriptions):
                await subscription.attach(client)
        except BaseException:
            await client.close()
            raise
        finally:
            self._opening = False
        self._set_connected(True)

    async def _reopen(self) -> None:
        while not self._connected:
            try:
                await self._open()
            except _CLIENT_ERRORS as error:
                self._log.warning("bus not reopened yet", error=error)
                await asyncio.sleep(RECONNECT_WAIT_S)

    async def _on_reply(self, message: Msg) -> None:
        queue = self._waiting.get(message.subject.rpartition(".")[2])
        if queue is None:
            return
        try:
            queue.put_nowait(message)
        except asyncio.QueueFull:
            self._metrics.bus_dropped.labels("reply", "overflow").inc()
            self._log.warning("message dropped", subject="reply", reason="overflow")

    async def _on_error(self, error: Exception) -> None:
        if isinstance(error, nats.errors.SlowConsumerError):
            self._metrics.bus_dropped.labels(subjects.family(error.subject), "overflow").inc()
            self._log.warning("message dropped", subject=error.subject, reason="overflow")
        else:
            self._log.warning("bus error", error=error)

    async def _on_disconnected(self) -> None:
        self._set_connected(False)

    async def _on_reconnected(self) -> None:
        self._set_connected(True)

    async def _on_closed(self) -> None:
        self._set_connected(False)
        if not self._closing and not self._opening:
            self._log.error("the bus closed the connection; opening another")
            self._reopening = asyncio.create_task(self._reopen())

    def _set_connected(self, connected: bool) -> None:
        self._metrics.bus_connected.set(connected)
        if connected == self._connected:
            return
        self._connected = connected
        if not connected and not self._closing:
            self._metrics.bus_connection_losses.inc()
            self._log.warning("bus disconnected")
        for callback in self._callbacks:
            callback(connected)


class _NatsSubscription:
    """One subscription; outlives the client that carries it."""

    def __init__(
        self,
        subject: str,
        queue: str,
        pending_max: int,
        runner: HandlerRunner,
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
            with contextlib.suppress(*_CLIENT_ERRORS):
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
            RawMessage(message.subject, message.data, headers.get(TRACE_HEADER), respond)
        )
