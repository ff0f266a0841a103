"""`moonpool simulate cluster`: what it prints, and what it refuses."""

import io
import json
from pathlib import Path

import pytest

from moonpool.__main__ import main
from moonpool.simulations.progress import INTERVAL_S, Progress

pytestmark = pytest.mark.unit

REQUESTS = (
    {"timestamp": 5_000, "input_length": 1024, "output_length": 5, "hash_ids": [0, 1]},
    {"timestamp": 9_000, "input_length": 1600, "output_length": 1, "hash_ids": [0, 1, 2, 3]},
)
KEYS = [
    "trace",
    "dataset",
    "rate",
    "reuse",
    "seed",
    "prefill",
    "decode",
    "coupled",
    "policy",
    "admission",
    "speedup",
    "model",
    "efficiency",
    "pool_tokens",
    "ssd_tokens",
    "eviction",
    "step_tokens",
    "conductors",
    "replication",
    "balancing_threshold",
    "adaptive",
    "target_share",
    "failures",
    "joins",
    "ttft_s_max",
    "tbt_s_max",
    "tbt_measure",
    "requests",
    "served",
    "rejected",
    "in_targets",
    "ttft_in_target",
    "tbt_in_target",
    "duration_s",
    "goodput_per_s",
    "ttft_s",
    "ttft_error",
    "tbt_s",
    "hit_rate",
    "priorities",
    "losses",
    "resumed",
    "recomputed_tokens",
    "preempted",
    "evicted_blocks",
    "moved_bytes",
    "copied_prefixes",
    "busy",
    "events",
    "load",
]
RESULT_KEYS = [
    "index",
    "arrived_s",
    "prompt_tokens",
    "output_tokens",
    "attempts",
    "rejected",
    "ttft_s",
    "predicted_ttft_s",
    "tbt_s",
    "done_at_s",
    "prefill",
    "decode",
    "cached_tokens",
    "priority",
    "losses",
    "resumed",
    "recomputed_tokens",
]
MESSAGES_S = 6 * 0.0005
"""Of a request from its arrival to its first token."""


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, REQUESTS)))
    return ["simulate", "cluster", "--trace", str(path), "--prefill", "2", "--decode", "1"]


def printed(words, capsys):
    assert main([*words, "--json"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return json.loads(out)


def test_json_is_one_object_with_the_documented_keys(words, capsys):
    found = printed(words, capsys)
    assert list(found) == KEYS
    assert (found["prefill"], found["decode"], found["coupled"]) == (2, 1, 0)
    assert (found["policy"], found["admission"], found["model"]) == ("joint", "predictive", "llama2-70b-a800")
    assert (found["requests"], found["served"], found["rejected"]) == (2, 2, {})
    # 1,024 of 2,624 prompt tokens.
    assert found["hit_rate"] == pytest.approx(1024 / 2624)
    assert list(found["ttft_s"]) == ["mean", "p50", "p90", "p99", "max"]
    assert list(found["busy"]) == ["prefill-0", "prefill-1", "decode-2"]


def test_priorities_are_counted_apart_and_losses_are_told(words, capsys, tmp_path):
    lines = [REQUESTS[0] | {"priority": 3}, REQUESTS[1]]
    (tmp_path / "trace.jsonl").write_text("\n".join(map(json.dumps, lines)))
    found = printed([*words, "--fail", "decode-2@0.075:0.2", "--per-request"], capsys)
    assert list(found["priorities"]) == ["3", "0"]
    # Its client saw a pause.
    assert found["priorities"]["3"] == {"requests": 1, "served": 1, "in_targets": 0}
    assert [result["priority"] for result in found["per_request"]] == [3, 0]
    assert found["losses"] == sum(result["losses"] for result in found["per_request"]) == 1
    assert found["recomputed_tokens"] > 0


def test_the_table_has_priorities_and_losses_where_there_are_any(words, capsys, tmp_path):
    assert main(words) == 0
    plain = capsys.readouterr().out
    assert "priority" not in plain
    assert "losses" not in plain
    lines = [REQUESTS[0] | {"priority": 3}, REQUESTS[1]]
    (tmp_path / "trace.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert main([*words, "--fail", "decode-2@0.075:0.2"]) == 0
    told = dict(line.split("  ", 1) for line in capsys.readouterr().out.splitlines())
    assert told["priority 3"].strip() == "1, 1 served (100.0%), 0 in both targets"
    assert told["priority 0"].strip() == "1, 1 served (100.0%), 1 in both targets"
    found = printed([*words, "--fail", "decode-2@0.075:0.2"], capsys)
    assert told["losses"].strip() == (
        f"1 of an instance under a request, {found['resumed']} went on elsewhere after a first token, "
        f"{found['recomputed_tokens']} tokens computed again"
    )


def test_all_flags_of_the_cluster_are_in_the_object(words, capsys):
    flags = ["--eviction", "length_aware", "--step-tokens", "1024", "--balancing-threshold", "2.5"]
    found = printed([*words, *flags], capsys)
    assert [found[key] for key in ("eviction", "step_tokens", "balancing_threshold")] == [
        "length_aware",
        1024,
        2.5,
    ]


def test_each_request_is_told_where_that_is_asked_for(words, capsys):
    results = printed([*words, "--per-request"], capsys)["per_request"]
    assert [list(result) for result in results] == [RESULT_KEYS] * 2
    assert [result["arrived_s"] for result in results] == [0.0, 4.0]
    assert [result["cached_tokens"] for result in results] == [0, 1024]
    assert results[0]["tbt_s"] > 0
    assert results[1]["tbt_s"] is None


def test_what_changes_the_cluster_changes_the_result(words, capsys):
    mean_s = printed(words, capsys)["ttft_s"]["mean"]
    slower_s = printed([*words, "--efficiency", "0.5"], capsys)["ttft_s"]["mean"]
    assert slower_s == pytest.approx(2 * (mean_s - MESSAGES_S) + MESSAGES_S)
    assert printed([*words, "--no-reuse"], capsys)["hit_rate"] == 0.0
    assert printed([*words, "--speedup", "2", "--per-request"], capsys)["per_request"][1]["arrived_s"] == 2.0
    assert printed([*words, "--requests", "1"], capsys)["requests"] == 1


def test_a_rejection_is_counted_by_its_reason(words, capsys):
    found = printed([*words, "--ttft-s", "0.01", "--per-request"], capsys)
    assert found["rejected"] == {"ttft": 2}
    assert found["ttft_s"] is None
    assert found["per_request"][0]["ttft_s"] is None


def test_the_same_arguments_print_the_same_bytes(words, capsys):
    texts = []
    for _ in range(2):
        main([*words, "--json", "--per-request", "--seed", "7"])
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]


def test_the_table_names_measures(words, capsys):
    assert main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split(maxsplit=1) == ["requests", "2, 2 served, 0 rejected"]
    assert any(line.startswith("TTFT s") and "p90" in line for line in lines)


@pytest.mark.parametrize(
    ("more", "status", "said"),
    [
        (["--policy", "magic"], 2, "--policy"),
        (["--speedup", "0"], 2, "--speedup"),
        (["--efficiency", "1.5"], 2, "--efficiency"),
        (["--step-tokens", "100"], 2, "--step-tokens"),
        (["--decode", "0"], 2, "--prefill and --decode must both be at least 1, or --coupled must be"),
        (["--coupled", "4097"], 2, "--coupled"),
        (["--fail", "prefill-0"], 2, "--fail"),
        (["--fail", "prefill-0@soon"], 2, "prefill-0@60"),
        (
            ["--fail", "decode-1@1"],
            2,
            "'decode-1' is no instance, there are prefill-0 to prefill-1, decode-2",
        ),
        (["--fail", "prefill-0@2:1"], 2, "prefill-0 back at 1.0 s"),
        (["--join", "nobody@1"], 2, "'nobody' is no instance, there are prefill-0 to prefill-1, decode-2"),
        (["--join", "prefill-0@1", "--join", "prefill-0@2"], 2, "prefill-0 comes twice"),
        (["--conductors", "0"], 2, "--conductors"),
        (["--trace", "/nonexistent"], 1, "error: /nonexistent: No such file or directory\n"),
        (
            ["--html", "/nonexistent/page"],
            1,
            "/nonexistent/page cannot be written: there is no folder /nonexi",
        ),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(words, capsys, more, status, said):
    try:
        found = main([*words, *more])
    except SystemExit as ended:
        found = ended.code
    assert found == status
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_a_trace_that_would_take_for_ever_is_refused_in_one_line(capsys, tmp_path):
    trace = tmp_path / "years.jsonl"
    years_ms = 3 * 365 * 86_400_000
    late = [REQUESTS[0] | {"timestamp": 0}, REQUESTS[1] | {"timestamp": years_ms}]
    trace.write_text("\n".join(map(json.dumps, late)))
    for words in (["simulate", "--coupled", "1"], ["plan", "--instances", "1"]):
        assert main([*words, "--trace", str(trace)]) == 1
        error = capsys.readouterr().err
        assert "arrivals must not take more than 1e+07 s" in error
        assert error.count("\n") == 1


def test_instances_fail_and_join_when_they_are_told_to(words, capsys):
    told = ["--fail", "prefill-0@1:2.5", "--fail", "prefill-1@6", "--join", "decode-2@0.5"]
    found = printed([*words, *told], capsys)
    assert found["failures"] == [
        {"instance": "prefill-0", "at_s": 1.0, "back_at_s": 2.5},
        {"instance": "prefill-1", "at_s": 6.0, "back_at_s": None},
    ]
    assert found["joins"] == [{"instance": "decode-2", "at_s": 0.5}]
    # With no decode there at all the first request finds no place.
    assert found["rejected"] != {}
    # Both that prefill are gone before the second one comes.
    nobody = printed([*words, "--fail", "prefill-0@1", "--fail", "prefill-1@1"], capsys)
    assert (nobody["served"], sum(nobody["rejected"].values())) == (1, 1)


def test_several_conductors_and_an_ssd_serve_the_same(words, capsys):
    found = printed([*words, "--conductors", "3", "--ssd-tokens", "51200", "--pool-tokens", "512"], capsys)
    assert (found["conductors"], found["ssd_tokens"], found["served"]) == (3, 51200, 2)


def test_hot_prefixes_are_copied_where_that_is_asked_for(tmp_path, capsys):
    shared = [*range(20)]
    lines = [
        {
            "timestamp": 1000 * number,
            "input_length": 512 * 21,
            "output_length": 2,
            "hash_ids": [*shared, 100 + number],
        }
        for number in range(30)
    ]
    trace = tmp_path / "hot.jsonl"
    trace.write_text("\n".join(map(json.dumps, lines)))
    words = ["simulate", "--trace", str(trace), "--prefill", "3", "--decode", "1"]
    assert printed(words, capsys)["copied_prefixes"] == 0
    found = printed([*words, "--replication"], capsys)
    assert found["replication"] is True
    assert found["copied_prefixes"] > 0


def test_the_measure_of_gaps_is_the_one_asked_for(words, capsys):
    tail, p90, mean = (
        printed([*words, "--tbt-measure", measure], capsys)["tbt_s"]["mean"]
        for measure in ("tail", "p90", "mean")
    )
    assert tail >= p90 > mean


def test_the_word_cluster_can_be_left_out(words, capsys):
    named = printed(words, capsys)
    assert printed(["simulate", *words[2:]], capsys) == named


def test_a_data_set_stands_for_a_trace(capsys):
    words = ["simulate", "cluster", "--dataset", "leval", "--requests", "40", "--coupled", "2"]
    found = printed([*words, "--rate", "4", "--seed", "3", "--per-request"], capsys)
    assert (found["trace"], found["dataset"], found["rate"], found["seed"]) == (None, "leval", 4.0, 3)
    assert found["requests"] == 40
    assert found["hit_rate"] > 0.2
    faster = printed([*words, "--rate", "8", "--seed", "3", "--per-request"], capsys)
    last_s, faster_last_s = (one["per_request"][-1]["arrived_s"] for one in (found, faster))
    assert faster_last_s == pytest.approx(last_s / 2, abs=0.002)


def test_a_data_set_needs_a_rate_and_a_trace_has_its_own(words, capsys):
    assert main(["simulate", "--dataset", "arxiv", "--coupled", "1"]) == 2
    assert "--rate" in capsys.readouterr().err
    assert main([*words, "--rate", "2"]) == 2
    assert "--speedup" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([*words, "--dataset", "arxiv"])


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_one_line_of_a_terminal(monkeypatch):
    clock = iter([0.0, INTERVAL_S / 2, INTERVAL_S, INTERVAL_S * 1.5, INTERVAL_S * 2.5])
    monkeypatch.setattr("moonpool.simulations.progress.monotonic", lambda: next(clock))
    terminal = Terminal()
    with Progress(4, "requests", terminal) as progress:
        for done in range(1, 5):
            progress.show(done)
    assert "1 of 4" not in terminal.getvalue()
    assert "2 of 4 requests (50%)" in terminal.getvalue()
    assert "4 of 4 requests (100%)" in terminal.getvalue()
    assert "\n" not in terminal.getvalue()
    assert terminal.getvalue().endswith("\r\x1b[K")


def test_parts_that_are_done_are_lines_where_there_is_no_terminal():
    for out, said in ((io.StringIO(), "1 of 4 splits, 0 s: 1P+3D\n"), (Terminal(), "\r\x1b[K")):
        with Progress(4, "splits", out) as progress:
            progress.show(0, "1P+3D")
            progress.finished(1, "1P+3D")
        assert out.getvalue() == said
