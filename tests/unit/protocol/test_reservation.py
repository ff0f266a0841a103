"""Decode's machine: every reservation ends, decoding starts only on a matching commit."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.messages import Commit, RefusalReason, Refused, Reserve, Reserved, Work
from kvindex.core import InstanceId
from policy.core import RequestId, SamplingParams
from protocol import reservation
from protocol.reservation import Admit, Hold, Phase

pytestmark = pytest.mark.unit

REQUEST = RequestId("r")
OWNER = InstanceId("p")
ANSWER = Reserved(REQUEST, 1, 7, 0, b"", "grant", ttl_s=5.0)
COMMIT = Commit(REQUEST, 1, 7, 2, 200, "sum", 42, 0)
GOOD = reservation.CommitAsked(COMMIT, 200, "sum")


def held() -> Hold:
    return reservation.reserve(ANSWER, OWNER, 2, 200, now_s=0.0)


def run(*events: reservation.Event, hold: Hold | None = None, now_s: float = 0.0):
    hold, effects = hold or held(), []
    for event in events:
        hold, new = reservation.step(hold, event, now_s)
        effects += new
    return hold, effects


def reply(effects) -> object:
    return next(effect.message for effect in effects if isinstance(effect, reservation.Reply))


def reserve(attempt: int) -> Reserve:
    work = Work(REQUEST, attempt, InstanceId("g"), "f", SamplingParams(1), 1, b"", 0, b"", 1.0)
    return Reserve(work, OWNER, 5.0)


def test_a_matching_commit_starts_decoding_once() -> None:
    hold, effects = run(GOOD, GOOD)
    assert hold.phase is Phase.RUNNING
    assert sum(isinstance(effect, reservation.StartDecoding) for effect in effects) == 1
    assert not any(isinstance(effect.message, Refused) for effect in effects if hasattr(effect, "message"))


@pytest.mark.parametrize(
    ("commit", "reason"),
    [
        (replace(GOOD, commit=replace(COMMIT, generation=6)), RefusalReason.STALE),
        (replace(GOOD, commit=replace(COMMIT, attempt=0)), RefusalReason.STALE),
        (replace(GOOD, commit=replace(COMMIT, blocks_written=1)), RefusalReason.MISMATCH),
        (replace(GOOD, commit=replace(COMMIT, bytes_written=199)), RefusalReason.MISMATCH),
        (replace(GOOD, landed_bytes=199), RefusalReason.MISMATCH),
        (replace(GOOD, checksum="other"), RefusalReason.MISMATCH),
    ],
)
def test_a_commit_that_does_not_match_is_refused(
    commit: reservation.CommitAsked, reason: RefusalReason
) -> None:
    hold, effects = run(commit)
    assert hold.phase is Phase.RESERVED
    assert reply(effects).reason is reason


def test_bytes_that_were_sent_again_landed_twice() -> None:
    hold, _ = run(replace(GOOD, landed_bytes=GOOD.landed_bytes + 1))
    assert hold.phase is Phase.RUNNING


def test_an_unrenewed_reservation_is_revoked_and_a_late_commit_hears_so() -> None:
    hold, effects = run(reservation.TimePassed(), now_s=5.0)
    assert effects == [reservation.TellExpired(OWNER), reservation.RevokeAndFree()]
    hold, effects = run(GOOD, hold=hold, now_s=5.1)
    assert reply(effects).reason is RefusalReason.EXPIRED


def test_the_gateway_hears_of_a_reservation_that_expires_but_of_no_other_end() -> None:
    """Prefill's own word that it failed may be lost in an outage of the bus: the request would hang."""
    _, effects = run(reservation.TimePassed(), now_s=5.0)
    assert effects == [reservation.TellExpired(OWNER), reservation.RevokeAndFree()]
    for event in (reservation.ReleaseAsked(7), reservation.CancelAsked(1), GOOD):
        _, effects = run(event, reservation.TimePassed(), now_s=5.0)
        assert reservation.TellExpired(OWNER) not in effects


def test_renewing_moves_the_deadline_but_never_revives() -> None:
    hold, _ = run(reservation.RenewAsked(7, 5.0), now_s=4.0)
    hold, effects = run(reservation.TimePassed(), hold=hold, now_s=8.9)
    assert effects == []
    hold, effects = run(reservation.TimePassed(), hold=hold, now_s=9.0)
    assert effects == [reservation.TellExpired(OWNER), reservation.RevokeAndFree()]
    hold, effects = run(reservation.RenewAsked(7, 5.0), hold=hold, now_s=9.1)
    assert reply(effects).reason is RefusalReason.EXPIRED
    assert hold.phase is Phase.CLOSED


def test_what_ended_is_remembered_for_a_while() -> None:
    hold, _ = run(reservation.CancelAsked(1))
    assert reservation.admit(hold, reserve(1)) == Refused(REQUEST, 1, RefusalReason.CANCELLED)
    assert reservation.admit(hold, reserve(0)).reason is RefusalReason.STALE
    assert reservation.admit(hold, reserve(2)) == Admit(supersedes=False)
    _, effects = run(reservation.TimePassed(), hold=hold, now_s=reservation.RESERVATION_TTL_S)
    assert effects == [reservation.Forget()]


def test_a_cancel_ahead_of_its_request_is_a_tombstone() -> None:
    stone = reservation.tombstone(REQUEST, 1, now_s=0.0)
    assert reservation.admit(stone, reserve(1)).reason is RefusalReason.CANCELLED


def test_the_same_reserve_is_answered_the_same_and_a_newer_one_supersedes() -> None:
    assert reservation.admit(held(), reserve(1)) == ANSWER
    assert reservation.admit(held(), reserve(2)) == Admit(supersedes=True)
    adopted = reservation.adopted(REQUEST, 1, now_s=0.0)
    assert reservation.admit(adopted, reserve(1)).reason is RefusalReason.STALE


def test_tokens_are_kept_until_the_gateway_has_them_or_time_is_over() -> None:
    ended, _ = run(GOOD, reservation.AnswerEnded())
    assert ended.phase is Phase.ENDED
    _, effects = run(reservation.FinishAsked(1), hold=ended)
    assert effects[0] == reservation.ForgetTokens()
    _, effects = run(reservation.TimePassed(), hold=ended, now_s=reservation.RETENTION_S_MAX)
    assert effects == [reservation.ForgetTokens()]


def test_the_end_is_told_again_until_the_gateway_has_it() -> None:
    ended, _ = run(GOOD, reservation.AnswerEnded())
    told = []
    for second in range(7):
        ended, effects = reservation.step(ended, reservation.TimePassed(), float(second))
        told += [second] * effects.count(reservation.TellEnd())
    assert told == [2, 4, 6]
    closed, _ = run(reservation.FinishAsked(1), hold=ended, now_s=7.0)
    _, effects = run(reservation.TimePassed(), hold=closed, now_s=9.0)
    assert effects == []


def test_a_cancel_of_a_later_attempt_is_remembered_as_long_as_any() -> None:
    closed, _ = run(reservation.ReleaseAsked(7))
    closed, _ = run(reservation.CancelAsked(2), hold=closed, now_s=reservation.RESERVATION_TTL_S - 1)
    closed, effects = run(reservation.TimePassed(), hold=closed, now_s=reservation.RESERVATION_TTL_S)
    assert effects == []
    assert reservation.admit(closed, reserve(2)).reason is RefusalReason.CANCELLED


def test_cancels_of_older_attempts_change_nothing() -> None:
    hold, effects = run(GOOD, reservation.CancelAsked(0))
    assert hold.phase is Phase.RUNNING
    assert not any(isinstance(effect, reservation.StopAndFree) for effect in effects)


EVENTS = st.sampled_from(
    [
        GOOD,
        replace(GOOD, landed_bytes=1),
        reservation.RenewAsked(7, 5.0),
        reservation.RenewAsked(6, 5.0),
        reservation.ReleaseAsked(7),
        reservation.ReleaseAsked(6),
        reservation.CancelAsked(1),
        reservation.CancelAsked(0),
        reservation.FinishAsked(1),
        reservation.AnswerEnded(),
        reservation.TimePassed(),
    ]
)


@settings(max_examples=300)
@given(st.lists(st.tuples(EVENTS, st.floats(0, 4)), max_size=15))
def test_any_history_frees_the_blocks_exactly_once(history) -> None:
    """Blocks leave the record by revoke, stop or the answer's end; a closed record never starts."""
    hold, now_s, freed = held(), 0.0, 0
    for event, pause_s in history:
        now_s += pause_s
        before = hold.phase
        hold, effects = reservation.step(hold, event, now_s)
        freed += sum(isinstance(e, reservation.RevokeAndFree | reservation.StopAndFree) for e in effects)
        freed += before is Phase.RUNNING and hold.phase is Phase.ENDED
        if before is Phase.CLOSED:
            assert not any(isinstance(e, reservation.StartDecoding) for e in effects)
    hold, effects = reservation.step(hold, reservation.CancelAsked(9), now_s)
    freed += sum(isinstance(e, reservation.RevokeAndFree | reservation.StopAndFree) for e in effects)
    assert hold.phase is Phase.CLOSED
    assert freed == 1
