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
from typing import Protocol

from cluster import subjects, wire
from cluster.bus import Handler, Received, Reply, Take
from cluster.errors import MoonpoolError, ProtocolError, RetryableError
from cluster.logs import Logger
from cluster.messages import HandlerFailed
from cluster.metrics import ServiceMetrics
from cluster.tracing import TraceContext, log_fields
from kvindex.core import InstanceId

SEQUENCES_MAX = 65_536
"""Subjects whose `seq` is remembered; the one longest unused starts again at 1."""

TAKEN_AT_ONCE_MAX = 64
"""Messages of one subscription that are taken in before others have their turn."""

TRACE_HEADER = "traceparent"
CLIENT_ID_HEADER = "x-request-id"

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
    client_request_id: str | None = None


class Runner(Protocol):
    """What a subscription gives its messages to, one after the other."""

    async def deliver(self, raw: RawMessage) -> None:
        """Return once the next one may come: waiting here is what keeps the rest in the queue."""

    def deliver_now(self, raw: RawMessage) -> bool:
        """The same without a wait. False, with nothing done, where it or one before it has to wait."""

    async def stop(self, timeout_s: float | None = None) -> None:
        """Begin no more; wait for what runs, then cancel what `timeout_s` did not end."""


class InOrderRunner:
    """Calls `take` with each message before the next one is looked at."""

    def __init__(self, take: Take, stamp: Stamp, metrics: ServiceMetrics, log: Logger) -> None:
        self._take = take
        self._stamp = stamp
        self._metrics = metrics
        self._log = log
        self._stopped = False
        self._taken = 0
        self._taken_in_turn = 0
        self._telling: set[asyncio.Task[None]] = set()
        """Answers to askers of what could not be taken."""

    async def deliver(self, raw: RawMessage) -> None:
        self._take_in(raw)
        self._taken += 1
        if self._taken % TAKEN_AT_ONCE_MAX == 0:
            await asyncio.sleep(0)

    def deliver_now(self, raw: RawMessage) -> bool:
        if self._taken_in_turn == 0:
            asyncio.get_running_loop().call_soon(self._end_turn)
        if self._taken_in_turn == TAKEN_AT_ONCE_MAX:
            return False
        self._taken_in_turn += 1
        self._take_in(raw)
        return True

    def _end_turn(self) -> None:
        self._taken_in_turn = 0

    def _take_in(self, raw: RawMessage) -> None:
        if self._stopped:
            return
        failed = self._failed(raw)
        if failed is not None and raw.respond is not None:
            telling = asyncio.create_task(self._tell(raw.respond, failed))
            self._telling.add(telling)
            telling.add_done_callback(self._telling.discard)

    async def _tell(self, respond: Respond, failed: HandlerFailed) -> None:
        with contextlib.suppress(MoonpoolError):
            await respond(self._stamp.encode_reply(failed, 1))

    async def stop(self, timeout_s: float | None = None) -> None:
        self._stopped = True

    def _failed(self, raw: RawMessage) -> HandlerFailed | None:
        received = _received(raw, self._metrics, self._log)
        if isinstance(received, HandlerFailed):
            return received
        try:
            self._take(received)
        except Exception as error:
            return _count_failure(received, error, self._metrics, self._log)
        return None


class HandlerRunner:
    """Runs one subscription's handler, at most `concurrency_max` at once, started in arrival order."""

    def __init__(
        self, handler: Handler, concurrency_max: int, stamp: Stamp, metrics: ServiceMetrics, log: Logger
    ) -> None:
        self._handler = handler
        self._concurrency_max = concurrency_max
        self._room = asyncio.Event()
        self._delivering = 0
        self._stamp = stamp
        self._metrics = metrics
        self._log = log
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopped = False

    async def deliver(self, raw: RawMessage) -> None:
        """Return once the handler has started: waiting here is what keeps the rest in the queue."""
        self._delivering += 1
        try:
            while len(self._tasks) >= self._concurrency_max:
                self._room.clear()
                await self._room.wait()
        finally:
            self._delivering -= 1
        self._start(raw)

    def deliver_now(self, raw: RawMessage) -> bool:
        if self._delivering or len(self._tasks) >= self._concurrency_max:
            return False
        self._start(raw)
        return True

    def _start(self, raw: RawMessage) -> None:
        if self._stopped:
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
        self._room.set()

    async def _run(self, raw: RawMessage) -> None:
        replies = await self._replies(raw)
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
        self._metrics.count_sent("reply")

    async def _replies(self, raw: RawMessage) -> tuple[object, ...] | AsyncGenerator[object, None]:
        received = _received(raw, self._metrics, self._log)
        if isinstance(received, HandlerFailed):
            return (received,)
        try:
            reply = await self._handler(received)
        except Exception as error:
            return (_count_failure(received, error, self._metrics, self._log),)
        if isinstance(reply, AsyncIterator):
            return self._made(reply, received)
        return _as_tuple(reply)

    async def _made(self, replies: AsyncIterator[object], received: Received) -> AsyncGenerator[object, None]:
        """The replies, and at the end that the handler has failed, if making one did."""
        try:
            async for reply in replies:
                yield reply
        except Exception as error:
            yield _count_failure(received, error, self._metrics, self._log)
        finally:
            if isinstance(replies, AsyncGenerator):
                await replies.aclose()


def _received(raw: RawMessage, metrics: ServiceMetrics, log: Logger) -> Received | HandlerFailed:
    """The message, counted; what its sender is told where it is malformed."""
    family = subjects.family(raw.subject)
    try:
        envelope, body = wire.decode(raw.data)
    except ProtocolError as error:
        metrics.bus_dropped.labels(family, "malformed").inc()
        log.warning("message dropped", subject=raw.subject, reason="malformed", error=error)
        return HandlerFailed(str(error))
    metrics.count_received(family)
    trace = None
    if raw.traceparent:
        trace = TraceContext.parse(raw.traceparent, raw.client_request_id or "")
    return Received(raw.subject, envelope, body, trace)


def _count_failure(
    received: Received, error: Exception, metrics: ServiceMetrics, log: Logger
) -> HandlerFailed:
    """What its sender is told of a message that could not be handled."""
    fields = {"subject": received.subject, "kind": received.envelope.kind, **log_fields(received.trace)}
    family = subjects.family(received.subject)
    if isinstance(error, ProtocolError):
        metrics.bus_dropped.labels(family, "refused").inc()
        log.warning("message dropped", reason="refused", error=error, **fields)
    else:
        metrics.bus_handler_failures.labels(family).inc()
        if isinstance(error, MoonpoolError):
            log.warning("handler failed", error=error, **fields)
        else:
            log.exception("handler failed", error, **fields)
    return HandlerFailed(f"{type(error).__name__}: {error}")


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
