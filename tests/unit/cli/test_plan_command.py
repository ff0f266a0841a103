"""`moonpool plan`: what it prints, what it draws, and what it refuses."""

import json
import re

import pytest

from moonpool.__main__ import main
from moonpool.simulations.plan_report import as_page, as_table, best_line, curves
from simulator.planning import Planned, Split, Trial
from simulator.results import Summary

pytestmark = pytest.mark.unit

WORDS = ["plan", "--dataset", "arxiv", "--requests", "40", "--ttft-s", "5", "--instances", "2"]
KEYS = [
    "trace",
    "dataset",
    "rate",
    "reuse",
    "seed",
    "requests",
    "gpus",
    "policy",
    "admission",
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
    "ttft_s_max",
    "tbt_s_max",
    "tbt_measure",
    "attainment_min",
    "tolerance",
    "best",
    "splits",
]
SPLIT_KEYS = [
    "gpus_per_instance",
    "prefill",
    "decode",
    "coupled",
    "gpus",
    "speedup",
    "offered_per_s",
    "attainment",
    "goodput_per_s",
    "goodput_per_gpu_s",
    "hit_rate",
    "ttft_s",
    "tbt_s",
    "simulations",
    "exact",
]


def printed(words, capsys):
    assert main([*words, "--json"]) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert err.count("\n") == len(found["splits"])
    return found


def planned(split: Split, goodput_per_s: float | None) -> Planned:
    if goodput_per_s is None:
        return Planned(split, None, 7, True)
    told = Summary(10, 10, {}, 10, 10, 10, 10.0, 1.0, None, None, None, 0.25)
    return Planned(split, Trial(2.0, goodput_per_s, told), 5, exact=split.gpus_per_instance != 16)


PLANNED = [
    planned(Split(8, prefill=1, decode=3), 3.2),
    planned(Split(8, prefill=3, decode=1), 6.4),
    planned(Split(8, coupled=4), 4.8),
    planned(Split(16, prefill=1, decode=1), 1.6),
    planned(Split(16, coupled=2), None),
]


def test_json_is_one_object_with_the_documented_keys(capsys):
    found = printed(WORDS, capsys)
    assert list(found) == KEYS
    assert (found["gpus"], found["requests"], found["admission"]) == (16, 40, "none")
    assert [list(split) for split in found["splits"]] == [SPLIT_KEYS] * 2
    assert [(split["prefill"], split["coupled"]) for split in found["splits"]] == [(1, 0), (0, 2)]
    goodputs = [split["goodput_per_gpu_s"] for split in found["splits"]]
    assert found["best"] == goodputs.index(max(goodputs))
    for split in found["splits"]:
        assert split["attainment"] >= 0.9
        assert split["goodput_per_s"] == pytest.approx(split["offered_per_s"] * split["attainment"])


def test_a_fixed_rate_is_simulated_once(capsys):
    found = printed([*WORDS, "--rate", "30", "--splits", "coupled"], capsys)
    (split,) = found["splits"]
    assert (split["simulations"], split["coupled"], found["rate"]) == (1, 2, 30.0)
    assert split["attainment"] < 0.9


def test_a_trace_is_searched_by_its_speed(tmp_path, capsys):
    lines = [
        {
            "timestamp": 500 * number,
            "input_length": 4096,
            "output_length": 20,
            "hash_ids": [*range(9 * number, 9 * number + 8)],
        }
        for number in range(20)
    ]
    trace = tmp_path / "trace.jsonl"
    trace.write_text("\n".join(map(json.dumps, lines)))
    words = ["plan", "--trace", str(trace), "--instances", "1", "--ttft-s", "1"]
    (searched,) = printed(words, capsys)["splits"]
    assert searched["offered_per_s"] == pytest.approx(2.0 * searched["speedup"])
    (fixed,) = printed([*words, "--speedup", "1"], capsys)["splits"]
    assert (fixed["speedup"], fixed["simulations"]) == (1.0, 1)


def test_parallelism_tries_each_number_of_gpus(capsys):
    words = ["plan", "--dataset", "arxiv", "--requests", "20", "--gpus", "16", "--ttft-s", "5"]
    found = printed([*words, "--parallelism", "4,8", "--simulations-max", "2"], capsys)
    splits = [(one["gpus_per_instance"], one["prefill"], one["coupled"]) for one in found["splits"]]
    assert splits == [(4, 1, 0), (4, 2, 0), (4, 3, 0), (4, 0, 4), (8, 1, 0), (8, 0, 2)]
    assert all(one["gpus"] == 16 and one["simulations"] <= 2 for one in found["splits"])


def test_the_table_has_a_line_for_each_split_and_the_best():
    lines = as_table(PLANNED, fixed=False).splitlines()
    assert len(lines) == 1 + len(PLANNED) + 1
    assert "highest rate/s" in lines[0]
    assert lines[1].split()[:6] == ["1P+3D", "8", "3.200", "100.0%", "3.200", "0.1000"]
    assert lines[4].split()[2:5] == ["1.600", "or", "more"]
    assert lines[5].split()[3:5] == ["-", "-"]
    assert lines[-1] == "best: 3P+1D of 8 GPUs each, 0.2000 requests/s a GPU within both targets"
    assert "none" in best_line([PLANNED[-1]])


def test_the_page_shows_the_curve():
    page = as_page("Splits", PLANNED, fixed=False)
    assert page.startswith("<!doctype html>")
    assert [one.name for one in curves(PLANNED)] == ["8 GPUs an instance", "16 GPUs an instance"]
    assert curves(PLANNED)[0].points == [(0.25, 0.1), (0.75, 0.2)]
    dots = re.findall(
        r"<title>8 GPUs an instance, share of the instances that prefill ([\d.]+): ([\d.]+)<", page
    )
    assert dots == [("0.25", "0.1"), ("0.75", "0.2")]
    assert page.count('class="bar"') == len(PLANNED)
    assert "<td>4 coupled</td>" in page


def test_the_command_writes_the_page_and_the_table(tmp_path, capsys):
    page = tmp_path / "plan.html"
    assert main([*WORDS, "--rate", "1", "--html", str(page)]) == 0
    out, err = capsys.readouterr()
    # Nothing was searched.
    for text in (out, page.read_text()):
        assert "rate/s" in text
        assert "highest" not in text
    first, second = err.splitlines()
    assert first.startswith("1 of 2 splits, ")
    assert ": 1P+1D of 8 GPUs each, " in first
    assert second.startswith("2 of 2 splits, ")
    assert "best: " in out
    assert out.splitlines()[-1] in page.read_text()


@pytest.mark.parametrize(
    ("more", "status", "said"),
    [
        (["--parallelism", "8"], 2, "--parallelism is for --gpus"),
        (["--speedup", "2"], 2, "--speedup is for --trace"),
        (["--splits", "3:1"], 2, "3:1 is no split of 16 GPUs"),
        (["--splits", "3/1"], 2, "--splits"),
        (["--splits-max", "1"], 2, "2 splits of 16 GPUs, must be 1 to --splits-max 1"),
        (["--attainment", "2"], 2, "--attainment"),
        (["--gpus", "8"], 2, "--gpus"),
        (["--requests", "1"], 1, "all arrive at once"),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(capsys, more, status, said):
    try:
        found = main([*WORDS, *more])
    except SystemExit as ended:
        found = ended.code
    assert found == status
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_weights_that_do_not_fit_are_told_before_anything_is_tried(capsys):
    words = ["plan", "--dataset", "arxiv", "--requests", "5", "--gpus", "4"]
    assert main([*words, "--parallelism", "1,2"]) == 1
    assert "must be at least 2" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([*words, "--parallelism", "3"])
    assert "must be of 1, 2, 4" in capsys.readouterr().err
    assert main(words) == 2
    assert "0 splits of 4 GPUs" in capsys.readouterr().err
