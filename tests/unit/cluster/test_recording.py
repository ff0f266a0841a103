import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.message_values import values_of
from tests.support.views import P1, prefill, request, view_of

from cluster.errors import ProtocolError
from cluster.folds import Decided, DecisionHeard, Fold, LoadHeard, Registered, folded
from cluster.messages import Decision
from cluster.recording import (
    KINDS,
    LINE_BYTES_MAX,
    VERSION,
    Begun,
    Ended,
    Line,
    RecordingError,
    decode_lines,
    encode_line,
    read_recording,
)
from kvindex.core import InstanceId
from policy.choice import PlacementLimits
from policy.core import Placement, Rejection, RejectReason, RequestId

pytestmark = pytest.mark.unit

BEGUN = Line(0.5, Begun(VERSION, InstanceId("conductor-1"), 1, 2.0, 1e9))
PLACEMENT = Placement(RequestId("r"), 0, P1, InstanceId("d1"))
DECIDED = Decided(request("r"), (), PlacementLimits(), 1.0, 0.001, placement=PLACEMENT)
TIMES = st.floats(0.5, 1e9)


def decided_values() -> st.SearchStrategy[object]:
    parts = {
        "request": values_of(type(DECIDED.request)),
        "matches": st.just(()),
        "limits": values_of(PlacementLimits),
        "came_at_s": TIMES,
        "lag_s": TIMES,
    }
    placed = st.builds(Decided, **parts, placement=values_of(Placement))
    return placed | st.builds(Decided, **parts, rejection=values_of(Rejection))


def entries() -> st.SearchStrategy[object]:
    simple = [values_of(kind) for kind in KINDS.values() if kind not in (Begun, Decided)]
    return st.one_of(*simple, decided_values())


@settings(max_examples=60)
@given(st.lists(entries(), max_size=4), st.floats(0.5, 1e9))
def test_what_is_written_is_read(written: list[object], at_s: float):
    lines = [BEGUN, *(Line(at_s, entry) for entry in written)]
    assert list(decode_lines(map(encode_line, lines), "file")) == lines


def test_what_has_no_json_form_is_not_written():
    with pytest.raises(ProtocolError, match="end cannot be recorded"):
        encode_line(Line(1.0, Ended("\ud800")))


def test_a_file_is_read_and_what_was_cut_off_is_left_out(tmp_path):
    path = tmp_path / "recording.jsonl"
    whole = encode_line(BEGUN) + encode_line(Line(1.0, DECIDED))
    path.write_bytes(whole + encode_line(Line(2.0, DECIDED))[:-5])
    assert list(read_recording(path)) == [BEGUN, Line(1.0, DECIDED)]


BEGIN_LINE = encode_line(BEGUN)
DECIDED_LINE = encode_line(Line(1.0, DECIDED))


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (b"{\n", "f:2: "),
        (b"[]\n", "f:2: Expected `object`"),
        (DECIDED_LINE.replace(b'"prompt_tokens":1000', b'"prompt_tokens":"x"'), "$.request.prompt_tokens"),
        (DECIDED_LINE.replace(b'"prompt_tokens":1000,', b""), "prompt_tokens"),
        (DECIDED_LINE.replace(b'"joint"', b'"jolt"'), "$.limits.strategy"),
        (DECIDED_LINE.replace(b'"decided"', b'"decreed"'), "kind: 'decreed', must be one of begin, "),
        (encode_line(Line(0.25, DECIDED)), "f:2: at_s: 0.25, before the line above"),
        (BEGIN_LINE, "f:2: kind: "),
        (b'{"at_s":1.0,"kind":"load","body":7}\n', "body of load: Expected `object`"),
        (DECIDED_LINE.replace(b'"rejection":null', b'"rejection":7'), "$.rejection"),
        (b'{"at_s":1.0,"kind":"end","body":{"reason":"' + b"x" * LINE_BYTES_MAX, "longer than"),
    ],
)
def test_a_damaged_line_is_told_by_number_and_field(line: bytes, told: str):
    with pytest.raises(RecordingError) as error:
        list(decode_lines([BEGIN_LINE, line], "f"))
    assert str(error.value).startswith("f:2: ")
    assert told in str(error.value)


def test_neither_placed_nor_rejected_is_no_decision():
    line = DECIDED_LINE.replace(
        encode_line(Line(0, DECIDED)).split(b'"placement":')[1].split(b',"rejection"')[0], b"null"
    )
    with pytest.raises(RecordingError, match="placement, rejection: exactly one"):
        list(decode_lines([BEGIN_LINE, line], "f"))


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        ([], "f: empty"),
        ([b"\0" * 4096], "f: has no complete line"),
        ([DECIDED_LINE], "f:1: kind: "),
        ([BEGIN_LINE.replace(b'"version":1', b'"version":2')], "f:1: version: 2, this reads 1"),
    ],
)
def test_what_does_not_begin_as_a_recording_is_none(lines: list[bytes], told: str):
    with pytest.raises(RecordingError) as error:
        list(decode_lines(lines, "f"))
    assert str(error.value).startswith(told)


def test_rejections_and_ends_change_no_view():
    view = view_of(prefill("p1"))
    rejection = Rejection(RequestId("r"), 0, RejectReason.TTFT, "", 1.0)
    rejected = Decided(request("r"), (), PlacementLimits(), 1.0, 0.0, rejection=rejection)
    heard = DecisionHeard(Decision(RequestId("r"), 0, 10, 10, b"", ()))
    folds: list[Fold] = [rejected, heard]
    for fold in folds:
        assert folded(view, fold, 2.0, 2.0) is view
    assert isinstance(Line(1.0, Ended("closed")).entry, Ended)


def test_a_booking_that_ran_out_does_not_keep_a_later_attempts_place():
    """Whether somebody looked at the view in between makes no difference: time passes for each fold."""
    view = view_of(prefill("p1"), prefill("d1"))
    second = Decided(
        request("r", attempt=2),
        (),
        PlacementLimits(),
        1.0,
        0.0,
        placement=Placement(RequestId("r"), 2, P1, InstanceId("d1")),
    )
    view = folded(view, second, 1.0, booking_ttl_s=2.0)
    late = DecisionHeard(
        Decision(RequestId("r"), 1, 10, 10, b"", (), placement=Placement(RequestId("r"), 1, P1, P1))
    )
    assert folded(view, late, 2.0, 2.0).bookings["r"].attempt == 2
    assert folded(view, late, 3.5, 2.0).bookings["r"].attempt == 1


def test_a_load_and_a_registry_are_folded():
    load = prefill("p1").load
    assert load is not None
    view = folded(view_of(prefill("p1")), LoadHeard(load, 1, 2, 0.001), 5.0, 2.0)
    assert view.instances[P1].heard_at_s == 5.0
    assert folded(view, Registered(()), 6.0, 2.0).instances == {}
