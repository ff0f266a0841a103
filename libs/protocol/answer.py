"""The gateway's side of one request: placing, submitting, taking tokens in order, ending (DESIGN §3).

`step` is the whole machine. The shell keeps the text, the delivered tokens and the client's connection;
this knows which attempt counts, which token comes next, and whom to tell what when it ends.
"""

from dataclasses import dataclass, replace
from enum import StrEnum

from cluster.messages import TOKEN_ID_BYTES, FailedEntry, FinishEntry, RefusalReason, TokensEntry
from kvindex.core import InstanceId
from policy.core import (
    FinishReason,
    Placement,
    Rejection,
    RejectReason,
    RequestId,
    SamplingParams,
    TokenLogprobs,
)
from protocol.order import Fresh, Gap, Repeat, arrange

PLACEMENT_ATTEMPTS_MAX = 4
"""Placements of one request, counting refusals and losses alike."""
OVERLOAD = frozenset({RefusalReason.QUEUE_FULL, RefusalReason.NO_BLOCKS, RefusalReason.TBT})
"""Refusals that say: too much work, come again. Others say: something is wrong here."""
RETRY_AFTER_S = 1.0
SCHEDULE_TRIES_MAX = 10
"""Questions for one placement of a request that streams already and finds no conductor; any other
request fails at once."""
RESUME_INTERVAL_S = 1.0
"""A gap is asked for at most this often."""


class Phase(StrEnum):
    PLACING = "placing"
    SUBMITTING = "submitting"
    RUNNING = "running"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class Answer:
    """State of one request at its gateway. `next_index` tokens were delivered so far."""

    request_id: RequestId
    attempts_max: int = PLACEMENT_ATTEMPTS_MAX
    sampling: SamplingParams | None = None
    """Tells where the answer ends, should its finish be lost. None: only a finish does."""
    phase: Phase = Phase.PLACING
    attempt: int = 0
    placement: Placement | None = None
    excluded: tuple[InstanceId, ...] = ()
    next_index: int = 0
    decoding: bool = False
    """Decode spoke in this attempt: prefill is not needed any more."""
    announced_end: FinishEntry | None = None
    """A finish that overtook its last tokens."""
    complete: FinishReason | None = None
    """All tokens are there, only the finish is missing."""
    resume_asked_at_s: float | None = None
    admitted: bool = False
    """It was let in before it was begun."""
    unscheduled: int = 0
    """Questions for this placement that no conductor answered."""


# --- events -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Begin:
    """The request was checked and tokenised. `admitted`: the cluster let it in with another answer to the
    same prompt, and does not have to decide about it again."""

    admitted: bool = False


@dataclass(frozen=True, slots=True)
class Placed:
    placement: Placement


@dataclass(frozen=True, slots=True)
class NotPlaced:
    rejection: Rejection


@dataclass(frozen=True, slots=True)
class Unscheduled:
    """No conductor answered in time."""

    attempt: int
    detail: str


@dataclass(frozen=True, slots=True)
class SubmitAccepted:
    attempt: int


@dataclass(frozen=True, slots=True)
class SubmitRefused:
    attempt: int
    reason: RefusalReason
    detail: str
    retry_after_s: float


@dataclass(frozen=True, slots=True)
class SubmitUnanswered:
    """No answer to a submit: it may have been accepted all the same."""

    attempt: int
    detail: str


@dataclass(frozen=True, slots=True)
class TokensCame:
    sender: InstanceId
    entry: TokensEntry


@dataclass(frozen=True, slots=True)
class FinishCame:
    sender: InstanceId
    entry: FinishEntry


@dataclass(frozen=True, slots=True)
class FailureCame:
    sender: InstanceId
    entry: FailedEntry


@dataclass(frozen=True, slots=True)
class ResumeRefused:
    """`instance` does not know the request (any more), or did not answer."""

    attempt: int
    instance: InstanceId
    detail: str


@dataclass(frozen=True, slots=True)
class StopMatched:
    """A stop string ended the answer after `output_tokens` tokens."""

    output_tokens: int


@dataclass(frozen=True, slots=True)
class InstanceLost:
    instance: InstanceId


@dataclass(frozen=True, slots=True)
class Reconnected:
    """Our own bus was away: entries may be missing."""


@dataclass(frozen=True, slots=True)
class ClientGone:
    pass


@dataclass(frozen=True, slots=True)
class DeadlinePassed:
    pass


Event = (
    Begin
    | Placed
    | NotPlaced
    | Unscheduled
    | SubmitAccepted
    | SubmitRefused
    | SubmitUnanswered
    | TokensCame
    | FinishCame
    | FailureCame
    | ResumeRefused
    | StopMatched
    | InstanceLost
    | Reconnected
    | ClientGone
    | DeadlinePassed
)

# --- effects ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AskPlacement:
    """Ask a conductor; where `backoff` is set, after a short jittered wait."""

    attempt: int
    excluded: tuple[InstanceId, ...]
    resumed: bool
    backoff: bool


@dataclass(frozen=True, slots=True)
class SubmitTo:
    placement: Placement


@dataclass(frozen=True, slots=True)
class Deliver:
    """Hand these tokens to the client; the first is number `first_index` of the answer. `logprobs` has an
    entry for each token, or none at all."""

    token_ids: bytes
    first_index: int
    cached_tokens: int
    logprobs: tuple[TokenLogprobs | None, ...] = ()


@dataclass(frozen=True, slots=True)
class TellFinish:
    """Acknowledge `output_tokens` tokens: `instance` stops and keeps the blocks in the pool."""

    instance: InstanceId
    attempt: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class TellCancel:
    """Ask `instances` to drop everything of this request up to `attempt`, until they acknowledge."""

    instances: tuple[InstanceId, ...]
    attempt: int


@dataclass(frozen=True, slots=True)
class AskResume:
    instance: InstanceId
    attempt: int
    from_index: int


@dataclass(frozen=True, slots=True)
class Complete:
    reason: FinishReason
    output_tokens: int


class FailureKind(StrEnum):
    """What the client is told: 429, 503, 504, 400, 500 before the stream began, else an error event."""

    REJECTED = "rejected"
    UNAVAILABLE = "unavailable"
    DEADLINE = "deadline"
    BAD_REQUEST = "bad_request"
    INTERNAL = "internal"


@dataclass(frozen=True, slots=True)
class Fail:
    kind: FailureKind
    reason: str
    detail: str
    retry_after_s: float = RETRY_AFTER_S


Effect = AskPlacement | SubmitTo | Deliver | TellFinish | TellCancel | AskResume | Complete | Fail
Outcome = tuple[Answer, tuple[Effect, ...]]


def step(answer: Answer, event: Event, now_s: float) -> Outcome:
    """The next state and what the shell has to do, in order. An ended answer only sees to it that
    late senders are cancelled."""
    if answer.phase is Phase.ENDED:
        return _after_end(answer, event)
    match event:
        case Begin(admitted):
            ask = AskPlacement(answer.attempt, answer.excluded, resumed=admitted, backoff=False)
            return replace(answer, admitted=admitted), (ask,)
        case Placed(placement):
            return _placed(answer, placement)
        case NotPlaced(rejection):
            return _not_placed(answer, rejection)
        case Unscheduled(attempt, detail):
            return _unscheduled(answer, attempt, detail)
        case SubmitAccepted(attempt):
            if attempt != answer.attempt or answer.phase is not Phase.SUBMITTING:
                return answer, ()
            return replace(answer, phase=Phase.RUNNING), ()
        case SubmitRefused():
            return _submit_refused(answer, event)
        case SubmitUnanswered(attempt, detail):
            if attempt != answer.attempt or answer.phase is not Phase.SUBMITTING or not answer.placement:
                return answer, ()
            return _place_again(answer, answer.placement.prefill, detail)
        case TokensCame(sender, tokens):
            return _tokens(answer, sender, tokens, now_s)
        case FinishCame(sender, finish):
            return _finish(answer, sender, finish, now_s)
        case FailureCame(sender, failure):
            return _failure(answer, sender, failure)
        case ResumeRefused():
            return _resume_refused(answer, event)
        case StopMatched(output_tokens):
            return _end(
                answer, _acknowledge(answer, output_tokens), Complete(FinishReason.STOP, output_tokens)
            )
        case InstanceLost(instance):
            return _lost(answer, instance)
        case Reconnected():
            return _resume(replace(answer, resume_asked_at_s=None), now_s)
        case ClientGone():
            return replace(answer, phase=Phase.ENDED), _cancel_all(answer)
        case DeadlinePassed():
            return _fail(answer, Fail(FailureKind.DEADLINE, "deadline", "the request's time is over"))


def _after_end(answer: Answer, event: Event) -> Outcome:
    match event:
        case TokensCame(sender, entry):
            return answer, (TellCancel((sender,), entry.attempt),)
        case FinishCame(sender, finish):
            return answer, _take_over(answer, sender, finish)
        case _:
            return answer, ()


def _placed(answer: Answer, placement: Placement) -> Outcome:
    if answer.phase is not Phase.PLACING or placement.attempt != answer.attempt:
        return answer, ()
    submitting = replace(answer, phase=Phase.SUBMITTING, placement=placement, unscheduled=0)
    return submitting, (SubmitTo(placement),)


def _unscheduled(answer: Answer, attempt: int, detail: str) -> Outcome:
    if attempt != answer.attempt or answer.phase is not Phase.PLACING:
        return answer, ()
    unscheduled = answer.unscheduled + 1
    if not _let_in(answer) or unscheduled >= SCHEDULE_TRIES_MAX:
        return _fail(answer, Fail(FailureKind.UNAVAILABLE, "no_conductor", detail))
    ask = AskPlacement(attempt, answer.excluded, resumed=True, backoff=True)
    return replace(answer, unscheduled=unscheduled), (ask,)


def _not_placed(answer: Answer, rejection: Rejection) -> Outcome:
    if answer.phase is not Phase.PLACING or rejection.attempt != answer.attempt:
        return answer, ()
    unavailable = rejection.reason is RejectReason.NO_INSTANCE
    kind = FailureKind.UNAVAILABLE if unavailable else FailureKind.REJECTED
    return _fail(answer, Fail(kind, rejection.reason, rejection.detail, rejection.retry_after_s))


def _submit_refused(answer: Answer, event: SubmitRefused) -> Outcome:
    if event.attempt != answer.attempt or answer.phase is not Phase.SUBMITTING or answer.placement is None:
        return answer, ()
    if event.reason is RefusalReason.BAD_REQUEST:
        return _fail(answer, Fail(FailureKind.BAD_REQUEST, event.reason, event.detail))
    detail = event.detail or event.reason
    return _place_again(answer, answer.placement.prefill, detail, event.reason, event.retry_after_s)


def _tokens(answer: Answer, sender: InstanceId, entry: TokensEntry, now_s: float) -> Outcome:
    if entry.attempt != answer.attempt:
        return answer, _cancel_stale(answer, sender, entry.attempt)
    answer = _heard(answer, sender)
    match arrange(answer.next_index, entry.output_index, entry.token_ids):
        case Repeat():
            return answer, ()
        case Gap():
            return _resume(answer, now_s)
        case Fresh(token_ids, first_index, next_index):
            complete = _completed_by(answer, token_ids, next_index)
            answer = replace(answer, next_index=next_index, complete=complete, resume_asked_at_s=None)
            logprobs = entry.logprobs[first_index - entry.output_index :]
            deliver = Deliver(token_ids, first_index, entry.cached_tokens, logprobs)
            if answer.announced_end is None or answer.announced_end.output_tokens > next_index:
                return answer, (deliver,)
            ended, effects = _finish(answer, sender, answer.announced_end, now_s)
            return ended, (deliver, *effects)


def _completed_by(answer: Answer, token_ids: bytes, next_index: int) -> FinishReason | None:
    """Why the tokens that end with `token_ids` are all there will be, by the request's own sampling."""
    sampling = answer.sampling
    if sampling is None:
        return None
    last_token_id = int.from_bytes(token_ids[-TOKEN_ID_BYTES:], "little", signed=True)
    ends = last_token_id in sampling.stop_token_ids
    # A structure that is complete ends an answer before its time.
    if ends and (next_index > sampling.output_tokens_min or sampling.structure is not None):
        return FinishReason.STOP
    return FinishReason.LENGTH if next_index >= sampling.output_tokens_max else None


def _finish(answer: Answer, sender: InstanceId, entry: FinishEntry, now_s: float) -> Outcome:
    if entry.attempt != answer.attempt:
        return answer, _cancel_stale(answer, sender, entry.attempt)
    if entry.output_tokens > answer.next_index:
        return _resume(replace(_heard(answer, sender), announced_end=entry), now_s)
    acknowledge = _take_over(answer, sender, entry)
    return _end(answer, acknowledge, Complete(entry.reason, entry.output_tokens))


def _failure(answer: Answer, sender: InstanceId, entry: FailedEntry) -> Outcome:
    if entry.attempt != answer.attempt or answer.placement is None:
        return answer, ()
    if not entry.retryable:
        if entry.reason is RefusalReason.BAD_REQUEST:
            return _fail(answer, Fail(FailureKind.BAD_REQUEST, entry.reason, entry.detail))
        return _fail(answer, Fail(FailureKind.INTERNAL, "failed", entry.detail))
    return _place_again(answer, entry.culprit or sender, entry.detail, entry.reason)


def _lost(answer: Answer, instance: InstanceId) -> Outcome:
    placement = answer.placement
    if placement is None or answer.phase is Phase.PLACING:
        return answer, ()
    needed = {placement.decode} if answer.decoding else {placement.prefill, placement.decode}
    if instance not in needed:
        return answer, ()
    return _place_again(answer, instance, f"instance {instance} was lost")


def _heard(answer: Answer, sender: InstanceId) -> Answer:
    """Tokens may overtake the answer to the submit: they say yes as well."""
    placement = answer.placement
    decoding = answer.decoding or (placement is not None and sender == placement.decode)
    phase = Phase.RUNNING if answer.phase is Phase.SUBMITTING else answer.phase
    if phase is answer.phase and decoding is answer.decoding:
        # As with nearly every token: to make a state costs microseconds.
        return answer
    return replace(answer, phase=phase, decoding=decoding)


def _resume(answer: Answer, now_s: float) -> Outcome:
    if answer.placement is None or answer.phase is Phase.PLACING:
        return answer, ()
    asked_at_s = answer.resume_asked_at_s
    if asked_at_s is not None and now_s - asked_at_s < RESUME_INTERVAL_S:
        return answer, ()
    placement = answer.placement
    instance = placement.decode if answer.decoding else placement.prefill
    resume = AskResume(instance, answer.attempt, answer.next_index)
    return replace(answer, resume_asked_at_s=now_s), (resume,)


def _resume_refused(answer: Answer, event: ResumeRefused) -> Outcome:
    """What prefill does not know any more it may have handed over; after decode there is nobody to ask."""
    placement = answer.placement
    if placement is None or event.attempt != answer.attempt:
        return answer, ()
    if event.instance != placement.decode and not answer.decoding:
        return answer, (AskResume(placement.decode, answer.attempt, answer.next_index),)
    return _place_again(answer, placement.decode, event.detail)


def _place_again(
    answer: Answer,
    culprit: InstanceId,
    detail: str,
    reason: RefusalReason | None = None,
    retry_after_s: float = RETRY_AFTER_S,
) -> Outcome:
    """A new attempt that avoids `culprit`; what the old one holds is given back. Where only the finish
    was lost there is nothing left to compute."""
    cancel = _cancel_all(answer)
    if answer.complete is not None:
        return _end(answer, cancel, Complete(answer.complete, answer.next_index))
    attempt = answer.attempt + 1
    if attempt >= answer.attempts_max:
        detail = f"gave up after {attempt} placements, the last one: {detail}"
        kind = FailureKind.REJECTED if reason in OVERLOAD else FailureKind.UNAVAILABLE
        fail = Fail(kind, reason or "placements_exhausted", detail, retry_after_s)
        return replace(answer, phase=Phase.ENDED), (*cancel, fail)
    excluded = answer.excluded if culprit in answer.excluded else (*answer.excluded, culprit)
    again = replace(
        answer,
        phase=Phase.PLACING,
        attempt=attempt,
        placement=None,
        excluded=excluded,
        decoding=False,
        announced_end=None,
        resume_asked_at_s=None,
    )
    ask = AskPlacement(attempt, excluded, resumed=_let_in(answer), backoff=True)
    return again, (*cancel, ask)


def _let_in(answer: Answer) -> bool:
    """The cluster has decided for it already: it is not to be turned away for its load any more."""
    return answer.admitted or answer.next_index > 0


def _cancel_all(answer: Answer) -> tuple[TellCancel, ...]:
    if answer.placement is None:
        return ()
    instances = tuple(dict.fromkeys((answer.placement.prefill, answer.placement.decode)))
    return (TellCancel(instances, answer.attempt),)


def _cancel_stale(answer: Answer, sender: InstanceId, attempt: int) -> tuple[TellCancel, ...]:
    return (TellCancel((sender,), attempt),) if attempt < answer.attempt else ()


def _acknowledge(answer: Answer, output_tokens: int) -> tuple[Effect, ...]:
    """A stop string may end the answer on prefill's first token, before decode has committed: then
    only a cancel reaches everyone."""
    if answer.placement is None:
        return ()
    if not answer.decoding:
        return _cancel_all(answer)
    return (TellFinish(answer.placement.decode, answer.attempt, output_tokens),)


def _take_over(answer: Answer, sender: InstanceId, entry: FinishEntry) -> tuple[TellFinish, ...]:
    """Decode keeps tokens until it hears this; prefill, where a first token ended it all, keeps none."""
    if answer.placement is None or sender != answer.placement.decode:
        return ()
    return (TellFinish(sender, entry.attempt, entry.output_tokens),)


def _end(answer: Answer, before: tuple[Effect, ...], last: Effect) -> Outcome:
    return replace(answer, phase=Phase.ENDED), (*before, last)


def _fail(answer: Answer, fail: Fail) -> Outcome:
    return _end(answer, _cancel_all(answer), fail)
