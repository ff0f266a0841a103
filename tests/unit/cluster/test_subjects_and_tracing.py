"""Names of subjects as metrics see them, and the trace context header."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster import subjects
from cluster.tracing import TraceContext
from kvindex.core import InstanceId

pytestmark = pytest.mark.unit

NAME = InstanceId("i-1")


@pytest.mark.parametrize(
    ("subject", "family"),
    [
        (subjects.SCHEDULE, "schedule"),
        (subjects.SCHEDULE_STANDBY, "schedule"),
        (subjects.DECISION, "decision"),
        (subjects.KVMETA_MATCH, "kvmeta"),
        (subjects.load(NAME), "load"),
        (subjects.kv_events(NAME), "kv"),
        (subjects.kv_inventory(NAME), "kv_inventory"),
        (subjects.instance(NAME), "instance"),
        (subjects.stream(NAME), "stream"),
        ("moonpool.v1.whatever", "other"),
        ("load.x", "other"),
        ("_INBOX.x", "other"),
        ("", "other"),
    ],
)
def test_each_subject_has_its_family(subject: str, family: str) -> None:
    assert subjects.family(subject) == family


@pytest.mark.parametrize("text", ["", "x" * 129, "a\r\nb: c", "mü", "\x7f"])
def test_a_clients_id_that_is_no_word_for_a_log_is_none(text: str) -> None:
    trace = TraceContext.new()
    parsed = TraceContext.parse(trace.traceparent(), text)
    assert parsed == trace
    assert parsed.log_fields() == {"trace_id": trace.trace_id}


def test_a_clients_id_goes_with_the_trace() -> None:
    trace = TraceContext.parse(TraceContext.new().traceparent(), "theirs")
    assert trace is not None
    assert trace.child().log_fields() == {"trace_id": trace.trace_id, "client_request_id": "theirs"}


def test_a_trace_survives_its_header() -> None:
    trace = TraceContext.new()
    assert TraceContext.parse(trace.traceparent()) == trace
    child = trace.child()
    assert (child.trace_id, child.sampled) == (trace.trace_id, trace.sampled)
    assert child.span_id != trace.span_id


@pytest.mark.parametrize(
    "header",
    [
        "",
        "00-" + "0" * 32 + "-" + "1" * 16 + "-01",
        "00-" + "1" * 32 + "-" + "0" * 16 + "-01",
        "00-" + "A" * 32 + "-" + "1" * 16 + "-01",
        "01-" + "1" * 32 + "-" + "1" * 16 + "-01",
        "00-" + "1" * 32 + "-" + "1" * 16 + "-01\n",
    ],
)
def test_a_malformed_header_is_no_trace(header: str) -> None:
    assert TraceContext.parse(header) is None


@given(st.text())
def test_any_header_is_taken_or_is_none(header: str) -> None:
    trace = TraceContext.parse(header)
    assert trace is None or trace.traceparent()[:53] == header[:53]
