"""One streamed answer as it comes: events and their times in, a record out. Pure."""

from array import array
from dataclasses import dataclass, field

import orjson

from moonpool.api import DONE, Json
from moonpool.replay.records import Outcome, Record, Results, time_between_tokens_s
from moonpool.replay.schedule import ScheduledRequest

REJECTED_STATUSES = frozenset({429, 503})
"""Overloaded, or nobody there who could; all others are failures."""
REJECTED_REASON_HEADER = "x-moonpool-rejected-reason"
MESSAGE_CHARS_MAX = 300
CUT_OFF = "stream_cut_off"
ERROR_EVENT = "error_event"
NOT_JSON = "malformed_event"
NO_TOKENS = "no_tokens"


@dataclass(slots=True)
class StreamedAnswer:
    """Lines of an event stream, taken in until `done`, or `error` is (reason, message)."""

    gaps_s: "array[float]" = field(default_factory=lambda: array("d"))
    first_at_s: float | None = None
    last_at_s: float = 0.0
    tokens: int = 0
    usage: Json = field(default_factory=dict)
    done: bool = False
    error: tuple[str, str] | None = None

    def take(self, line: bytes, at_s: float) -> None:
        name, _, value = line.partition(b":")
        value = value.strip()
        if name != b"data" or self.done or self.error is not None:
            return
        if value == DONE:
            self.done = True
            return
        try:
            event = orjson.loads(value)
        except orjson.JSONDecodeError:
            event = None
        match event:
            case {"error": error}:
                self.error = error_of(error, ERROR_EVENT)
            case dict():
                self._take_event(event, at_s)
            case _:
                self.error = (NOT_JSON, value[:MESSAGE_CHARS_MAX].decode("utf-8", "replace"))

    def _take_event(self, event: Json, at_s: float) -> None:
        usage = event.get("usage")
        if isinstance(usage, dict):
            self.usage = usage
        tokens = _tokens(event)
        if not tokens:
            return
        if self.first_at_s is None:
            self.first_at_s = at_s
        else:
            self.gaps_s.append(at_s - self.last_at_s)
        # What comes together was not waited for one by one.
        self.gaps_s.extend([0.0] * (tokens - 1))
        self.last_at_s = at_s
        self.tokens += tokens


def record_of(
    answer: StreamedAnswer, request: ScheduledRequest, results: Results, *, sent_s: float, ended_s: float
) -> Record:
    """What came of a request that was answered with a stream, which has ended."""
    if answer.first_at_s is None or not answer.done:
        failure = results.failure(0, *_unfinished(answer))
        return Record(
            due_s=request.due_s, sent_s=sent_s, ended_s=ended_s, outcome=Outcome.FAILED, failure=failure
        )
    for gap_s in answer.gaps_s:
        results.gaps.add(gap_s)
    output_tokens = _count(answer.usage.get("completion_tokens"), answer.tokens)
    return Record(
        due_s=request.due_s,
        sent_s=sent_s,
        ended_s=ended_s,
        outcome=Outcome.SERVED,
        prompt_tokens=_count(answer.usage.get("prompt_tokens"), request.prompt_tokens),
        output_tokens=output_tokens,
        cached_tokens=_cached_tokens(answer.usage),
        short=output_tokens < request.output_tokens,
        ttft_s=answer.first_at_s - sent_s,
        tbt_s=time_between_tokens_s(answer.gaps_s),
    )


def refused_record(
    request: ScheduledRequest,
    results: Results,
    *,
    status: int,
    reason: str | None,
    body: bytes,
    sent_s: float,
    ended_s: float,
) -> Record:
    """Of a request that was answered with an error's `status` and `body`; `reason` is the header's."""
    try:
        error = orjson.loads(body)
    except orjson.JSONDecodeError:
        error = None
    code, message = error_of(error.get("error") if isinstance(error, dict) else None, f"http_{status}")
    outcome = Outcome.REJECTED if status in REJECTED_STATUSES else Outcome.FAILED
    failure = results.failure(status, reason or code, message)
    return Record(due_s=request.due_s, sent_s=sent_s, ended_s=ended_s, outcome=outcome, failure=failure)


def error_of(error: object, reason: str) -> tuple[str, str]:
    """The code, or else `reason`, and the message of the error in an OpenAI error body."""
    match error:
        case {"message": str(message), "code": str(code)}:
            return code, message[:MESSAGE_CHARS_MAX]
        case {"message": str(message)}:
            return reason, message[:MESSAGE_CHARS_MAX]
        case _:
            return reason, ""


def _unfinished(answer: StreamedAnswer) -> tuple[str, str]:
    """Reason and message of an answer that did not end well."""
    if answer.error is not None:
        return answer.error
    if answer.done:
        return NO_TOKENS, "the answer has no token"
    return CUT_OFF, "the stream ended without [DONE]"


def _tokens(event: Json) -> int:
    """How many tokens an event has: as many as it lists; without a list, text is one."""
    match event.get("choices"):
        case [{"token_ids": list(token_ids)}, *_]:
            return len(token_ids)
        case [{"text": str(text)}, *_] if text:
            return 1
        case _:
            return 0


def _cached_tokens(usage: Json) -> int | None:
    match usage.get("prompt_tokens_details"):
        case {"cached_tokens": int(cached_tokens)}:
            return cached_tokens
        case _:
            return None


def _count(value: object, default: int) -> int:
    return value if isinstance(value, int) else default
