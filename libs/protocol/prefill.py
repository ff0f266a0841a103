"""Prefill's side of one request: reserve, fetch, compute, hand over, commit (DESIGN §3 steps 5 to 8).

`step` is the whole machine. The shell owns tensors, blocks and transfers; this knows what may follow
what, when the reservation is renewed, and what is told to whom when something fails. Bringing in the
prefix is worth its time at best: whatever comes of it, the rest is computed.
"""

from dataclasses import dataclass, replace
from enum import StrEnum

from cluster.messages import RefusalReason, Reserved
from policy.core import FinishReason

COMMIT_TRIES_MAX = 3
"""Commits sent for one handover where no answer comes; a commit said twice changes nothing."""
RENEWALS_PER_TTL = 3


class Phase(StrEnum):
    QUEUED = "queued"
    PREPARING = "preparing"
    """Decode is asked for blocks, and the prefix is brought in: side by side."""
    COMPUTING = "computing"
    HANDING_OVER = "handing_over"
    COMMITTING = "committing"
    DONE = "done"


class Result(StrEnum):
    """How a request left this instance."""

    HANDED_OVER = "handed_over"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class Prefill:
    """State of one (request, attempt) at its prefill. `local` where decode is this very instance."""

    local: bool = False
    phase: Phase = Phase.QUEUED
    fetching: bool = False
    """The prefix is on its way here."""
    reserved: Reserved | None = None
    renew_at_s: float | None = None
    first_token_id: int | None = None
    handover: "HandoverDone | None" = None
    commits_sent: int = 0
    result: Result | None = None


# --- events -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Taken:
    """The request is first in the queue and the engine has room. `fetches` where some of its prefix is to
    be brought in first."""

    fetches: bool = False


@dataclass(frozen=True, slots=True)
class FetchDone:
    """Of the prefix is here what will be, all or nothing of it."""


@dataclass(frozen=True, slots=True)
class ReserveAccepted:
    reserved: Reserved


@dataclass(frozen=True, slots=True)
class ReserveRefused:
    reason: RefusalReason
    detail: str


@dataclass(frozen=True, slots=True)
class Computed:
    """All layers of the whole prompt are done. `ending` where the first token ends the answer."""

    first_token_id: int
    ending: FinishReason | None


@dataclass(frozen=True, slots=True)
class HandoverDone:
    """Every write is complete at the remote end."""

    blocks_written: int
    bytes_written: int
    checksum: str


@dataclass(frozen=True, slots=True)
class Failed:
    """Something came to nothing: computing here, or, `at_decode`, reaching decode."""

    detail: str
    at_decode: bool = False
    reason: RefusalReason | None = None
    """Where every instance would refuse it for the same."""


@dataclass(frozen=True, slots=True)
class RenewRefused:
    detail: str


@dataclass(frozen=True, slots=True)
class CommitAccepted:
    pass


@dataclass(frozen=True, slots=True)
class CommitRefused:
    reason: RefusalReason
    detail: str


@dataclass(frozen=True, slots=True)
class CommitUnanswered:
    detail: str


@dataclass(frozen=True, slots=True)
class CancelAsked:
    pass


@dataclass(frozen=True, slots=True)
class TimePassed:
    pass


Event = (
    Taken
    | FetchDone
    | ReserveAccepted
    | ReserveRefused
    | Computed
    | HandoverDone
    | Failed
    | RenewRefused
    | CommitAccepted
    | CommitRefused
    | CommitUnanswered
    | CancelAsked
    | TimePassed
)

# --- effects ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AskReserve:
    pass


@dataclass(frozen=True, slots=True)
class Fetch:
    """Bring in the prefix, and hold what came until Compute or Free; answered by FetchDone."""


@dataclass(frozen=True, slots=True)
class Compute:
    """Compute what is not cached; where `reserved` is set, stream the layers there."""

    reserved: Reserved | None


@dataclass(frozen=True, slots=True)
class SendRenew:
    generation: int


@dataclass(frozen=True, slots=True)
class TellFirstToken:
    token_id: int


@dataclass(frozen=True, slots=True)
class TellFinish:
    reason: FinishReason


@dataclass(frozen=True, slots=True)
class FinishHandover:
    """Wait for the writes under way and checksum them; answered by HandoverDone or Failed."""


@dataclass(frozen=True, slots=True)
class SendCommit:
    generation: int
    first_token_id: int
    handover: HandoverDone


@dataclass(frozen=True, slots=True)
class CommitLocally:
    """Coupled: the sequence goes on decoding where it is."""


@dataclass(frozen=True, slots=True)
class SendRelease:
    generation: int


@dataclass(frozen=True, slots=True)
class TellFailed:
    """The gateway places the request again, avoiding decode where the trouble was there."""

    detail: str
    at_decode: bool
    reason: RefusalReason | None


@dataclass(frozen=True, slots=True)
class Free:
    """Stop fetching and computing, let no write go on, unpin every block: the request is done here."""


Effect = (
    AskReserve
    | Fetch
    | Compute
    | SendRenew
    | TellFirstToken
    | TellFinish
    | FinishHandover
    | SendCommit
    | CommitLocally
    | SendRelease
    | TellFailed
    | Free
)
Outcome = tuple[Prefill, tuple[Effect, ...]]


def step(prefill: Prefill, event: Event, now_s: float) -> Outcome:
    """The next state and what the shell has to do, in order. A done request ignores what comes late,
    except a reservation, which is given back."""
    phase = prefill.phase
    match event:
        case ReserveAccepted(reserved) if phase is Phase.DONE:
            return prefill, (SendRelease(reserved.generation),)
        case _ if phase is Phase.DONE:
            return prefill, ()
        case Taken(fetches) if phase is Phase.QUEUED:
            return _prepare(prefill, fetches)
        case FetchDone() if phase is Phase.PREPARING:
            return _compute_when_prepared(replace(prefill, fetching=False))
        case ReserveAccepted(reserved) if _is_reserving(prefill):
            renew_at_s = now_s + reserved.ttl_s / RENEWALS_PER_TTL
            return _compute_when_prepared(replace(prefill, reserved=reserved, renew_at_s=renew_at_s))
        case ReserveRefused(reason, detail) if _is_reserving(prefill):
            return _fail(prefill, f"decode refused: {reason} {detail}", at_decode=True, reason=reason)
        case Computed() if phase is Phase.COMPUTING:
            return _computed(prefill, event)
        case HandoverDone() if phase is Phase.HANDING_OVER:
            return _commit(replace(prefill, phase=Phase.COMMITTING, handover=event))
        case CommitAccepted() if phase is Phase.COMMITTING:
            return _done(prefill, Result.HANDED_OVER, (Free(),))
        case CommitRefused(reason, detail) if phase is Phase.COMMITTING:
            return _fail(prefill, f"commit refused: {reason} {detail}", at_decode=True, reason=reason)
        case CommitUnanswered(detail) if phase is Phase.COMMITTING:
            if prefill.commits_sent < COMMIT_TRIES_MAX:
                return _commit(prefill)
            unanswered = f"commit was not answered {COMMIT_TRIES_MAX} times: {detail}"
            return _fail(prefill, unanswered, at_decode=True)
        case Failed(detail, at_decode, reason):
            return _fail(prefill, detail, at_decode=at_decode, reason=reason)
        case RenewRefused(detail) if prefill.reserved is not None and phase is not Phase.COMMITTING:
            return _fail(prefill, f"reservation lost: {detail}", at_decode=True)
        case CancelAsked():
            return _done(prefill, Result.CANCELLED, (*_release(prefill), Free()))
        case TimePassed():
            return _renew(prefill, now_s)
        case _:
            return prefill, ()


def _prepare(prefill: Prefill, fetches: bool) -> Outcome:
    preparing = replace(prefill, phase=Phase.PREPARING, fetching=fetches)
    reserve: tuple[Effect, ...] = () if prefill.local else (AskReserve(),)
    fetch: tuple[Effect, ...] = (Fetch(),) if fetches else ()
    prepared, compute = _compute_when_prepared(preparing)
    return prepared, (*reserve, *fetch, *compute)


def _is_reserving(prefill: Prefill) -> bool:
    return prefill.phase is Phase.PREPARING and not prefill.local and prefill.reserved is None


def _compute_when_prepared(prefill: Prefill) -> Outcome:
    if prefill.fetching or _is_reserving(prefill):
        return prefill, ()
    return replace(prefill, phase=Phase.COMPUTING), (Compute(prefill.reserved),)


def _computed(prefill: Prefill, event: Computed) -> Outcome:
    tell = TellFirstToken(event.first_token_id)
    prefill = replace(prefill, first_token_id=event.first_token_id)
    if event.ending is not None:
        told: tuple[Effect, ...] = (tell, TellFinish(event.ending))
        return _done(prefill, Result.FINISHED, (*told, *_release(prefill), Free()))
    if prefill.reserved is None:
        return _done(prefill, Result.HANDED_OVER, (tell, CommitLocally()))
    handing_over = replace(prefill, phase=Phase.HANDING_OVER)
    return handing_over, (tell, FinishHandover())


def _commit(prefill: Prefill) -> Outcome:
    assert prefill.reserved is not None
    assert prefill.handover is not None
    assert prefill.first_token_id is not None
    commit = SendCommit(prefill.reserved.generation, prefill.first_token_id, prefill.handover)
    return replace(prefill, commits_sent=prefill.commits_sent + 1), (commit,)


def _renew(prefill: Prefill, now_s: float) -> Outcome:
    if prefill.reserved is None or prefill.renew_at_s is None or now_s < prefill.renew_at_s:
        return prefill, ()
    renewed = replace(prefill, renew_at_s=now_s + prefill.reserved.ttl_s / RENEWALS_PER_TTL)
    return renewed, (SendRenew(prefill.reserved.generation),)


def _fail(prefill: Prefill, detail: str, *, at_decode: bool, reason: RefusalReason | None = None) -> Outcome:
    tell = TellFailed(detail, at_decode, reason)
    return _done(prefill, Result.FAILED, (tell, *_release(prefill), Free()))


def _release(prefill: Prefill) -> tuple[SendRelease, ...]:
    return () if prefill.reserved is None else (SendRelease(prefill.reserved.generation),)


def _done(prefill: Prefill, result: Result, effects: tuple[Effect, ...]) -> Outcome:
    return replace(prefill, phase=Phase.DONE, result=result), effects
