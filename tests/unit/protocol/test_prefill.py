"""Prefill's machine: every way through it ends with nothing held and decode told."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.messages import RefusalReason, Reserved
from policy.core import FinishReason, RequestId
from protocol import prefill
from protocol.prefill import Phase, Prefill, Result

pytestmark = pytest.mark.unit

RESERVED = Reserved(RequestId("r"), 0, 7, 1, b"", "grant", ttl_s=9.0)
HANDOVER = prefill.HandoverDone(3, 4096, "sum")


def run(
    *events: prefill.Event, local: bool = False, now_s: float = 0.0
) -> tuple[Prefill, list[prefill.Effect]]:
    state, effects = Prefill(local=local), []
    for event in events:
        state, new = prefill.step(state, event, now_s)
        effects += new
    return state, effects


HANDED = (prefill.Taken(), prefill.ReserveAccepted(RESERVED), prefill.Computed(5, None), HANDOVER)


def test_a_prompt_is_handed_over() -> None:
    state, effects = run(*HANDED, prefill.CommitAccepted())
    assert effects == [
        prefill.AskReserve(),
        prefill.Compute(RESERVED),
        prefill.TellFirstToken(5),
        prefill.FinishHandover(),
        prefill.SendCommit(7, 5, HANDOVER),
        prefill.Free(),
    ]
    assert state.result is Result.HANDED_OVER


def test_a_coupled_worker_reserves_and_sends_nothing() -> None:
    state, effects = run(prefill.Taken(), prefill.Computed(5, None), local=True)
    assert effects == [prefill.Compute(None), prefill.TellFirstToken(5), prefill.CommitLocally()]
    assert state.result is Result.HANDED_OVER
    assert state.first_token_id == 5


RESERVED_AND_FETCHED = [prefill.ReserveAccepted(RESERVED), prefill.FetchDone()]


@pytest.mark.parametrize("order", [RESERVED_AND_FETCHED, RESERVED_AND_FETCHED[::-1]])
def test_reserving_and_fetching_go_side_by_side(order: list[prefill.Event]) -> None:
    state, effects = run(prefill.Taken(fetches=True))
    assert effects == [prefill.AskReserve(), prefill.Fetch()]
    state, effects = prefill.step(state, order[0], 0.0)
    assert effects == ()
    state, effects = prefill.step(state, order[1], 0.0)
    assert effects == (prefill.Compute(RESERVED),)


def test_a_coupled_worker_fetches_and_reserves_nothing() -> None:
    state, effects = run(prefill.Taken(fetches=True), local=True)
    assert effects == [prefill.Fetch()]
    _, effects = prefill.step(state, prefill.FetchDone(), 0.0)
    assert effects == (prefill.Compute(None),)


def test_a_reservation_is_renewed_while_the_prefix_comes() -> None:
    state, _ = run(prefill.Taken(fetches=True), prefill.ReserveAccepted(RESERVED))
    _, effects = prefill.step(state, prefill.TimePassed(), 3.0)
    assert effects == (prefill.SendRenew(7),)


@pytest.mark.parametrize(
    ("trouble", "result"),
    [
        (prefill.RenewRefused("expired"), Result.FAILED),
        (prefill.Failed("the instance drains"), Result.FAILED),
        (prefill.CancelAsked(), Result.CANCELLED),
    ],
)
def test_what_ends_a_request_while_it_fetches_frees_at_once(trouble: prefill.Event, result: Result) -> None:
    """A fetch that is done later begins nothing."""
    events = (prefill.Taken(fetches=True), prefill.ReserveAccepted(RESERVED), trouble, prefill.FetchDone())
    state, effects = run(*events)
    assert state.result is result
    assert effects[-2:] == [prefill.SendRelease(7), prefill.Free()]
    assert not any(isinstance(effect, prefill.Compute) for effect in effects)


def test_a_refused_reservation_ends_the_fetch() -> None:
    refused = prefill.ReserveRefused(RefusalReason.NO_BLOCKS, "")
    state, effects = run(prefill.Taken(fetches=True), refused, prefill.FetchDone())
    assert state.result is Result.FAILED
    assert effects[-1] == prefill.Free()


def test_an_answer_of_one_token_ends_here() -> None:
    state, effects = run(*HANDED[:2], prefill.Computed(5, FinishReason.LENGTH))
    assert effects[2:] == [
        prefill.TellFirstToken(5),
        prefill.TellFinish(FinishReason.LENGTH),
        prefill.SendRelease(7),
        prefill.Free(),
    ]
    assert state.result is Result.FINISHED


@pytest.mark.parametrize(
    ("before", "trouble"),
    [
        (1, prefill.ReserveRefused(RefusalReason.NO_BLOCKS, "")),
        (1, prefill.Failed("unanswered")),
        (2, prefill.Failed("engine")),
        (2, prefill.RenewRefused("expired")),
        (3, prefill.Failed("transfer")),
        (3, prefill.RenewRefused("expired")),
        (4, prefill.CommitRefused(RefusalReason.EXPIRED, "")),
    ],
)
def test_trouble_is_told_and_frees(before: int, trouble: prefill.Event) -> None:
    state, effects = run(*HANDED[:before], trouble)
    assert state.result is Result.FAILED
    kinds = [type(effect) for effect in effects]
    assert kinds.count(prefill.TellFailed) == 1
    assert kinds[-1] is prefill.Free
    assert (prefill.SendRelease in kinds) == (before >= 2)


def test_an_unanswered_commit_is_said_again_up_to_the_bound() -> None:
    unanswered = [prefill.CommitUnanswered("timeout")] * prefill.COMMIT_TRIES_MAX
    state, effects = run(*HANDED, *unanswered)
    assert sum(isinstance(effect, prefill.SendCommit) for effect in effects) == prefill.COMMIT_TRIES_MAX
    assert state.result is Result.FAILED


def test_a_reservation_that_comes_after_a_cancel_is_given_back() -> None:
    state, effects = run(prefill.Taken(), prefill.CancelAsked(), prefill.ReserveAccepted(RESERVED))
    assert state.result is Result.CANCELLED
    assert effects[-1] == prefill.SendRelease(7)


def test_renewals_come_each_third_of_the_ttl() -> None:
    state, _ = run(*HANDED[:2])
    sent = []
    for second in range(10):
        state, effects = prefill.step(state, prefill.TimePassed(), float(second))
        sent += [second] * len(effects)
    assert sent == [3, 6, 9]


EVENTS = st.sampled_from(
    [
        prefill.Taken(),
        prefill.Taken(fetches=True),
        prefill.FetchDone(),
        prefill.ReserveAccepted(RESERVED),
        prefill.ReserveRefused(RefusalReason.NO_BLOCKS, ""),
        prefill.Computed(5, None),
        prefill.Computed(5, FinishReason.STOP),
        HANDOVER,
        prefill.Failed("x"),
        prefill.Failed("x", reason=RefusalReason.BAD_REQUEST),
        prefill.RenewRefused("x"),
        prefill.CommitAccepted(),
        prefill.CommitRefused(RefusalReason.EXPIRED, ""),
        prefill.CommitUnanswered("x"),
        prefill.TimePassed(),
    ]
)


@settings(max_examples=300)
@given(st.lists(EVENTS, max_size=12), st.booleans())
def test_any_row_of_events_and_a_cancel_frees_exactly_once(events: list[prefill.Event], local: bool) -> None:
    state, effects = run(*events, prefill.CancelAsked(), local=local)
    assert state.phase is Phase.DONE
    ends = [effect for effect in effects if isinstance(effect, prefill.Free | prefill.CommitLocally)]
    assert len(ends) == 1
    assert sum(isinstance(effect, prefill.TellFirstToken) for effect in effects) <= 1
    committed = any(isinstance(effect, prefill.SendCommit) for effect in effects)
    handed_over = state.result is Result.HANDED_OVER
    released = any(isinstance(effect, prefill.SendRelease) for effect in effects)
    assert released or handed_over or state.reserved is None
    assert committed or local or not handed_over


@settings(max_examples=300)
@given(st.lists(EVENTS, max_size=12), st.booleans())
def test_computing_begins_once_and_only_when_all_it_needs_is_there(
    events: list[prefill.Event], local: bool
) -> None:
    state, begun = Prefill(local=local), []
    fetched = reserved = True
    for event in events:
        state, effects = prefill.step(state, event, 0.0)
        for effect in effects:
            match effect:
                case prefill.Fetch():
                    fetched = False
                case prefill.AskReserve():
                    assert not local
                    reserved = False
                case prefill.Compute():
                    begun.append(effect)
        fetched = fetched or isinstance(event, prefill.FetchDone)
        reserved = reserved or isinstance(event, prefill.ReserveAccepted)
        assert not begun or (fetched and reserved)
    assert len(begun) <= 1
    assert all((effect.reserved is None) == local for effect in begun)


@settings(max_examples=100)
@given(st.permutations([prefill.FetchDone(), prefill.ReserveAccepted(RESERVED), prefill.TimePassed()]))
def test_a_fetch_never_fails_a_request(order: list[prefill.Event]) -> None:
    state, _ = run(prefill.Taken(fetches=True), *order)
    assert state.phase is Phase.COMPUTING
