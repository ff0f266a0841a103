"""The gateway's machine: attempts, order, ends, cancels."""

from dataclasses import replace

import numpy as np
import pytest

from cluster.messages import FailedEntry, FinishEntry, RefusalReason, TokensEntry
from kvindex.core import InstanceId
from policy.core import (
    FinishReason,
    Placement,
    Rejection,
    RejectReason,
    RequestId,
    SamplingParams,
    StructureKind,
    StructureSpec,
    TokenLogprobs,
)
from protocol import answer
from protocol.answer import Answer, Phase

pytestmark = pytest.mark.unit

REQUEST = RequestId("r")
PREFILL, DECODE = InstanceId("p"), InstanceId("d")


def packed(*token_ids: int) -> bytes:
    return np.asarray(token_ids, "<i4").tobytes()


def placement(attempt: int = 0) -> Placement:
    return Placement(REQUEST, attempt, PREFILL, DECODE)


def tokens(index: int, *token_ids: int, attempt: int = 0, sender: InstanceId = DECODE) -> answer.TokensCame:
    return answer.TokensCame(sender, TokensEntry(REQUEST, attempt, 0, index, packed(*token_ids)))


def finish(count: int, attempt: int = 0) -> answer.FinishCame:
    return answer.FinishCame(DECODE, FinishEntry(REQUEST, attempt, 0, count, FinishReason.STOP))


def failed(attempt: int = 0, retryable: bool = True) -> answer.FailureCame:
    return answer.FailureCame(PREFILL, FailedEntry(REQUEST, attempt, retryable, "why"))


def run(*events: answer.Event, state: Answer | None = None) -> tuple[Answer, list[answer.Effect]]:
    state = state or Answer(REQUEST)
    effects: list[answer.Effect] = []
    for event in events:
        state, new = answer.step(state, event, now_s=0.0)
        effects += new
    return state, effects


def running(attempt: int = 0) -> Answer:
    state = Answer(REQUEST, attempt=attempt)
    return run(answer.Placed(placement(attempt)), answer.SubmitAccepted(attempt), state=state)[0]


def of(effects: list[answer.Effect], kind: type) -> list[answer.Effect]:
    return [effect for effect in effects if isinstance(effect, kind)]


def test_a_request_runs_through() -> None:
    state, effects = run(
        answer.Begin(),
        answer.Placed(placement()),
        answer.SubmitAccepted(0),
        tokens(0, 5, sender=PREFILL),
        tokens(0, 5),
        tokens(1, 6, 7),
        finish(3),
    )
    assert effects == [
        answer.AskPlacement(0, (), resumed=False, backoff=False),
        answer.SubmitTo(placement()),
        answer.Deliver(packed(5), 0, 0),
        answer.Deliver(packed(6, 7), 1, 0),
        answer.TellFinish(DECODE, 0, 3),
        answer.Complete(FinishReason.STOP, 3),
    ]
    assert state.phase is Phase.ENDED


def test_logprobs_go_with_their_tokens_through_repeats() -> None:
    told = tuple(TokenLogprobs(-float(index)) for index in range(4))

    def entry(index: int, *token_ids: int) -> answer.TokensCame:
        logprobs = told[index : index + len(token_ids)]
        return answer.TokensCame(
            DECODE, TokensEntry(REQUEST, 0, 0, index, packed(*token_ids), logprobs=logprobs)
        )

    _, effects = run(entry(0, 5), entry(0, 5), entry(0, 5, 6, 7), tokens(2, 7, 8), state=running())
    assert of(effects, answer.Deliver) == [
        answer.Deliver(packed(5), 0, 0, told[:1]),
        answer.Deliver(packed(6, 7), 1, 0, told[1:3]),
        answer.Deliver(packed(8), 3, 0, ()),
    ]


def test_tokens_may_overtake_the_answer_to_the_submit() -> None:
    state, effects = run(answer.Placed(placement()), tokens(0, 5), answer.SubmitAccepted(0))
    assert state.phase is Phase.RUNNING
    assert of(effects, answer.Deliver) == [answer.Deliver(packed(5), 0, 0)]


def test_a_gap_is_asked_for_once_and_a_finish_waits_for_its_tokens() -> None:
    state, effects = run(tokens(1, 6), finish(3), state=running())
    assert effects == [answer.AskResume(DECODE, 0, 0)]
    state, effects = run(tokens(0, 5, 6, 7), state=state)
    assert of(effects, answer.Complete) == [answer.Complete(FinishReason.STOP, 3)]


def test_after_an_outage_prefill_is_asked_first_and_then_decode() -> None:
    state, effects = run(answer.Reconnected(), state=running())
    assert effects == [answer.AskResume(PREFILL, 0, 0)]
    state, effects = run(answer.ResumeRefused(0, PREFILL, "handed over"), state=state)
    assert effects == [answer.AskResume(DECODE, 0, 0)]
    state, effects = run(answer.ResumeRefused(0, DECODE, "unknown"), state=state)
    assert state.attempt == 1


def test_a_request_that_streams_waits_for_a_conductor_to_come_back() -> None:
    state, _ = run(tokens(0, 5), answer.InstanceLost(DECODE), state=running())
    for _ in range(answer.SCHEDULE_TRIES_MAX - 1):
        state, effects = run(answer.Unscheduled(1, "nobody"), state=state)
        assert effects == [answer.AskPlacement(1, (DECODE,), resumed=True, backoff=True)]
    state, effects = run(answer.Unscheduled(1, "nobody"), state=state)
    assert state.phase is Phase.ENDED
    _, effects = run(answer.Begin(), answer.Unscheduled(0, "nobody"))
    assert [fail.reason for fail in of(effects, answer.Fail)] == ["no_conductor"]


def test_a_gap_is_asked_for_again_later() -> None:
    state, _ = run(tokens(1, 6), state=running())
    state, effects = answer.step(state, tokens(2, 7), now_s=answer.RESUME_INTERVAL_S)
    assert effects == (answer.AskResume(DECODE, 0, 0),)


@pytest.mark.parametrize("stale", [tokens(0, 9), finish(4)])
def test_stale_attempts_are_cancelled_at_their_sender(stale: answer.Event) -> None:
    state, effects = run(stale, state=running(attempt=1))
    assert effects == [answer.TellCancel((DECODE,), 0)]
    assert state.next_index == 0


@pytest.mark.parametrize(
    "trouble",
    [
        failed(),
        answer.InstanceLost(PREFILL),
        answer.InstanceLost(DECODE),
        answer.ResumeRefused(0, DECODE, "unknown"),
    ],
)
def test_trouble_places_the_request_again_and_gives_back_what_it_held(trouble: answer.Event) -> None:
    state, effects = run(trouble, state=running())
    assert state.phase is Phase.PLACING
    assert state.attempt == 1
    assert of(effects, answer.TellCancel) == [answer.TellCancel((PREFILL, DECODE), 0)]
    asked = of(effects, answer.AskPlacement)
    assert [(ask.attempt, ask.resumed, ask.backoff) for ask in asked] == [(1, False, True)]
    assert len(asked[0].excluded) == 1


def test_a_request_placed_again_goes_on_where_it_was() -> None:
    state, effects = run(tokens(0, 5, 6), answer.InstanceLost(DECODE), state=running())
    assert of(effects, answer.AskPlacement) == [answer.AskPlacement(1, (DECODE,), resumed=True, backoff=True)]
    state, effects = run(
        answer.Placed(placement(1)), answer.SubmitAccepted(1), tokens(2, 7, attempt=1), state=state
    )
    assert of(effects, answer.Deliver) == [answer.Deliver(packed(7), 2, 0)]


def test_a_prefill_lost_after_the_handover_costs_nothing() -> None:
    _, effects = run(tokens(0, 5), answer.InstanceLost(PREFILL), state=running())
    assert of(effects, answer.AskPlacement) == []


def test_attempts_are_bounded() -> None:
    state, effects = run(*(failed(attempt) for attempt in range(1)), state=running())
    for attempt in range(1, answer.PLACEMENT_ATTEMPTS_MAX):
        state, effects = run(
            answer.Placed(placement(attempt)),
            answer.SubmitRefused(attempt, RefusalReason.QUEUE_FULL, "full", 2.0),
            state=state,
        )
    assert state.phase is Phase.ENDED
    fails = of(effects, answer.Fail)
    assert [(fail.kind, fail.retry_after_s) for fail in fails] == [(answer.FailureKind.REJECTED, 2.0)]
    assert of(effects, answer.TellCancel) == [
        answer.TellCancel((PREFILL, DECODE), answer.PLACEMENT_ATTEMPTS_MAX - 1)
    ]


@pytest.mark.parametrize(
    ("reason", "kind"),
    [
        (RejectReason.NO_INSTANCE, answer.FailureKind.UNAVAILABLE),
        (RejectReason.TTFT, answer.FailureKind.REJECTED),
    ],
)
def test_a_rejection_ends_the_request(reason: RejectReason, kind: answer.FailureKind) -> None:
    state, effects = run(answer.Begin(), answer.NotPlaced(Rejection(REQUEST, 0, reason, "why", 3.0)))
    assert state.phase is Phase.ENDED
    assert effects[-1] == answer.Fail(kind, reason, "why", 3.0)


def test_a_bad_request_is_not_tried_elsewhere() -> None:
    refused = answer.SubmitRefused(0, RefusalReason.BAD_REQUEST, "token_ids", 0.0)
    state, effects = run(answer.Placed(placement()), refused)
    assert state.phase is Phase.ENDED
    assert of(effects, answer.Fail) == [
        answer.Fail(answer.FailureKind.BAD_REQUEST, "bad_request", "token_ids")
    ]


def test_what_no_instance_can_do_is_not_tried_elsewhere_either() -> None:
    """A form that the answer is held to may meet a limit in the middle."""
    entry = FailedEntry(REQUEST, 0, False, "too complex", None, RefusalReason.BAD_REQUEST)
    state, effects = run(tokens(0, 5), answer.FailureCame(DECODE, entry), state=running())
    assert state.phase is Phase.ENDED
    assert of(effects, answer.Fail) == [
        answer.Fail(answer.FailureKind.BAD_REQUEST, "bad_request", "too complex")
    ]


@pytest.mark.parametrize("structure", [None, StructureSpec(StructureKind.JSON_OBJECT)])
def test_a_structure_may_end_an_answer_before_its_shortest_length(structure: StructureSpec | None) -> None:
    """Where decode is lost then, with the end it had not told."""
    sampling = SamplingParams(100, stop_token_ids=(9,), output_tokens_min=50, structure=structure)
    state, effects = run(
        tokens(0, 5, 9), answer.InstanceLost(DECODE), state=replace(running(), sampling=sampling)
    )
    assert (state.phase is Phase.ENDED) == (structure is not None)
    assert of(effects, answer.Complete) == ([answer.Complete(FinishReason.STOP, 2)] if structure else [])


def test_a_client_that_leaves_frees_everything_and_late_senders_are_told() -> None:
    state, effects = run(tokens(0, 5), answer.ClientGone(), state=running())
    assert of(effects, answer.TellCancel) == [answer.TellCancel((PREFILL, DECODE), 0)]
    assert of(effects, answer.Fail) == []
    _, effects = run(tokens(1, 6), finish(2), answer.Placed(placement()), state=state)
    assert effects == [answer.TellCancel((DECODE,), 0), answer.TellFinish(DECODE, 0, 2)]


def test_a_stop_string_tells_decode_to_finish_or_everyone_to_drop() -> None:
    _, effects = run(tokens(0, 5, 6), answer.StopMatched(1), state=running())
    assert effects[-2:] == [answer.TellFinish(DECODE, 0, 1), answer.Complete(FinishReason.STOP, 1)]
    _, effects = run(tokens(0, 5, sender=PREFILL), answer.StopMatched(1), state=running())
    assert effects[-2:] == [answer.TellCancel((PREFILL, DECODE), 0), answer.Complete(FinishReason.STOP, 1)]


@pytest.mark.parametrize(
    ("sampling", "reason"),
    [
        (SamplingParams(3), FinishReason.LENGTH),
        (SamplingParams(9, stop_token_ids=(7,)), FinishReason.STOP),
        (SamplingParams(9, stop_token_ids=(7,), output_tokens_min=3), None),
        (SamplingParams(9), None),
    ],
)
def test_a_lost_finish_is_no_reason_to_compute_again(
    sampling: SamplingParams, reason: FinishReason | None
) -> None:
    start = replace(running(), sampling=sampling)
    _, effects = run(tokens(0, 5, 6), tokens(2, 7), answer.InstanceLost(DECODE), state=start)
    if reason is None:
        assert of(effects, answer.AskPlacement)
    else:
        assert effects[-2:] == [answer.TellCancel((PREFILL, DECODE), 0), answer.Complete(reason, 3)]


def test_two_outages_within_a_second_are_both_asked_about() -> None:
    _, effects = run(answer.Reconnected(), answer.Reconnected(), state=running())
    assert effects == [answer.AskResume(PREFILL, 0, 0)] * 2


def test_a_deadline_ends_everywhere() -> None:
    _, effects = run(answer.DeadlinePassed(), state=running())
    assert [type(effect) for effect in effects] == [answer.TellCancel, answer.Fail]


def test_what_was_let_in_with_another_answer_is_never_turned_away_for_load() -> None:
    """Not at its first placement, nor at another one before its first token."""
    state, effects = run(answer.Begin(admitted=True))
    assert effects == [answer.AskPlacement(0, (), resumed=True, backoff=False)]
    state, effects = run(answer.Unscheduled(0, "nobody"), state=state)
    assert effects == [answer.AskPlacement(0, (), resumed=True, backoff=True)]
    _, effects = run(answer.Placed(placement(0)), answer.SubmitUnanswered(0, "nothing came"), state=state)
    assert [ask.resumed for ask in of(effects, answer.AskPlacement)] == [True]
