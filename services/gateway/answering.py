"""Writing answers to their client: whole, or as a stream of server-sent events.

Owns the client's connection while answers go out. What the events hold is `gateway.answer_forms`'s, where
answers come from is `gateway.answers.choices`'s.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from aiohttp import web

from gateway.answer_forms import DONE, KEEP_ALIVE, AnswerForm, Delta, Whole, error_event
from gateway.answers.choices import ChoicePiece, Choices
from gateway.answers.outbox import Ending, Piece
from gateway.api.api_errors import TOO_LARGE, ApiError
from gateway.calls import Call, Calls, ClientGoneError
from gateway.text.token_log import LoggedToken
from gateway.text.tool_calls import Spoken, ToolParser, ToolPiece, joined
from policy.core import FinishReason

STREAM_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}
WHOLE_HEADERS = {"Content-Type": "application/json"}
WRITE_BYTES = 64 * 1024
"""Of a whole answer at once: a client that goes on reading has time for each."""
WHOLE_CHARS_MAX = 64 * 1024 * 1024
"""Of all answers to a request that is not streamed, counted as in `outbox.chars_of`: with twenty logprobs a
token, some 50,000 tokens."""
FORMED_AT_ONCE_CHARS_MAX = 64 * 1024
"""Larger ones become JSON on a thread: on the event loop it would take milliseconds."""


class Voice:
    """What one answer says, as it is told to the client: words, and calls where tools may be called."""

    def __init__(self, parser: ToolParser | None) -> None:
        self._parser = parser

    def say(self, piece: Piece) -> tuple[ToolPiece, ...]:
        if self._parser is None:
            return (Spoken(piece.text),) if piece.text else ()
        said = self._parser.feed(piece.text)
        return said if piece.ending is None else said + self._parser.finish()

    @property
    def complete(self) -> bool:
        """Nothing that follows would be told."""
        return self._parser is not None and self._parser.complete

    def finish_reason(self, reason: FinishReason) -> str:
        return reason if self._parser is None else self._parser.finish_reason(reason)


@dataclass(slots=True)
class _Collected:
    said: list[ToolPiece] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logged: list[LoggedToken] = field(default_factory=list)
    finish_reason: str = ""

    def whole(self) -> Whole:
        return Whole(joined(self.said), self.token_ids, self.logged, self.finish_reason)


class _Pulse:
    """Calls `fire` whenever nothing was written for `interval_s`; one timer, however much is written."""

    def __init__(self, interval_s: float, fire: Callable[[], None]) -> None:
        self._interval_s = interval_s
        self._fire = fire
        self._loop = asyncio.get_running_loop()
        self._written_at_s = self._loop.time()
        self._timer = self._loop.call_later(interval_s, self._check)

    def written(self) -> None:
        self._written_at_s = self._loop.time()

    def stop(self) -> None:
        self._timer.cancel()

    def _check(self) -> None:
        silent_s = self._loop.time() - self._written_at_s
        if silent_s >= self._interval_s:
            self._fire()
            silent_s = 0.0
        self._timer = self._loop.call_later(self._interval_s - silent_s, self._check)


@dataclass(frozen=True, slots=True)
class Reply:
    """What is to be written for one call: each answer of `choices`, by its number, in its voice."""

    call: Call
    choices: Choices
    form: AnswerForm
    voices: Sequence[Voice]

    def say(self, each: ChoicePiece) -> tuple[ToolPiece, ...]:
        self.call.answered(len(each.piece.token_ids))
        voice = self.voices[each.choice]
        said = voice.say(each.piece)
        if voice.complete and each.piece.ending is None:
            self.choices.stop(each.choice)
        return said

    def finish(self, index: int, ending: Ending) -> str:
        """Why the answer ended, as the client is told."""
        reason = self.voices[index].finish_reason(ending.reason)
        self.call.finish_reasons.append(reason)
        return reason


class Answering:
    def __init__(self, calls: Calls, *, write_timeout_s: float, keep_alive_s: float) -> None:
        """`write_timeout_s`: what one write may wait for a client that does not read. `keep_alive_s`: a
        stream that has nothing to say for so long says so."""
        self._calls = calls
        self._write_timeout_s = write_timeout_s
        self._keep_alive_s = keep_alive_s

    async def whole(self, http: web.Request, reply: Reply) -> web.StreamResponse:
        """Written here and not by the server: until a client has all of it, it counts as in progress."""
        choices = reply.choices
        collected = [_Collected() for _ in reply.voices]
        chars = 0
        while not choices.ended:
            for each in await choices.take():
                chars += each.piece.chars
                if chars > WHOLE_CHARS_MAX:
                    raise _too_large()
                one = collected[each.choice]
                one.said += reply.say(each)
                one.token_ids += each.piece.token_ids
                one.logged += each.piece.logged
                if each.piece.ending is not None:
                    one.finish_reason = reply.finish(each.choice, each.piece.ending)
        reply.call.usage = choices.usage
        reply.call.settle()
        form, answers, usage = reply.form, [one.whole() for one in collected], choices.usage
        if chars <= FORMED_AT_ONCE_CHARS_MAX:
            body = memoryview(form.whole(answers, usage))
        else:
            body = memoryview(await asyncio.to_thread(form.whole, answers, usage))
        headers = WHOLE_HEADERS | reply.call.headers()
        if len(body) <= WRITE_BYTES:
            # Head and body in one write.
            response: web.StreamResponse = web.Response(body=bytes(body), headers=headers)
            await response.prepare(http)
            await self._write(http, response.write_eof())
            return response
        response = web.StreamResponse(headers=headers)
        response.content_length = len(body)
        await response.prepare(http)
        for begin in range(0, len(body), WRITE_BYTES):
            await self._write(http, response.write(bytes(body[begin : begin + WRITE_BYTES])))
        await self._write(http, response.write_eof())
        return response

    async def stream(self, http: web.Request, reply: Reply) -> web.StreamResponse:
        """Nothing is sent before there is something to say, so that a refusal can still have its own status.
        Only where that takes longer than a stream may be silent, and all that has begun was taken on by a
        prefill, the status is sent as 200 before the first token: what fails then is an error event."""
        choices = reply.choices
        pulse = _Pulse(self._keep_alive_s, choices.nudge)
        try:
            pieces = await choices.take()
            while not (pieces or choices.accepted):
                pieces = await choices.take()
            response = web.StreamResponse(headers=STREAM_HEADERS | reply.call.headers())
            await response.prepare(http)
            try:
                await self._events(http, response, reply, pulse, pieces)
            except (ConnectionError, ClientGoneError):
                raise
            except Exception as error:
                reply.call.failure = self._calls.failure(reply.call, error)
                await self._write(http, response.write(error_event(reply.call.failure)))
            await self._write(http, response.write_eof())
            return response
        finally:
            pulse.stop()

    async def _events(
        self,
        http: web.Request,
        response: web.StreamResponse,
        reply: Reply,
        pulse: _Pulse,
        pieces: list[ChoicePiece],
    ) -> None:
        """All events to [DONE], from `pieces` on."""
        choices = reply.choices
        opened: set[int] = set()
        while True:
            events = [_events_of(reply, each, opened) for each in pieces] or [KEEP_ALIVE]
            if choices.ended:
                break
            if any(events):
                await self._write(http, response.write(b"".join(events)))
                pulse.written()
            pieces = await choices.take()
        reply.call.usage = choices.usage
        events += (reply.form.usage(choices.usage), DONE)
        await self._write(http, response.write(b"".join(events)))

    async def _write(self, http: web.Request, writing: Awaitable[None]) -> None:
        """Waits for a client that reads slowly, but not for ever; meanwhile its outboxes fill."""
        try:
            async with asyncio.timeout(self._write_timeout_s):
                await writing
        except TimeoutError:
            if http.transport is not None:
                http.transport.abort()
            raise ClientGoneError(f"the client read nothing for {self._write_timeout_s:g} s") from None


def _too_large() -> ApiError:
    message = f"the answers together exceed {WHOLE_CHARS_MAX} characters, logprobs included; ask for a stream"
    return ApiError(TOO_LARGE, message, param="stream", code="answer_too_large")


def _events_of(reply: Reply, each: ChoicePiece, opened: set[int]) -> bytes:
    """Of one piece; the first of an answer opens it."""
    index, piece, form = each.choice, each.piece, reply.form
    events = form.delta(index, Delta(reply.say(each), piece.token_ids, piece.logged))
    if index not in opened:
        opened.add(index)
        events = form.opening(index) + events
    if piece.ending is not None:
        events += form.closing(index, reply.finish(index, piece.ending))
    return events
