"""A recorded live run: its decisions come out of the recording as they were, and it can be simulated."""

import json
from pathlib import Path

import pytest
from tests.integration.test_replay import REQUESTS, SCALE, SPEEDUP, conversations
from tests.support.stack import moonpool, running_stack

from cluster.folds import Decided
from cluster.recording import read_recording

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

STACK = ("--model", "tiny", "--prefill", "2", "--decode", "2")


def test_a_recorded_run_is_placed_again_as_it_was(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, trace, replay = tmp_path / "recordings", tmp_path / "trace.jsonl", tmp_path / "replay.json"
    conversations(trace)
    monkeypatch.setenv("MOONPOOL_RECORD_FOLDER", str(folder))
    with running_stack(home, "recorded", *STACK) as stack:
        flags = [
            "--trace",
            str(trace),
            "--scale",
            str(SCALE),
            "--speedup",
            str(SPEEDUP),
            "--name",
            stack.name,
        ]
        replayed = stack.command("replay", "--json", "--per-request", *flags, timeout_s=240)
        assert replayed.returncode == 0, replayed.stderr
    replay.write_text(replayed.stdout)
    (recording,) = folder.iterdir()

    decided = [line.entry for line in read_recording(recording) if isinstance(line.entry, Decided)]
    placements = [one.placement for one in decided if one.placement is not None]
    assert len({one.request_id for one in placements}) == REQUESTS
    assert {one.prefill for one in placements} == {"prefill-0", "prefill-1"}
    assert {one.decode for one in placements} == {"decode-0", "decode-1"}
    assert any(one.matches for one in decided), "no prefix was ever found"

    again = moonpool(home, "simulate", "decisions", "--json", "--recording", str(recording))
    told = json.loads(again.stdout)
    assert (again.returncode, told["complete"], told["different"]) == (0, True, 0), told
    assert told["identical"] == told["decisions"] == len(decided)
    by_chance = moonpool(
        home, "simulate", "decisions", "--json", "--recording", str(recording), "--policy", "random"
    )
    assert json.loads(by_chance.stdout)["elsewhere"] > 0

    flags = ["--recording", str(recording), "--replay", str(replay)]
    simulated = moonpool(home, "simulate", "recording", "--json", *flags)
    assert simulated.returncode == 0, simulated.stderr
    told = json.loads(simulated.stdout)
    print(json.dumps(told, indent=1))
    assert (told["compared"], told["unended"], told["prefill"], told["decode"]) == (REQUESTS, 0, 2, 2)
    assert told["simulated"]["served"] == told["live"]["served"] == REQUESTS
    # How close the times are depends on what else this machine does: docs/simulator.md has measured ones.
    assert told["ttft_ratio"]["p50"] > 0
