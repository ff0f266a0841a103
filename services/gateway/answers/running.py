"""One request in progress: carries out what `protocol.answer` decides.

Owns the tokens delivered so far, the deadline and the questions under way (a placement or a submit, and a
resume). Decides nothing about attempts; how tokens become text is `gateway.answers.delivery`'s. Knows no
HTTP.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import assert_never

from cluster.bus import Bus
from cluster.logs import Logger
from cluster.messages import TOKEN_ID_BYTES, Cancel, Finish
from gateway.answers import placing
from gateway.answers.delivery import Delivery
from gateway.answers.notices import Notices
from gateway.answers.outbox import Ending, Outbox, UnsentRoom
from gateway.answers.outcomes import AnswerTimes, OutcomeCounts
from gateway.answers.placing import Order, conductors_busy
from gateway.api.api_errors import CLIENT_TOO_SLOW, INTERNAL, ApiError, of_failure
from gateway.metrics import TTFT, GatewayMetrics
from gateway.text.answer_text import AnswerText
from gateway.text_model import unpack_token_ids
from policy.core import FinishReason
from protocol import answer
from protocol.answer import Answer, Effect, Event

PLACE_AGAIN_BACKOFF_S = 0.05
PLACE_AGAIN_BACKOFF_S_MAX = 1.0


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Bounds of one request. `unsent_chars_max`: text that may wait for a slow client."""

    request_timeout_s: float = 600.0
    schedule_timeout_s: float = 5.0
    submit_timeout_s: float = 5.0
    unsent_chars_max: int = 1_000_000
    placement_attempts_max: int = answer.PLACEMENT_ATTEMPTS_MAX


class _Question:
    """At most one question under way; a new one replaces it, its answer would be out of date."""

    def __init__(self, answered: Callable[[Event | Exception | None], None]) -> None:
        self._answered = answered
        self._task: asyncio.Task[None] | None = None

    def ask(self, question: Callable[[], Awaitable[Event | None]]) -> None:
        self.stop()
        self._task = asyncio.create_task(self._run(question))

    def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            self._task = None

    async def _run(self, question: Callable[[], Awaitable[Event | None]]) -> None:
        outcome: Event | Exception | None
        try:
            outcome = await question()
        except Exception as error:
            outcome = error
        # From here on it is no longer under way: the answer may ask the next question.
        self._task = None
        self._answered(outcome)


class RunningRequest:
    """`take` an event; read `outbox`, whose `ready` is called when there is more to take. Everything happens
    on the event loop's thread."""

    def __init__(
        self,
        order: Order,
        text: AnswerText,
        bus: Bus,
        notices: Notices,
        metrics: GatewayMetrics,
        outcomes: OutcomeCounts,
        log: Logger,
        limits: RequestLimits,
        turns: asyncio.Semaphore,
        replacing: asyncio.Semaphore,
        *,
        arrived_at_s: float,
        room: UnsentRoom,
        ready: Callable[[], None],
    ) -> None:
        """`turns` is shared by all requests and held while one asks for its first placement, `replacing`
        while one asks for another; `room` is shared by all answers to one client.

        `arrived_at_s`: when the client's request came, by the event loop's clock.
        """
        self.order = order
        self.outbox = Outbox(room, ready)
        self.state = Answer(
            order.request_id, attempts_max=limits.placement_attempts_max, sampling=order.sampling
        )
        self._delivery = Delivery(
            text,
            self.outbox,
            stopped=lambda output_tokens: self.take(answer.StopMatched(output_tokens)),
            overflowed=lambda: self.fail(_too_slow(room)),
            broken=self._break,
        )
        self._bus = bus
        self._notices = notices
        self._metrics = metrics
        self._outcomes = outcomes
        self._times = AnswerTimes()
        self._log = log
        self._limits = limits
        self._turns = turns
        self._replacing = replacing
        self._loop = asyncio.get_running_loop()
        self._arrived_at_s = arrived_at_s
        self._deadline_at_s = arrived_at_s + limits.request_timeout_s
        self._deadline = self._loop.call_at(self._deadline_at_s, self.take, answer.DeadlinePassed())
        # A resume may be asked while a submit is still unanswered: its tokens overtook the answer.
        self._asking = _Question(self._answered)
        self._resuming = _Question(self._answered)
        self._output_token_ids = bytearray()
        self._first_attempt: int | None = None
        """The one that brought the first token."""
        self._cached_tokens = 0
        self._delivered_at_s: float | None = None
        self._asked_at_s: float | None = None
        """When the placement was asked for whose first token has not come yet."""

    @property
    def accepted(self) -> bool:
        """A prefill has taken it on, or tokens have come: what fails now is no refusal any more."""
        return self.state.phase is answer.Phase.RUNNING or self.state.next_index > 0

    def take(self, event: Event) -> None:
        """What happened, for the machine; its effects are carried out, in order, before this returns,
        questions and notices being started. A bug on the way ends this request and harms no other."""
        try:
            self.state, effects = answer.step(self.state, event, self._loop.time())
            for effect in effects:
                self._carry_out(effect)
        except Exception as error:
            self._break(error)

    def fail(self, error: ApiError) -> None:
        """End it for a reason of the gateway's own: all instances are told, the client gets `error`."""
        self.take(answer.ClientGone())
        self.outbox.end(error)

    def stop(self) -> None:
        """The answer is complete with the tokens that came so far."""
        self.take(answer.StopMatched(self.state.next_index))

    def close(self) -> None:
        """The client has all it will get, or is gone. Whatever still runs elsewhere is cancelled."""
        if not self.outbox.ended:
            self._metrics.client_gone.inc()
        self.take(answer.ClientGone())
        self._deadline.cancel()
        self._asking.stop()
        self._resuming.stop()
        self._delivery.close()
        self.outbox.close()

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case answer.AskPlacement():
                self._asking.ask(lambda: self._place(effect))
            case answer.SubmitTo():
                self._asking.ask(lambda: self._submit(effect))
            case answer.Deliver():
                self._deliver(effect)
            case answer.TellFinish(instance, attempt, output_tokens):
                finish = Finish(self.order.request_id, attempt, output_tokens)
                self._notices.send(instance, finish, self.order.trace)
            case answer.TellCancel(instances, attempt):
                for instance in instances:
                    cancel = Cancel(self.order.request_id, attempt)
                    self._notices.send(instance, cancel, self.order.trace)
            case answer.AskResume():
                self._resuming.ask(lambda: self._resume(effect))
            case answer.Complete(reason, output_tokens):
                self._complete(reason, output_tokens)
            case answer.Fail():
                self._outcomes.failed(self._times)
                self._delivery.end(of_failure(effect, self.order.structure_param))
            case _:
                assert_never(effect)

    def _deliver(self, tokens: answer.Deliver) -> None:
        self._measure(len(tokens.token_ids) // TOKEN_ID_BYTES)
        self._output_token_ids += tokens.token_ids
        if self._first_attempt is None:
            self._first_attempt = self.state.attempt
        if self.state.attempt == self._first_attempt:
            # A later attempt finds more in the pool: what the client's prompt itself has left there.
            self._cached_tokens = max(self._cached_tokens, tokens.cached_tokens)
        self._delivery.deliver(unpack_token_ids(tokens.token_ids), tokens.logprobs)

    def _complete(self, reason: FinishReason, output_tokens: int) -> None:
        self._outcomes.ended(self._times)
        self._delivery.end(Ending(reason, self.order.prompt.tokens, output_tokens, self._cached_tokens))

    def _measure(self, tokens: int) -> None:
        now_s = self._loop.time()
        placement = self.state.placement
        waited_s = 0.0 if self._asked_at_s is None else now_s - self._asked_at_s
        if self._asked_at_s is not None and placement is not None:
            predicted_s = placement.predicted_ttft_ms / 1e3
            self._metrics.prediction_errors.observe(TTFT, predicted_s, waited_s)
        self._asked_at_s = None
        if self._delivered_at_s is None:
            if not self.state.admitted:
                self._metrics.ttft_s.observe(now_s - self._arrived_at_s)
            self._times.first(placement, waited_s)
        else:
            self._metrics.token_gap_s.observe(now_s - self._delivered_at_s)
            self._times.next(now_s - self._delivered_at_s, tokens)
        self._delivered_at_s = now_s

    async def _place(self, ask: answer.AskPlacement) -> Event:
        if not ask.backoff:
            return await self._place_in_turn(ask)
        backoff_s = min(PLACE_AGAIN_BACKOFF_S * 2**ask.attempt, PLACE_AGAIN_BACKOFF_S_MAX)
        await asyncio.sleep(backoff_s * random.uniform(0.5, 1.0))
        async with self._replacing:
            return await self._ask_placement(ask)

    async def _place_in_turn(self, ask: answer.AskPlacement) -> Event:
        try:
            async with asyncio.timeout(self._limits.schedule_timeout_s):
                await self._turns.acquire()
        except TimeoutError:
            return answer.NotPlaced(conductors_busy(self.order, ask.attempt))
        try:
            return await self._ask_placement(ask)
        finally:
            self._turns.release()

    async def _ask_placement(self, ask: answer.AskPlacement) -> Event:
        self._metrics.placements.inc()
        self._asked_at_s = self._loop.time()
        question = placing.schedule_request(
            self.order,
            ask,
            bytes(self._output_token_ids),
            waited_s=self._asked_at_s - self._arrived_at_s,
            deadline_s=self._seconds_left(),
        )
        return await placing.ask_placement(
            self._bus, question, self.order.trace, self._limits.schedule_timeout_s
        )

    async def _submit(self, submit: answer.SubmitTo) -> Event:
        return await placing.submit(
            self._bus,
            self.order,
            submit.placement,
            bytes(self._output_token_ids),
            gateway=self._bus.instance,
            deadline_s=self._seconds_left(),
            waited_s=0.0 if self._asked_at_s is None else self._loop.time() - self._asked_at_s,
            timeout_s=self._limits.submit_timeout_s,
        )

    async def _resume(self, ask: answer.AskResume) -> Event | None:
        return await placing.resume(self._bus, self.order, ask, self._limits.submit_timeout_s)

    def _answered(self, outcome: Event | Exception | None) -> None:
        if isinstance(outcome, Exception):
            self._break(outcome)
        elif outcome is not None:
            self.take(outcome)

    def _break(self, error: Exception) -> None:
        order = self.order
        self._log.exception("request failed", error, request_id=order.request_id, **order.trace.log_fields())
        self.outbox.end(ApiError(INTERNAL, "the gateway failed; see its log by the request id"))
        if self.state.phase is not answer.Phase.ENDED:
            self.take(answer.ClientGone())

    def _seconds_left(self) -> float:
        return max(0.0, self._deadline_at_s - self._loop.time())


def _too_slow(room: UnsentRoom) -> ApiError:
    return ApiError(CLIENT_TOO_SLOW, f"more than {room.chars_max} characters wait for the client to read")
