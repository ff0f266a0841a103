"""`moonpool simulate cache`: what it prints, and what it refuses."""

import json
from pathlib import Path

import pytest

from moonpool.__main__ import main

pytestmark = pytest.mark.unit

REQUESTS = (
    {"timestamp": 0, "input_length": 1024, "output_length": 5, "hash_ids": [0, 1]},
    {"timestamp": 0, "input_length": 1024, "output_length": 5, "hash_ids": [0, 1]},
    {"timestamp": 1, "input_length": 512, "output_length": 5, "hash_ids": [2]},
    {"timestamp": 2, "input_length": 1000, "output_length": 5, "hash_ids": [0, 1]},
)
"""7 uses of 3 blocks. With room for 2, a prefix-closed cache still has block 0 at the end; a plain one, where
the least recent goes, has lost it, and finds 1."""


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, REQUESTS)))
    return path


def test_the_table_has_a_line_for_each_policy_and_a_column_for_each_capacity(trace, capsys):
    words = ["simulate", "cache", "--trace", str(trace), "--policy", "lru", "lfu", "--capacity", "inf", "2"]
    assert main(words) == 0
    header, *rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert header == ["cache", "policy", "measure", "inf", "2"]
    assert [row[:3] for row in rows] == [
        ["plain", "lru", "hits"],
        ["plain", "lfu", "hits"],
        ["closed", "lru", "hits"],
        ["closed", "lru", "saved"],
        ["closed", "lfu", "hits"],
        ["closed", "lfu", "saved"],
    ]
    # 4 of 7 where nothing goes, 3 of 7 where one block of the last prompt had to.
    assert [row[3:] for row in rows if row[2] == "hits"] == [["0.571", "0.429"]] * 4


def test_json_is_one_object_with_the_documented_keys(trace, capsys):
    assert main(["simulate", "cache", "--trace", str(trace), "--json", "--closed", "--capacity", "2"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert {name: printed[name] for name in printed if name != "results"} == {
        "trace": str(trace),
        "requests": 4,
        "block_uses": 7,
        "distinct_blocks": 3,
        "block_tokens": 512,
    }
    assert [result["policy"] for result in printed["results"]] == [
        "lru",
        "lfu",
        "length_aware",
        "request_aware",
    ]
    first = printed["results"][0]
    saved_rate = first.pop("saved_rate")
    assert first == {
        "cache": "closed",
        "policy": "lru",
        "capacity_blocks": 2,
        "hit_blocks": 3,
        "hit_rate": pytest.approx(3 / 7),
        "evicted_blocks": 2,
    }
    assert 0.4 < saved_rate < 0.5


def test_plain_saves_nothing_that_could_be_told(trace, capsys):
    assert main(["simulate", "cache", "--trace", str(trace), "--json", "--plain", "--capacity", "inf"]) == 0
    results = json.loads(capsys.readouterr().out)["results"]
    assert {(result["cache"], result["capacity_blocks"], result["saved_rate"]) for result in results} == {
        ("plain", None, None)
    }


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--policy", "fifo"], "request_aware"),
        (["--capacity", "0"], "from 1"),
        (["--capacity", "-3"], "--capacity"),
        (["--capacity", "many"], "many"),
        (["--plain", "--closed"], "--closed"),
    ],
)
def test_bad_usage_is_one_line_and_status_2(trace, flags, named, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["simulate", "cache", "--trace", str(trace), *flags])
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert named in line


def test_no_trace_named_is_bad_usage(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["simulate", "cache"])
    assert ended.value.code == 2
    assert "--trace" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "named"),
    [(None, "No such file"), ("", "no request"), ('{"timestamp": 0}\n', ":1: "), ("\n\nnonsense", ":3: ")],
)
def test_a_trace_that_cannot_be_used_is_one_line_and_status_1(tmp_path, content, named, capsys):
    path = tmp_path / "bad.jsonl"
    if content is not None:
        path.write_text(content)
    assert main(["simulate", "cache", "--trace", str(path)]) == 1
    printed = capsys.readouterr()
    (line,) = printed.err.splitlines()
    assert (printed.out, named in line, "bad.jsonl" in line) == ("", True, True)
