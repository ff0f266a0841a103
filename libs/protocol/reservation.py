"""Decode's side of one request: reservation, commit, decoding, end, tombstone (DESIGN §3 steps 5 to 11).

`step` is the whole machine of one request, `admit` its beginning. The shell owns blocks, grants and the
engine. Every reservation ends: by commit, release, cancel or time. What ended is remembered for a while,
so that a late message meets a tombstone and not a new life.
"""

from dataclasses import dataclass, replace
from enum import StrEnum

from cluster.messages import Accepted, Commit, RefusalReason, Refused, Reserve, Reserved
from kvindex.core import InstanceId
from policy.core import RequestId

RESERVATION_TTL_S = 10.0
"""A reservation that is not renewed or committed ends after this; a tombstone is kept as long."""
RETENTION_S_MAX = 60.0
"""Tokens of a complete answer are kept for the gateway this long, or until it says finish."""
TELL_END_AGAIN_S = 2.0
"""Until then the gateway is told of the end this often: nothing else would show it that the end was lost."""


class Phase(StrEnum):
    RESERVED = "reserved"
    RUNNING = "running"
    ENDED = "ended"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class Hold:
    """What decode holds for one request, in its latest attempt. `ends_at_s`: the reservation's deadline,
    the end of retention, or the end of the tombstone."""

    request_id: RequestId
    attempt: int
    phase: Phase
    ends_at_s: float
    answer: Reserved | None = None
    owner: InstanceId | None = None
    bytes_to_write: int = 0
    blocks_to_write: int = 0
    closed_by: RefusalReason = RefusalReason.UNKNOWN
    tell_end_at_s: float = 0.0


# --- admission ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Admit:
    """Find blocks, then `reserve`; where `supersedes`, the older attempt is cancelled first."""

    supersedes: bool


def admit(hold: Hold | None, asked: Reserve) -> Admit | Reserved | Refused:
    """What a Reserve meets: nothing or an older attempt, itself a moment ago, or its own tombstone."""
    work = asked.work
    if hold is None:
        return Admit(supersedes=False)
    if work.attempt < hold.attempt:
        return Refused(work.request_id, work.attempt, RefusalReason.STALE)
    if work.attempt > hold.attempt:
        return Admit(supersedes=hold.phase is not Phase.CLOSED)
    if hold.phase is Phase.CLOSED:
        return Refused(work.request_id, work.attempt, hold.closed_by)
    if hold.answer is None:
        return Refused(work.request_id, work.attempt, RefusalReason.STALE, "decodes here already")
    return hold.answer


def adopted(request_id: RequestId, attempt: int, now_s: float) -> Hold:
    """Coupled: prefilled here, decoding here, without any reservation."""
    return Hold(request_id, attempt, Phase.RUNNING, now_s)


def reserve(
    answer: Reserved,
    owner: InstanceId,
    blocks_to_write: int,
    bytes_to_write: int,
    now_s: float,
) -> Hold:
    return Hold(
        answer.request_id,
        answer.attempt,
        Phase.RESERVED,
        now_s + answer.ttl_s,
        answer,
        owner,
        bytes_to_write,
        blocks_to_write,
    )


def tombstone(request_id: RequestId, attempt: int, now_s: float) -> Hold:
    """A cancel for a request that is not here (yet): whatever comes late for it is refused."""
    closed = Hold(request_id, attempt, Phase.CLOSED, now_s + RESERVATION_TTL_S)
    return replace(closed, closed_by=RefusalReason.CANCELLED)


# --- events -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RenewAsked:
    generation: int
    ttl_s: float


@dataclass(frozen=True, slots=True)
class CommitAsked:
    """`landed_bytes` is what the transfer counted under the grant, what was sent again counted again;
    `checksum` is of what lies in memory."""

    commit: Commit
    landed_bytes: int
    checksum: str


@dataclass(frozen=True, slots=True)
class ReleaseAsked:
    generation: int


@dataclass(frozen=True, slots=True)
class CancelAsked:
    attempt: int


@dataclass(frozen=True, slots=True)
class FinishAsked:
    attempt: int


@dataclass(frozen=True, slots=True)
class AnswerEnded:
    """The last token was emitted (or the request failed here)."""


@dataclass(frozen=True, slots=True)
class TimePassed:
    pass


Event = RenewAsked | CommitAsked | ReleaseAsked | CancelAsked | FinishAsked | AnswerEnded | TimePassed

# --- effects ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Reply:
    """The answer to the message that was this event."""

    message: Accepted | Refused


@dataclass(frozen=True, slots=True)
class StartDecoding:
    """The grant ends; the sequence joins the batch with the commit's first token."""

    commit: Commit


@dataclass(frozen=True, slots=True)
class RevokeAndFree:
    """Let no more byte land, then free the blocks, in this order."""


@dataclass(frozen=True, slots=True)
class TellExpired:
    """The owner went silent: tell the gateway. What the owner itself said of it may have been lost, and
    a gateway that asks while the blocks are reserved hears that the request is in good hands."""

    owner: InstanceId | None


@dataclass(frozen=True, slots=True)
class StopAndFree:
    """Take the sequence out of the batch; its full blocks stay cached."""


@dataclass(frozen=True, slots=True)
class TellEnd:
    """The gateway has not said finish: tell it again that the answer has ended."""


@dataclass(frozen=True, slots=True)
class ForgetTokens:
    """Nobody will ask for the emitted tokens again."""


@dataclass(frozen=True, slots=True)
class Forget:
    """The tombstone's time is over: drop the record."""


Effect = Reply | StartDecoding | TellExpired | RevokeAndFree | StopAndFree | TellEnd | ForgetTokens | Forget
Outcome = tuple[Hold, tuple[Effect, ...]]


def step(hold: Hold, event: Event, now_s: float) -> Outcome:
    match event:
        case RenewAsked(generation, ttl_s):
            return _renew(hold, generation, ttl_s, now_s)
        case CommitAsked():
            return _commit(hold, event)
        case ReleaseAsked(generation):
            if hold.answer is None or generation != hold.answer.generation:
                return hold, (_refuse(hold, RefusalReason.STALE),)
            closed, effects = _close(hold, RefusalReason.CANCELLED, now_s)
            return closed, (*effects, _accept(hold))
        case CancelAsked(attempt) | FinishAsked(attempt):
            if attempt < hold.attempt:
                return hold, (_accept(hold),)
            if hold.phase is Phase.CLOSED and attempt > hold.attempt:
                return tombstone(hold.request_id, attempt, now_s), (_accept(hold),)
            closed, effects = _close(hold, RefusalReason.CANCELLED, now_s)
            return replace(closed, attempt=attempt), (*effects, _accept(hold))
        case AnswerEnded():
            if hold.phase is not Phase.RUNNING:
                return hold, ()
            ended = replace(hold, phase=Phase.ENDED, ends_at_s=now_s + RETENTION_S_MAX)
            return replace(ended, tell_end_at_s=now_s + TELL_END_AGAIN_S), ()
        case TimePassed():
            return _time(hold, now_s)


def _renew(hold: Hold, generation: int, ttl_s: float, now_s: float) -> Outcome:
    if hold.answer is None or generation != hold.answer.generation:
        return hold, (_refuse(hold, RefusalReason.STALE),)
    if hold.phase is Phase.CLOSED:
        return hold, (_refuse(hold, hold.closed_by),)
    if hold.phase is Phase.RESERVED:
        hold = replace(hold, ends_at_s=now_s + min(ttl_s, RESERVATION_TTL_S))
    return hold, (_accept(hold),)


def _commit(hold: Hold, event: CommitAsked) -> Outcome:
    """Decoding starts only where attempt, generation, counts and checksum all match."""
    commit = event.commit
    if hold.answer is None or commit.attempt != hold.attempt or commit.generation != hold.answer.generation:
        return hold, (_refuse(hold, RefusalReason.STALE),)
    if hold.phase is Phase.CLOSED:
        return hold, (_refuse(hold, hold.closed_by),)
    if hold.phase is not Phase.RESERVED:
        return hold, (_accept(hold),)
    expected = (hold.blocks_to_write, hold.bytes_to_write)
    found = (commit.blocks_written, commit.bytes_written)
    if found != expected or event.landed_bytes < hold.bytes_to_write:
        detail = f"(blocks, bytes) are {found}, {event.landed_bytes} bytes landed, expected {expected}"
        return hold, (_refuse(hold, RefusalReason.MISMATCH, detail),)
    if commit.checksum and commit.checksum != event.checksum:
        return hold, (_refuse(hold, RefusalReason.MISMATCH, "checksum of the blocks differs"),)
    return replace(hold, phase=Phase.RUNNING), (StartDecoding(commit), _accept(hold))


def _time(hold: Hold, now_s: float) -> Outcome:
    if hold.phase is Phase.ENDED and hold.tell_end_at_s <= now_s < hold.ends_at_s:
        return replace(hold, tell_end_at_s=now_s + TELL_END_AGAIN_S), (TellEnd(),)
    if now_s < hold.ends_at_s or hold.phase is Phase.RUNNING:
        return hold, ()
    if hold.phase is Phase.CLOSED:
        return hold, (Forget(),)
    closed, effects = _close(hold, RefusalReason.EXPIRED, now_s)
    return closed, (TellExpired(hold.owner), *effects) if hold.phase is Phase.RESERVED else effects


def _close(hold: Hold, reason: RefusalReason, now_s: float) -> Outcome:
    closed = replace(hold, phase=Phase.CLOSED, ends_at_s=now_s + RESERVATION_TTL_S, closed_by=reason)
    match hold.phase:
        case Phase.RESERVED:
            return closed, (RevokeAndFree(),)
        case Phase.RUNNING:
            return closed, (StopAndFree(), ForgetTokens())
        case Phase.ENDED:
            return closed, (ForgetTokens(),)
        case Phase.CLOSED:
            return hold, ()


def _accept(hold: Hold) -> Reply:
    return Reply(Accepted(hold.request_id, hold.attempt))


def _refuse(hold: Hold, reason: RefusalReason, detail: str = "") -> Reply:
    return Reply(Refused(hold.request_id, hold.attempt, reason, detail))
