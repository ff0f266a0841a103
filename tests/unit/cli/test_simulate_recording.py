"""`moonpool simulate decisions` and `simulate recording`: what they print, and what they refuse."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from tests.support.recordings import ASK_LAG_S, UNIX_S, small_recording, written

from cluster.folds import Decided
from cluster.recording import Line
from moonpool.__main__ import main
from policy.choice import Strategy

pytestmark = pytest.mark.unit

ASKED_S = (0.99 - ASK_LAG_S, 3.49 - ASK_LAG_S)
"""Since the recording began."""


def replayed(folder: Path, *ttfts_s: float, began_s: float = 0.5) -> Path:
    requests = [
        {
            "sent_s": asked_s - began_s - 0.004,
            "outcome": "served",
            "ttft_s": ttft_s,
            "tbt_s": None,
            "cached_tokens": 16 * place,
        }
        for place, (asked_s, ttft_s) in enumerate(zip(ASKED_S, ttfts_s, strict=False))
    ]
    path = folder / "replay.json"
    path.write_text(json.dumps({"began_unix_s": UNIX_S + began_s, "span_s": 4.0, "per_request": requests}))
    return path


def test_decisions_as_recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path, small_recording())
    assert main(["simulate", "decisions", "--json", "--recording", str(path)]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == {
        "recording": str(path),
        "instance": "conductor-1",
        "complete": True,
        "end": "closed",
        "span_s": 5.0,
        "policy": None,
        "admission": None,
        "decisions": 2,
        "placed": 2,
        "rejected": 0,
        "identical": 2,
        "different": 0,
        "elsewhere": 0,
        "differences": [],
    }


def altered(lines: list[Line]) -> list[Line]:
    """With the first decision put where it was not."""
    place = next(place for place, line in enumerate(lines) if isinstance(line.entry, Decided))
    entry = lines[place].entry
    assert isinstance(entry, Decided)
    assert entry.placement is not None
    lines[place] = replace(
        lines[place], entry=replace(entry, placement=replace(entry.placement, decode="d-z"))
    )
    return lines


def test_a_decision_that_comes_out_otherwise_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path, altered(small_recording())[:-1])
    assert main(["simulate", "decisions", "--json", "--recording", str(path)]) == 1
    printed = json.loads(capsys.readouterr().out)
    assert (printed["complete"], printed["identical"], printed["elsewhere"]) == (False, 1, 1)
    (difference,) = printed["differences"]
    assert (difference["recorded"]["decode"], difference["remade"]["decode"]) == ("d-z", "d-a")
    assert main(["simulate", "decisions", "--recording", str(path)]) == 1
    told = capsys.readouterr().out
    assert "cut off" in told
    assert "1.000 s first: p-" in told


def test_those_elsewhere_come_first_and_the_others_say_what_differs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = small_recording()
    first, second = [place for place, line in enumerate(lines) if isinstance(line.entry, Decided)]
    for place, change in ((first, {"tbt_ms_max": 70.0}), (second, {"decode": "d-z"})):
        entry = lines[place].entry
        assert isinstance(entry, Decided)
        assert entry.placement is not None
        lines[place] = replace(
            lines[place], entry=replace(entry, placement=replace(entry.placement, **change))
        )
    path = written(tmp_path, lines)
    assert main(["simulate", "decisions", "--recording", str(path)]) == 1
    elsewhere, in_place = capsys.readouterr().out.splitlines()[-2:]
    assert " and d-z, " in elsewhere
    assert "; now p-" in elsewhere
    assert in_place.startswith("1.000 s first: p-")
    assert in_place.endswith(": not elsewhere, but tbt_ms_max 70.0, now None")


def test_another_policy_may_decide_otherwise(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = small_recording()
    lines += [
        Line(
            54.6 + number / 1e3,
            replace(line.entry, request=replace(line.entry.request, request_id=f"r{number}")),
        )
        for number, line in enumerate([line for line in lines if isinstance(line.entry, Decided)] * 10)
        if isinstance(line.entry, Decided)
    ]
    path = written(tmp_path, [line for line in lines if line.at_s != 55.0])
    arguments = ["simulate", "decisions", "--json", "--recording", str(path), "--policy", Strategy.RANDOM]
    assert main([*arguments, "--admission", "none"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert (printed["policy"], printed["admission"], printed["decisions"]) == ("random", "none", 22)
    assert 0 < printed["elsewhere"] <= printed["different"]


def test_a_run_beside_what_came_of_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, replay = written(tmp_path, small_recording()), replayed(tmp_path, 0.03, 0.075)
    arguments = ["simulate", "recording", "--recording", str(path), "--replay", str(replay)]
    assert main([*arguments, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert [printed[key] for key in ("requests", "replayed", "compared", "unended")] == [2, 2, 2, 1]
    assert [printed[key] for key in ("prefill", "decode", "coupled")] == [2, 1, 0]
    assert (printed["message_ms"], printed["gateway_ms"]) == pytest.approx((1.0, 4.0))
    # 50 and 18 tokens of 1 ms, six messages of 1 ms, 4 ms at the gateway.
    simulated, live = printed["simulated"], printed["live"]
    assert (simulated["ttft_ms"]["p50"], simulated["ttft_ms"]["p90"]) == pytest.approx((28.0, 60.0))
    assert (live["ttft_ms"]["p50"], live["ttft_ms"]["p90"]) == pytest.approx((30.0, 75.0))
    assert (simulated["cached_tokens"], live["cached_tokens"]) == (32, 16)
    assert printed["ttft_ratio"] == pytest.approx({"p50": 28 / 30, "p90": 0.8})
    assert main(arguments) == 0
    told = capsys.readouterr().out
    assert "p50 0.93, p90 0.80" in told
    assert "served live / simulated  2 / 2\n" in told
    assert "2 served by both\n" in told


def test_only_what_both_served_is_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, replay = written(tmp_path, small_recording()), replayed(tmp_path, 0.03, 0.075)
    sent = json.loads(replay.read_text())
    sent["per_request"][0] |= {"outcome": "rejected", "ttft_s": None, "cached_tokens": None}
    replay.write_text(json.dumps(sent))
    arguments = ["simulate", "recording", "--recording", str(path), "--replay", str(replay)]
    assert main([*arguments, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert [printed[key] for key in ("requests", "replayed", "compared")] == [2, 2, 1]
    simulated, live = printed["simulated"], printed["live"]
    assert (simulated["served"], live["served"]) == (2, 1)
    assert simulated["ttft_ms"]["n"] == live["ttft_ms"]["n"] == 1
    # The second one alone, on both sides.
    assert (simulated["ttft_ms"]["p50"], live["ttft_ms"]["p50"]) == pytest.approx((28.0, 75.0))
    assert (simulated["cached_tokens"], live["cached_tokens"]) == (32, 16)
    assert main(arguments) == 0
    told = capsys.readouterr().out
    assert "served live / simulated  1 / 2\n" in told
    assert "1 served by both; not the same were served: 0 only live, 1 only simulated\n" in told


def test_a_run_by_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path, small_recording())
    assert main(["simulate", "recording", "--json", "--recording", str(path)]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert (printed["live"], printed["ttft_ratio"], printed["replay"]) == (None, None, None)
    assert (printed["replayed"], printed["compared"], printed["simulated"]["served"]) == (None, 2, 2)
    assert printed["simulated"]["ttft_ms"]["p90"] == pytest.approx(56.0)


def test_a_replay_of_another_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path, small_recording())
    arguments = ["simulate", "recording", "--recording", str(path), "--replay"]
    assert main([*arguments, str(replayed(tmp_path, 0.03))]) == 1
    assert "replay: 1 requests sent; of its time the recording has 2" in capsys.readouterr().err
    assert main([*arguments, str(replayed(tmp_path, 0.03, 0.04, began_s=100.0))]) == 1
    assert "the recording has 0" in capsys.readouterr().err
    (tmp_path / "replay.json").write_text('{"began_unix_s": 1.0, "span_s": 1.0}')
    assert main([*arguments, str(tmp_path / "replay.json")]) == 1
    assert "missing required field `per_request`; it must be" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["decisions", "recording"])
def test_a_damaged_recording_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    path = written(tmp_path, small_recording())
    path.write_bytes(path.read_bytes().replace(b'"prompt_tokens":50', b'"prompt_tokens":"many"', 1))
    assert main(["simulate", command, "--recording", str(path)]) == 1
    told = capsys.readouterr().err
    assert f"{path}:6: body of decided: " in told
    assert "$.request.prompt_tokens" in told
    assert main(["simulate", command, "--recording", str(tmp_path / "none")]) == 1
    assert capsys.readouterr().err.endswith(f"error: {tmp_path / 'none'}: No such file or directory\n")
