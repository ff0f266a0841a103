"""What is remembered of an answer, and what a replay's records come to."""

import math
import re

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonpool.replay.answer import StreamedAnswer, record_of, refused_record
from moonpool.replay.records import (
    KINDS_MAX,
    OTHER_KINDS,
    REASON_CHARS_MAX,
    Failure,
    GapHistogram,
    Outcome,
    Record,
    Results,
    time_between_tokens_s,
)
from moonpool.replay.schedule import ScheduledRequest
from moonpool.replay.statistics import TIME_BINS, Targets, over_time, summarise

pytestmark = pytest.mark.unit

REQUEST = ScheduledRequest(1, 0.5, (0,), 100, 4)


def data(value: object) -> bytes:
    return b"data: " + orjson.dumps(value) + b"\n"


def chunk(*token_ids: int, text: str = "") -> bytes:
    return data({"choices": [{"text": text, "token_ids": list(token_ids)}], "usage": None})


USAGE = data(
    {
        "choices": [],
        "usage": {
            "prompt_tokens": 100,
            "completion_tokens": 4,
            "prompt_tokens_details": {"cached_tokens": 64},
        },
    }
)
DONE = b"data: [DONE]\n"


def taken(*lines: tuple[float, bytes], results: Results | None = None, ended_s: float = 9.0) -> Record:
    answer = StreamedAnswer()
    for at_s, line in lines:
        answer.take(line, at_s)
    return record_of(answer, REQUEST, results or Results(), sent_s=1.0, ended_s=ended_s)


def test_an_answer_is_the_times_of_its_tokens_and_its_usage() -> None:
    results = Results()
    record = taken(
        (1.5, b": comment\n"),
        (2.0, chunk(7)),
        (2.0, b"\n"),
        (2.25, chunk(8, 9)),
        (3.25, chunk(10)),
        (3.5, data({"choices": [{"text": "", "finish_reason": "length"}]})),
        (3.5, USAGE),
        (3.5, DONE),
        (3.6, chunk(11)),
        results=results,
    )
    assert record == Record(
        due_s=0.5,
        sent_s=1.0,
        ended_s=9.0,
        outcome=Outcome.SERVED,
        prompt_tokens=100,
        output_tokens=4,
        cached_tokens=64,
        short=False,
        ttft_s=1.0,
        tbt_s=1.0,
    )
    assert record.late_s == 0.5
    # Two tokens that come together: the second was not waited for.
    assert results.gaps.count() == 3
    assert results.gaps.percentile(0.3) == 0.0
    assert results.gaps.percentile(1.0) == pytest.approx(1.0, rel=0.02)


def test_without_token_ids_and_usage_text_counts() -> None:
    record = taken(
        (2.0, data({"choices": [{"text": "a"}]})),
        (2.5, data({"choices": [{"text": ""}]})),
        (3.0, data({"choices": [{"text": "b"}]})),
        (3.0, DONE),
    )
    assert (record.output_tokens, record.prompt_tokens, record.cached_tokens) == (2, 100, None)
    assert record.short
    assert record.tbt_s == 1.0


@pytest.mark.parametrize(
    ("lines", "reason", "message"),
    [
        ([chunk(7)], "stream_cut_off", r"without \[DONE\]"),
        ([DONE], "no_tokens", "no token"),
        ([chunk(7), data({"error": {"message": "gone", "code": "lost"}}), chunk(8), DONE], "lost", "gone"),
        ([data({"error": "gone"}), DONE], "error_event", ""),
        ([chunk(7), b"data: {oops\n", DONE], "malformed_event", "{oops"),
        ([chunk(7), b"data: [1]\n", DONE], "malformed_event", r"\[1\]"),
    ],
)
def test_an_answer_that_does_not_end_well_has_failed(lines, reason, message) -> None:
    results = Results()
    record = taken(*((2.0 + number, line) for number, line in enumerate(lines)), results=results)
    assert (record.outcome, record.failure) == (Outcome.FAILED, Failure(0, reason))
    assert results.examples.keys() == {Failure(0, reason)}
    assert re.search(message, results.examples[Failure(0, reason)])
    assert results.gaps.count() == 0


@pytest.mark.parametrize(
    ("status", "header", "body", "outcome", "reason"),
    [
        (429, "no_decode_room", {"error": {"message": "m", "code": "c"}}, Outcome.REJECTED, "no_decode_room"),
        (503, None, {"error": {"message": "m", "code": "c"}}, Outcome.REJECTED, "c"),
        (500, None, {"error": {"message": "m", "code": None}}, Outcome.FAILED, "http_500"),
        (400, None, [1], Outcome.FAILED, "http_400"),
        (502, None, None, Outcome.FAILED, "http_502"),
    ],
)
def test_a_refusal_has_its_status_and_reason(status, header, body, outcome, reason) -> None:
    content = b"<html>" if body is None else orjson.dumps(body)
    record = refused_record(
        REQUEST, Results(), status=status, reason=header, body=content, sent_s=1.0, ended_s=2.0
    )
    assert (record.outcome, record.failure) == (outcome, Failure(status, reason))


def test_failures_of_many_kinds_are_bounded() -> None:
    results = Results()
    kinds = {results.failure(0, f"reason {number}", "m") for number in range(3 * KINDS_MAX)}
    assert len(kinds) == KINDS_MAX + 1
    assert Failure(0, OTHER_KINDS) in kinds
    assert len(results.examples) == KINDS_MAX
    assert results.failure(0, "reason 1", "m") == Failure(0, "reason 1")
    assert len(Results().failure(0, "x" * 10_000, "m").reason) == REASON_CHARS_MAX


@pytest.mark.parametrize(
    ("gaps", "expected"),
    [([], None), ([0.5], 0.5), ([0.1] * 9 + [0.9], 0.9), ([0.1] * 9 + [0.9, 0.7], 0.8), ([1.0] * 30, 1.0)],
)
def test_tbt_is_the_mean_of_the_longest_tenth(gaps, expected) -> None:
    assert time_between_tokens_s(gaps) == (None if expected is None else pytest.approx(expected))


def test_thirty_gaps_have_a_tenth_of_three() -> None:
    assert time_between_tokens_s([1.0, 1.0, 1.0, *[0.0] * 27]) == 1.0


@given(st.lists(st.floats(0.0, 1e4), min_size=1, max_size=200), st.floats(0.01, 1.0))
def test_a_percentile_of_gaps_is_exact_within_a_bin(gaps, share) -> None:
    histogram = GapHistogram()
    for gap_s in gaps:
        histogram.add(gap_s)
    exact = sorted(gaps)[max(0, math.ceil(share * len(gaps)) - 1)]
    assert exact - 1.1e-6 <= histogram.percentile(share) <= exact * 1.0201 + 1e-6


def record(sent_s: float, ended_s: float, outcome: Outcome = Outcome.SERVED, **more) -> Record:
    return Record(due_s=sent_s, sent_s=sent_s, ended_s=ended_s, outcome=outcome, **more)


def served(
    sent_s: float, ended_s: float, ttft_s: float, tbt_s: float | None, cached: int | None = 0
) -> Record:
    return record(
        sent_s,
        ended_s,
        prompt_tokens=100,
        output_tokens=10,
        cached_tokens=cached,
        ttft_s=ttft_s,
        tbt_s=tbt_s,
    )


def test_goodput_is_what_was_served_within_both_targets() -> None:
    results = Results()
    overloaded = results.failure(429, "no_room", "full")
    broken = results.failure(0, "stream_cut_off", "oh")
    results.records = [
        served(0.0, 4.0, 1.0, 0.1, cached=50),
        served(0.0, 2.0, 1.1, 0.1),
        served(1.0, 2.0, 0.1, 0.2, cached=None),
        served(1.0, 10.0, 0.1, None),
        record(2.0, 2.1, Outcome.REJECTED, failure=overloaded),
        record(2.0, 2.1, Outcome.REJECTED, failure=overloaded),
        record(3.0, 5.0, Outcome.FAILED, failure=broken),
        record(4.0, 5.0, Outcome.INTERRUPTED),
    ]
    summary = summarise(results, Targets(1.0, 0.1), offered=10, window_s=5.0)
    assert (summary.sent, summary.served, summary.good, summary.ttft_met, summary.tbt_met) == (8, 4, 2, 3, 3)
    assert (summary.rejected, summary.failed, summary.interrupted) == (2, 1, 1)
    assert (summary.span_s, summary.goodput_per_s, summary.served_per_s) == (10.0, 0.2, 0.4)
    assert (summary.offered_per_s, summary.sent_per_s) == (2.0, 2.0)
    assert (summary.prompt_tokens, summary.cached_tokens, summary.output_tokens) == (400, 50, 40)
    assert summary.hit_rate == pytest.approx(50 / 300)
    assert (summary.output_tokens_per_s, summary.prompt_tokens_per_s) == (4.0, 40.0)
    assert summary.ttft_s is not None
    assert (summary.ttft_s.n, summary.ttft_s.p50, summary.ttft_s.max) == (4, 0.1, 1.1)
    assert summary.tbt_s is not None
    assert summary.tbt_s.n == 3
    assert summary.e2e_s is not None
    assert summary.e2e_s.p99 == 9.0
    (rejections,), (failures,) = summary.rejections, summary.failures
    assert (rejections.failure, rejections.requests, rejections.example) == (overloaded, 2, "full")
    assert (failures.failure, failures.requests, failures.example) == (broken, 1, "oh")


def test_nothing_sent_is_no_figures() -> None:
    summary = summarise(Results(), Targets(1.0, 1.0), offered=1, window_s=0.0)
    assert (summary.sent, summary.span_s, summary.hit_rate, summary.ttft_s) == (0, 0.0, None, None)
    assert (summary.offered_per_s, summary.goodput_per_s, summary.cached_tokens) == (None, None, None)
    assert over_time([]) == []


def test_over_time_are_requests_in_flight_and_the_hit_rate_of_those_that_end() -> None:
    moments = over_time([served(0.0, 30.0, 1.0, 0.1, cached=100), served(15.0, 60.0, 1.0, 0.1, cached=25)])
    assert len(moments) == TIME_BINS == 60
    assert [moment.in_flight for moment in moments] == pytest.approx([1.0] * 15 + [2.0] * 15 + [1.0] * 30)
    assert {moment.at_s: moment.hit_rate for moment in moments if moment.hit_rate is not None} == {
        30.5: 1.0,
        59.5: 0.25,
    }


@given(st.lists(st.tuples(st.floats(0, 100), st.floats(0.001, 50)), min_size=1, max_size=30))
def test_the_time_in_flight_is_all_there(times) -> None:
    records = [served(sent_s, sent_s + took_s, 0.1, None) for sent_s, took_s in times]
    moments = over_time(records)
    bin_s = max(each.ended_s for each in records) / TIME_BINS
    assert sum(moment.in_flight * bin_s for moment in moments) == pytest.approx(
        sum(took_s for _, took_s in times), rel=1e-6, abs=1e-6
    )
