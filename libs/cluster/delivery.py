"""What both buses, the real and the fake, do besides carrying messages.

Owns envelopes with their `seq` per subject, the decoding of what comes in, the bounded running of handlers,
and how those who wait for the connection are told. Knows no transport: raw bytes come in, a `respond`
callback goes out.
"""

import asyncio
import contextlib
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass

from cluster import subjects, wire
from cluster.bus import Handler, Received, Reply
from cluster.errors import MoonpoolError, ProtocolError, RetryableError
from cluster.logs import Logger
from cluster.messages import HandlerFailed
from cluster.metrics import ServiceMetrics
from cluster.tracing import TraceContext
from kvindex.core import InstanceId

SEQUENCES_MAX = 65_536
"""Subjects whose `seq` is remembered; the one longest unused starts again at 1."""

TRACE_HEADER = "traceparent"

Respond = Callable[[bytes], Awaitable[None]]


class Stamp:
    """Turns bodies into bytes under this instance's envelope."""

    def __init__(self, instance: InstanceId, incarnation: int) -> None:
        self.instance = instance
        self.incarnation = incarnation
        self._sequences: OrderedDict[str, int] = OrderedDict()

    def encode(self, subject: str, body: object) -> bytes:
        seq = self._sequences.pop(subject, 0) + 1
        self._sequences[subject] = seq
        if len(self._sequences) > SEQUENCES_MAX:
            self._sequences.popitem(last=False)
        return wire.encode(body, self.instance, self.incarnation, seq, time.time())

    def encode_reply(self, body: object, seq: int) -> bytes:
        """A reply subject is used once, so its sequence is just the place within the answer."""
        return wire.encode(body, self.instance, self.incarnation, seq, time.time())


@dataclass(frozen=True, slots=True)
class RawMessage:
    subject: str
    data: bytes
    traceparent: str | None
    respond: Respond | None
    """None where nobody waits for an answer."""


class HandlerRunner:
    """Runs one subscription's handler, at most `concurrency_max` at once, started in arrival order."""

    def __init__(
        self, handler: Handler, concurrency_max: int, stamp: Stamp, metrics: ServiceMetrics, log: Logger
    ) -> None:
        self._handler = handler
        self._places = asyncio.Semaphore(concurrency_max)
        self._stamp = stamp
        self._metrics = metrics
        self._log = log
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopped = False

    async def deliver(self, raw: RawMessage) -> None:
        """Return once the handler has started: waiting here is what keeps the rest in the queue."""
        await self._places.acquire()
        if self._stopped:
            self._places.release()
            return
        task = asyncio.create_task(self._run(raw))
        self._tasks.add(task)
        task.add_done_callback(self._done)

    async def stop(self, timeout_s: float | None = None) -> None:
        """Start no more handlers; wait for those that run, then cancel what `timeout_s` did not end."""
        self._stopped = True
        running = self._tasks - {asyncio.current_task()}
        if not running:
            return
        _, late = await asyncio.wait(running, timeout=timeout_s)
        for task in late:
            task.cancel()
        if late:
            await asyncio.wait(late)

    def _done(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        self._places.release()

    async def _run(self, raw: RawMessage) -> None:
        replies = await self._replies(raw, subjects.family(raw.subject))
        if raw.respond is None:
            return
        try:
            if isinstance(replies, tuple):
                for seq, reply in enumerate(replies, 1):
                    await self._respond(raw.respond, reply, seq)
            else:
                await self._respond_one_by_one(raw.respond, replies)
        except RetryableError as error:
            self._log.warning("reply not sent", subject=raw.subject, error=error)
        except Exception as error:
            self._log.exception("reply not sent", error, subject=raw.subject)
            with contextlib.suppress(MoonpoolError):
                await self._respond(raw.respond, HandlerFailed(f"the reply could not be sent: {error}"), 1)

    async def _respond_one_by_one(self, respond: Respond, replies: AsyncGenerator[object, None]) -> None:
        seq = 0
        async with contextlib.aclosing(replies):
            async for reply in replies:
                seq += 1
                await self._respond(respond, reply, seq)
                # Neither to make nor to send one need take a wait, and others are to have their turn.
                await asyncio.sleep(0)

    async def _respond(self, respond: Respond, reply: object, seq: int) -> None:
        await respond(self._stamp.encode_reply(reply, seq))
        self._metrics.bus_sent.labels("reply").inc()

    async def _replies(
        self, raw: RawMessage, family: str
    ) -> tuple[object, ...] | AsyncGenerator[object, None]:
        try:
            envelope, body = wire.decode(raw.data)
        except ProtocolError as error:
            self._metrics.bus_dropped.labels(family, "malformed").inc()
            self._log.warning("message dropped", subject=raw.subject, reason="malformed", error=error)
            return (HandlerFailed(str(error)),)
        self._metrics.bus_received.labels(family).inc()
        trace = TraceContext.parse(raw.traceparent) if raw.traceparent else None
        try:
            reply = await self._handler(Received(raw.subject, envelope, body, trace))
        except Exception as error:
            return (self._failed(raw.subject, family, envelope.kind, error),)
        if isinstance(reply, AsyncIterator):
            return self._made(reply, raw.subject, family, envelope.kind)
        return _as_tuple(reply)

    async def _made(
        self, replies: AsyncIterator[object], subject: str, family: str, kind: str
    ) -> AsyncGenerator[object, None]:
        """The replies, and at the end that the handler has failed, if making one did."""
        try:
            async for reply in replies:
                yield reply
        except Exception as error:
            yield self._failed(subject, family, kind, error)
        finally:
            if isinstance(replies, AsyncGenerator):
                await replies.aclose()

    def _failed(self, subject: str, family: str, kind: str, error: Exception) -> HandlerFailed:
        self._log_failure(subject, family, kind, error)
        return HandlerFailed(f"{type(error).__name__}: {error}")

    def _log_failure(self, subject: str, family: str, kind: str, error: Exception) -> None:
        if isinstance(error, ProtocolError):
            self._metrics.bus_dropped.labels(family, "refused").inc()
            self._log.warning("message dropped", subject=subject, kind=kind, reason="refused", error=error)
            return
        self._metrics.bus_handler_failures.labels(family).inc()
        if isinstance(error, MoonpoolError):
            self._log.warning("handler failed", subject=subject, kind=kind, error=error)
        else:
            self._log.exception("handler failed", error, subject=subject, kind=kind)


def tell_connection(callbacks: Iterable[Callable[[bool], None]], connected: bool, log: Logger) -> None:
    """Tell everyone, whatever one of them makes of it."""
    for callback in callbacks:
        try:
            callback(connected)
        except Exception as error:
            log.exception("connection callback failed", error)


def read_reply(data: bytes) -> object:
    """The body of a reply. ProtocolError where it is malformed, RetryableError for HandlerFailed."""
    _, body = wire.decode(data)
    if isinstance(body, HandlerFailed):
        raise RetryableError(f"the other side failed: {body.detail}")
    return body


def _as_tuple(reply: Reply) -> tuple[object, ...]:
    if reply is None:
        return ()
    return reply if isinstance(reply, tuple) else (reply,)
