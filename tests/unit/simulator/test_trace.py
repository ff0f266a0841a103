"""Traces: what is read, and what is refused with the line that is wrong."""

import json
from pathlib import Path

import pytest

from simulator import trace
from simulator.trace import TracedRequest, TraceError, distinct_blocks, parse_trace, read_trace

pytestmark = pytest.mark.unit

FIRST = {"timestamp": 0, "input_length": 513, "output_length": 7, "hash_ids": [4, 5], "model": "unknown"}
SECOND = {"timestamp": 3000, "input_length": 512, "output_length": 0, "hash_ids": [4]}


def lines(*values: object) -> list[bytes]:
    return [json.dumps(value).encode() + b"\n" for value in values]


def test_a_request_a_line_unknown_fields_and_blank_lines_passed_over(tmp_path: Path):
    path = tmp_path / "trace.jsonl"
    path.write_bytes(b"\n".join(lines(FIRST, SECOND)) + b"\n")
    requests = read_trace(path)
    assert requests == [TracedRequest(0, 513, 7, (4, 5)), TracedRequest(3000, 512, 0, (4,))]
    assert distinct_blocks(requests) == 2


def test_a_priority_may_be_named():
    requests = parse_trace(lines(FIRST, SECOND | {"priority": -3}), "some")
    assert [request.priority for request in requests] == [0, -3]


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"hash_ids": [4]}, "hash_ids: 1 for 513 tokens, 2 of 512"),
        ({"hash_ids": [4, 4]}, "hash_ids: one comes twice"),
        ({"hash_ids": "4"}, "hash_ids"),
        ({"hash_ids": [5, 4]}, "hash_ids: 5 follows None, and 4 in an earlier line"),
        ({"hash_ids": [6, 5]}, "hash_ids: 5 follows 6, and 4 in an earlier line"),
        ({"input_length": 0, "hash_ids": []}, "input_length: 0, at least 1"),
        ({"output_length": -1}, "output_length: -1, at least 0"),
        ({"timestamp": -1}, "timestamp: -1, at least 0"),
        ({"timestamp": "now"}, "timestamp"),
        ({"priority": 101}, "priority: 101, -100 to 100"),
        ({"priority": None}, "priority"),
    ],
)
def test_a_line_that_makes_no_sense_is_named_with_its_number(changed: dict[str, object], named: str):
    with pytest.raises(TraceError) as refused:
        list(parse_trace(lines(FIRST, FIRST | changed), "some.jsonl"))
    assert str(refused.value).startswith("some.jsonl:2: ")
    assert named in str(refused.value)


@pytest.mark.parametrize("line", [b"{", b"[]", b"17", b"\xff\xfe", b'{"timestamp": 1}'])
def test_what_is_no_request_is_named_with_its_number(line: bytes):
    with pytest.raises(TraceError, match=r"^some\.jsonl:3: "):
        list(parse_trace([*lines(FIRST), b"\n", line], "some.jsonl"))


def test_a_file_without_a_request_is_refused(tmp_path: Path):
    (tmp_path / "empty").write_bytes(b"\n\n")
    with pytest.raises(TraceError, match="no request in it"):
        read_trace(tmp_path / "empty")


def test_a_line_beyond_the_limit_is_never_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(trace, "LINE_BYTES_MAX", 200)
    (tmp_path / "long").write_bytes(lines(FIRST)[0] + b" " * 10_000)
    with pytest.raises(TraceError, match=r"long:2: longer than 200 bytes"):
        read_trace(tmp_path / "long")


def test_a_trace_beyond_the_limit_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(trace, "LINES_MAX", 2)
    with pytest.raises(TraceError, match=r"some:3: more than 2 lines"):
        list(parse_trace(lines(SECOND, SECOND, SECOND), "some"))
