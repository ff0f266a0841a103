"""All requests in progress at this gateway: admission, the stream of tokens, outages, draining.

Owns who is in progress and the subscription on `stream.<gateway>`; each request's own life is
`gateway.answers.running`'s. An entry of a request that is not in progress is answered as an ended one would:
its sender is told to finish or to cancel.
"""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from cluster import subjects
from cluster.bus import Bus, Received, Subscription
from cluster.errors import ProtocolError
from cluster.logs import Logger
from cluster.messages import (
    TOKEN_ID_BYTES,
    Cancel,
    Finish,
    FinishEntry,
    StreamBatch,
    TokensEntry,
)
from gateway.answers.notices import Notices
from gateway.answers.outbox import UnsentRoom
from gateway.answers.outcomes import OutcomeCounts
from gateway.answers.placing import Order
from gateway.answers.running import RequestLimits, RunningRequest
from gateway.api.api_errors import OVERLOADED, UNAVAILABLE, ApiError
from gateway.metrics import GatewayMetrics
from gateway.text.answer_text import AnswerText
from kvindex.core import InstanceId
from policy.core import Placement, RequestId
from protocol import answer
from protocol.answer import Answer, Event, Phase

STREAM_BATCHES_MAX = 65_536
"""Batches that may wait to be taken in; the bus drops and counts what is over it, resume fetches it."""
PLACEMENTS_ASKED_MAX = 64
SETTLE_S_MAX = 2.0
"""What notices under way get to arrive at close."""
DRAIN_SETTLE_S_MAX = 0.5
"""The same at the end of a drain, beyond its deadline."""


@dataclass(frozen=True, slots=True)
class GatewayLimits:
    """Bounds of the whole gateway. `requests_max`: requests in progress, being tokenised included.
    `placements_asked_max`: those that wait for a conductor's answer at once; a burst waits here, where each
    has its turn, and not at a conductor that would answer the last ones too late.
    `replacements_in_flight_max`: those that ask for another placement at once, so that a lost instance
    brings no storm; who asked first is first."""

    requests_max: int = 1024
    notice_timeout_s: float = 2.0
    placements_asked_max: int = PLACEMENTS_ASKED_MAX
    replacements_in_flight_max: int = 16
    request: RequestLimits = field(default_factory=RequestLimits)


class Requests:
    """`start` before the first request; `drain`, then `close`."""

    def __init__(self, bus: Bus, metrics: GatewayMetrics, log: Logger, limits: GatewayLimits) -> None:
        self._bus = bus
        self.outcomes = OutcomeCounts()
        self._metrics = metrics
        self._log = log
        self._limits = limits
        self._notices = Notices(bus, metrics, log, timeout_s=limits.notice_timeout_s)
        self._turns = asyncio.Semaphore(limits.placements_asked_max)
        self._replacing = asyncio.Semaphore(limits.replacements_in_flight_max)
        self._running: dict[RequestId, RunningRequest] = {}
        self._admitted = 0
        self._draining = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._subscription: Subscription | None = None

    @property
    def in_progress(self) -> int:
        return self._admitted

    async def start(self) -> None:
        # The entries of one sender must be taken in the order in which they came.
        self._subscription = await self._bus.follow(
            subjects.stream(self._bus.instance), self._receive, pending_max=STREAM_BATCHES_MAX
        )
        self._bus.on_connection(self._connection_changed)

    def check_room(self) -> None:
        """Raises ApiError where `admit` would: no body is read for that."""
        if self._draining:
            raise _shutting_down()
        if self._admitted >= self._limits.requests_max:
            message = f"{self._limits.requests_max} requests are in progress, which is this gateway's limit"
            raise ApiError(OVERLOADED, message, reason="gateway_full")

    @contextmanager
    def admit(self) -> Iterator[None]:
        """A place among the requests in progress, from when the body is there to the last byte of the
        answer: who sends slowly takes nobody's place. Raises ApiError where there is none."""
        self.check_room()
        self._admitted += 1
        self._idle.clear()
        self._metrics.in_progress.set(self._admitted)
        try:
            yield
        finally:
            self._admitted -= 1
            self._metrics.in_progress.set(self._admitted)
            if not self._admitted:
                self._idle.set()

    def room(self) -> UnsentRoom:
        """For the text that may wait for one client."""
        return UnsentRoom(self._limits.request.unsent_chars_max)

    @contextmanager
    def run(
        self,
        order: Order,
        text: AnswerText,
        *,
        arrived_at_s: float,
        room: UnsentRoom,
        ready: Callable[[], None],
        admitted: bool = False,
    ) -> Iterator[RunningRequest]:
        """The order's answer, begun; leaving the context in any way gives back all that it holds.

        `ready` is called when there is more to take from its outbox, whose text counts in `room`.
        `admitted`: another order was let in for this one too."""
        request = RunningRequest(
            order,
            text,
            self._bus,
            self._notices,
            self._metrics,
            self.outcomes,
            self._log,
            self._limits.request,
            self._turns,
            self._replacing,
            arrived_at_s=arrived_at_s,
            room=room,
            ready=ready,
        )
        self._running[order.request_id] = request
        try:
            request.take(answer.Begin(admitted))
            yield request
        finally:
            del self._running[order.request_id]
            request.close()

    async def drain(self, deadline_s: float) -> None:
        """Take nothing new and let what runs end; what is not done after `deadline_s` fails."""
        self._draining = True
        try:
            async with asyncio.timeout(deadline_s):
                await self._idle.wait()
        except TimeoutError:
            for request in list(self._running.values()):
                request.fail(_shutting_down())
        await self._notices.settle(DRAIN_SETTLE_S_MAX)

    async def close(self) -> None:
        self._draining = True
        for request in list(self._running.values()):
            request.fail(_shutting_down())
        if self._subscription is not None:
            await self._subscription.unsubscribe()
        await self._notices.settle(SETTLE_S_MAX)
        await self._notices.close()

    def instance_lost(self, instance: InstanceId) -> None:
        """An instance is gone for good; its requests are placed again, the oldest first."""
        for request in list(self._running.values()):
            request.take(answer.InstanceLost(instance))

    def _connection_changed(self, connected: bool) -> None:
        if connected:
            for request in list(self._running.values()):
                request.take(answer.Reconnected())

    def _receive(self, received: Received) -> None:
        batch = received.body
        if not isinstance(batch, StreamBatch):
            raise ProtocolError(f"{type(batch).__name__} on a gateway's stream")
        sender = received.envelope.sender
        for tokens in batch.tokens:
            if _well_formed(tokens):
                self._take(tokens.request_id, sender, answer.TokensCame(sender, tokens))
            else:
                self._malformed(sender, tokens)
        for finish in batch.finished:
            if finish.output_tokens >= 0:
                self._take(finish.request_id, sender, answer.FinishCame(sender, finish))
            else:
                self._malformed(sender, finish)
        for failed in batch.failed:
            self._take(failed.request_id, sender, answer.FailureCame(sender, failed))

    def _take(self, request_id: RequestId, sender: InstanceId, event: Event) -> None:
        request = self._running.get(request_id)
        if request is not None:
            request.take(event)
            return
        self._metrics.stray_entries.inc()
        _, effects = answer.step(_ended(request_id, sender), event, 0.0)
        for effect in effects:
            match effect:
                case answer.TellCancel(instances, attempt):
                    for instance in instances:
                        self._notices.send(instance, Cancel(request_id, attempt), None)
                case answer.TellFinish(instance, attempt, output_tokens):
                    self._notices.send(instance, Finish(request_id, attempt, output_tokens), None)

    def _malformed(self, sender: InstanceId, entry: TokensEntry | FinishEntry) -> None:
        self._metrics.stray_entries.inc()
        self._log.warning("stream entry dropped", sender=sender, request_id=entry.request_id)


def _ended(request_id: RequestId, sender: InstanceId) -> Answer:
    """An answer that we know nothing of any more: its sender counts as its decode, which keeps tokens
    until it hears that it may stop."""
    placement = Placement(request_id, 0, sender, sender)
    return Answer(request_id, phase=Phase.ENDED, placement=placement)


def _shutting_down() -> ApiError:
    return ApiError(UNAVAILABLE, "this gateway is shutting down", reason="draining")


def _well_formed(entry: TokensEntry) -> bool:
    """Whole token ids of the one answer that there is, from an index that exists."""
    return len(entry.token_ids) % TOKEN_ID_BYTES == 0 and entry.output_index >= 0 and entry.sample == 0
