"""What `moonpool bench place` measures and says, in sizes that take no time."""

import json

import pytest

from kvindex.core import InstanceId
from moonpool.__main__ import main
from moonpool.benchmarks import loaded_cluster, place
from moonpool.benchmarks.loaded_cluster import BOOKINGS, LoadedCluster
from moonpool.errors import CommandError
from policy.core import Placement, Role

pytestmark = pytest.mark.unit

NAMES = tuple(InstanceId(f"decode-{number}") for number in range(6))


def test_each_step_of_a_decision_is_told_once() -> None:
    results = place.measure(6, prompt_blocks=12, queued=1, running=2, repeats=3, decisions=4)
    said = [result.metric for result in results]
    assert said == [
        *("match_p50", "match_p99", "place_p50", "place_p99"),
        *("match_and_place_p50", "match_and_place_p99", "match_and_place_cpu_p50", "match_and_place_cpu_p99"),
        *("fold_load_p50", "fold_load_p99", "fold_booking_p50", "fold_booking_p99"),
    ]
    assert all(result.n == 3 and 0 < result.min <= result.value <= result.max for result in results)
    by_metric = {result.metric: result for result in results}
    assert by_metric["match_and_place_p50"].value > by_metric["match_p50"].value
    assert by_metric["match_p50"].context["prompt_blocks"] == 12


def test_one_json_object_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--instances", "2", "--prompt-blocks", "4", "--repeats", "1", "--running", "1"]
    assert main(["bench", "place", "--json", *arguments]) == 0
    said = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {(one["bench"], one["case"], one["unit"]) for one in said} == {("place", "2_instances", "us")}


def test_what_is_not_placed_is_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loaded_cluster, "BLOCKS", 4)
    with pytest.raises(CommandError, match="not placed: no_instance"):
        place.measure(2, prompt_blocks=8, queued=0, running=1, repeats=1, decisions=1)


def test_the_cluster_is_at_work_and_goes_on() -> None:
    cluster = LoadedCluster(NAMES, queued=3, running=5, seed=1)
    by_role = {
        role: [view for view in cluster.view.instances.values() if role in view.roles]
        for role in (Role.PREFILL, Role.DECODE)
    }
    assert [len(view.load.queued) for view in by_role[Role.PREFILL]] == [3, 3, 3]
    assert [len(view.load.running) for view in by_role[Role.DECODE]] == [5, 5, 5]

    for _ in range(BOOKINGS + 10):
        request = cluster.request(b"", prompt_tokens=100)
        cluster.book(Placement(request.request_id, 1, NAMES[0], NAMES[1]), prompt_tokens=100)
    assert len(cluster.view.bookings) == BOOKINGS
    assert request.request_id in cluster.view.bookings

    seen = {name: view.load_seq for name, view in cluster.view.instances.items()}
    for _ in NAMES:
        cluster.fold(cluster.next_snapshot())
    assert {name: view.load_seq for name, view in cluster.view.instances.items()} == {
        name: seq + 1 for name, seq in seen.items()
    }
