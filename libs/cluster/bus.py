"""The bus as every service sees it: publish, request, subscribe with typed messages.

Owns the interface; `cluster.nats_bus` is the real thing, `cluster.testing` the fake, and one contract
suite runs over both. Knows no subject and no message by name.
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from cluster.tracing import TraceContext
from cluster.wire import Envelope
from kvindex.core import InstanceId


@dataclass(frozen=True, slots=True)
class Received:
    """One message as a handler gets it. `body` is one of `cluster.messages.MESSAGE_KINDS`."""

    subject: str
    envelope: Envelope
    body: object
    trace: TraceContext | None


Reply = object | tuple[object, ...] | AsyncIterator[object] | None
Handler = Callable[[Received], Awaitable[Reply]]
"""What it returns is sent to the asker: a message, several in order, or nothing. Those of an iterator are
sent one by one, as they are made; it is closed in the end.

A handler that raises is logged and counted, and the asker gets HandlerFailed."""


Take = Callable[[Received], None]
"""One that raises is logged and counted."""


class Subscription(Protocol):
    async def unsubscribe(self) -> None:
        """No handler starts after this returns; those that run are finished first."""


class Bus(Protocol):
    """Every wait is bounded by a timeout; nothing is retried here."""

    @property
    def instance(self) -> InstanceId: ...

    @property
    def incarnation(self) -> int: ...

    @property
    def connected(self) -> bool: ...

    def on_connection(self, callback: Callable[[bool], None]) -> None:
        """Call `callback(connected)` in the event loop at each loss and each recovery."""

    async def publish(self, subject: str, body: object, *, trace: TraceContext | None = None) -> None:
        """Hand over to the connection; while it is down the message is buffered up to a bound.

        Raises DisconnectedError where the buffer is full, ProtocolError where the message is too large.
        """

    async def request(
        self, subject: str, body: object, *, timeout_s: float, trace: TraceContext | None = None
    ) -> object:
        """The body of the reply.

        Raises DeadlineError, NoResponderError, DisconnectedError, ProtocolError (malformed reply),
        RetryableError (the other side answered HandlerFailed).
        """

    def request_many(self, subject: str, body: object, *, timeout_s: float) -> AsyncIterator[object]:
        """Replies as they come, each awaited `timeout_s`; the caller stops when it has all.

        Raises as `request` does.
        """

    async def subscribe(
        self,
        subject: str,
        handler: Handler,
        *,
        queue: str = "",
        concurrency_max: int = 64,
        pending_max: int = 4096,
    ) -> Subscription:
        """Run `handler` on each message, at most `concurrency_max` at once; 1 keeps their order.

        More than `pending_max` waiting messages are dropped, counted and logged. Malformed ones too.
        """

    async def follow(self, subject: str, take: Take, *, pending_max: int = 4096) -> Subscription:
        """Have `take` called with each message as it comes, in their order; an asker hears only of a failure.

        For what is taken in without a wait: however many handlers run, it does not fall behind, where one
        of `concurrency_max` 1 has a turn of the event loop for each of its messages. Bounded as `subscribe`.
        """

    async def flush(self, *, timeout_s: float) -> None:
        """Return when the server has all that was published before."""

    async def close(self) -> None: ...
