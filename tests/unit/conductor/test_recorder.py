import asyncio
import errno
import io
import weakref
from functools import partial
from pathlib import Path

import pytest
from tests.support.eventually import Clock, eventually
from tests.support.full_disk import failing
from tests.support.views import P1, P2, queued, request, snapshot
from tests.unit.conductor.test_scheduler import HASHES, QUAD, Conductor, Stage

from cluster.errors import ConfigError
from cluster.folds import Decided, DecisionHeard, LoadHeard, Registered
from cluster.logs import Level, Logger
from cluster.metrics import ServiceMetrics
from cluster.recording import Begun, Ended, Line, read_recording
from conductor import recorder as recorder_module
from conductor.metrics import ConductorMetrics
from conductor.recorder import FileRecorder
from kvindex.core import InstanceId, InstanceMatch
from policy.core import InstanceState, LoadSnapshot, Placement
from simulator.recorded_decisions import remade_decisions

pytestmark = pytest.mark.unit

BOOKING_TTL_S = 10.0
"""As the conductor's of test_scheduler."""
FOLD = LoadHeard(snapshot("p1"), 1, 1)


class KnownSnapshot(LoadSnapshot):
    """One of which can be told whether somebody still has it."""


class Recording:
    """A recorder with what it counts and logs."""

    def __init__(self, folder: Path, bytes_max: int = 1 << 24) -> None:
        self.log = io.StringIO()
        self.metrics = ServiceMetrics()
        self.recorder = FileRecorder(
            folder,
            InstanceId("conductor-1"),
            7,
            Clock(),
            ConductorMetrics(self.metrics.registry),
            Logger(Level.INFO, self.log),
            booking_ttl_s=BOOKING_TTL_S,
            bytes_max=bytes_max,
        )

    def value(self, name: str) -> float:
        return self.metrics.registry.get_sample_value(f"moonpool_conductor_{name}") or 0.0

    def lines(self) -> list[Line]:
        return list(read_recording(self.recorder.path))


def test_writes_what_it_is_told_and_says_how_it_ended(tmp_path: Path):
    recording = Recording(tmp_path / "new" / "folder")
    assert recording.value("recording") == 1
    for number in range(3000):
        recording.recorder.record(FOLD, 100.0 + number)
    recording.recorder.close()
    recording.recorder.record(FOLD, 5000.0)
    begun, *folds, ended = recording.lines()
    assert isinstance(begun.entry, Begun)
    assert [(line.at_s, line.entry) for line in folds] == [(100.0 + number, FOLD) for number in range(3000)]
    assert ended.entry == Ended("closed")
    assert recording.value("recording") == 0
    assert recording.value("recorded_bytes_total") == recording.recorder.path.stat().st_size


def test_ends_where_the_file_is_full(tmp_path: Path):
    recording = Recording(tmp_path, bytes_max=4096)
    for number in range(50):
        recording.recorder.record(FOLD, 100.0 + number)
    recording.recorder.close()
    *_, last, ended = recording.lines()
    assert isinstance(ended.entry, Ended)
    assert ended.entry.reason == "record_bytes_max is reached"
    assert 100.0 < last.at_s < 149.0
    assert 3000 < recording.recorder.path.stat().st_size <= 4096
    assert recording.log.getvalue().count("recording ended") == 1
    assert recording.value("recording") == 0


def test_ends_where_the_disk_is_too_slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """What waits is bounded: nothing is left out in the middle."""
    monkeypatch.setattr(recorder_module, "PENDING_LINES_MAX", 0)
    recording = Recording(tmp_path)
    recording.recorder.record(FOLD, 100.0)
    recording.recorder.record(FOLD, 101.0)
    recording.recorder.close()
    begun, ended = recording.lines()
    assert isinstance(ended.entry, Ended)
    assert "wait to be written" in ended.entry.reason
    assert isinstance(begun.entry, Begun)


def test_a_disk_that_fails_ends_the_recording_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with failing(monkeypatch, "write", errno.ENOSPC):
        recording = Recording(tmp_path)
        recording.recorder.record(FOLD, 100.0)
        recording.recorder.close()
        recording.recorder.record(FOLD, 101.0)
    assert '"level":"warning"' in recording.log.getvalue()
    assert "No space left on device" in recording.log.getvalue()
    assert recording.value("recording") == 0
    assert recording.recorder.path.stat().st_size == 0


def test_what_waits_for_a_disk_that_failed_is_kept_by_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Thousands of snapshots, for as long as the conductor runs."""
    monkeypatch.setattr(recorder_module, "BATCH_LINES_MAX", 1)
    snapshots = [KnownSnapshot(P1, (), InstanceState.SERVING) for _ in range(100)]
    kept = [weakref.ref(one) for one in snapshots]
    with failing(monkeypatch, "write", errno.EFBIG):
        recording = Recording(tmp_path)
        while snapshots:
            recording.recorder.record(LoadHeard(snapshots.pop(), 1, 1), 100.0)
        recording.recorder.close()
    assert [one for one in kept if one() is not None] == []


def test_a_folder_that_cannot_be_is_told_by_its_setting(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"record_folder: .* cannot be written"):
        Recording(tmp_path / "file")


def heard_now(stage: Stage, name: InstanceId) -> bool:
    return stage.conductor.state.current().instances[name].heard_at_s == stage.clock()


async def test_a_conductors_decisions_come_out_of_its_recording(tmp_path: Path):
    """Those of a burst, with prefixes, snapshots and bookings in between, and one that was turned away."""
    recording = Recording(tmp_path)
    stage = Stage(recording.recorder)
    await stage.conductor.start()
    await stage.answer_matches(InstanceMatch(P2, 50), InstanceMatch(P1, 20))
    answers = []
    for round_number in range(4):
        asked = [request(f"r{round_number}-{i}", block_hashes=HASHES) for i in range(8)]
        answers += await asyncio.gather(*(stage.ask(one) for one in asked))
        stage.clock.now_s += 0.7
        name = (P1, P2)[round_number % 2]
        await stage.tell_load(snapshot(name, queued=(queued("other", 500 * round_number),)))
        await eventually(partial(heard_now, stage, name))
    answers.append(await stage.ask(request("none", model="other")))
    recording.recorder.close()
    made = list(remade_decisions(recording.lines()))
    assert [one.recorded for one in made] == answers
    assert all(one.identical for one in made)
    assert len({one.prefill for one in answers if isinstance(one, Placement)}) == 2
    entries = [line.entry for line in recording.lines()]
    assert sum(isinstance(entry, Decided) for entry in entries) == 33
    assert [entry for entry in entries if isinstance(entry, Registered)] == [Registered(tuple(QUAD.values()))]


async def test_what_another_conductor_decided_is_recorded_too(tmp_path: Path):
    """Of two that share the questions, each knows of the other's placements; one records."""
    recording = Recording(tmp_path)
    stage = Stage(recording.recorder)
    await stage.conductor.start()
    other = Conductor(stage.broker, "conductor-2", stage.clock)
    await other.start()
    answers = []
    for number in range(12):
        answers.append(await stage.ask(request(f"r{number}")))
        booked = stage.conductor.state.current
        await eventually(lambda number=number, booked=booked: f"r{number}" in booked().bookings)
        stage.clock.now_s += 0.002
    recording.recorder.close()
    entries = [line.entry for line in recording.lines()]
    heard = [entry.decision.placement for entry in entries if isinstance(entry, DecisionHeard)]
    made = list(remade_decisions(recording.lines()))
    assert heard
    assert made
    assert {one.request_id for one in heard} | {one.recorded.request_id for one in made} == {
        answer.request_id for answer in answers
    }
    assert all(one.identical for one in made)
