from dataclasses import replace

import pytest
from tests.support.recordings import (
    ASK_LAG_S,
    BOOKING_TTL_S,
    LIMITS,
    RECORDS,
    UNIX_S,
    load_line,
    small_recording,
)
from tests.support.simulated_clusters import ROUND_COST

from cluster.folds import Decided, LoadHeard, Registered
from cluster.recording import Line
from policy.choice import Strategy
from policy.core import Placement, Role
from simulator.cluster import simulate_cluster
from simulator.recorded_decisions import remade_decisions
from simulator.recorded_run import NO_TARGET_S, RunError, WorkerLimits, recorded_run
from worker.config import WorkerConfig

pytestmark = pytest.mark.unit

LIMITS_OF_WORKERS = WorkerLimits()


def without(lines: list[Line], kind: type) -> list[Line]:
    return [line for line in lines if not isinstance(line.entry, kind)]


def test_requests_are_those_that_came_with_the_answers_that_they_got() -> None:
    first, second = recorded_run(small_recording(), LIMITS_OF_WORKERS).requests
    assert (first.request_id, first.ended) == ("first", True)
    assert (second.request_id, second.ended) == ("second", False)
    assert first.asked_unix_s == pytest.approx(UNIX_S + 51.0 - 50.0 - 0.01 - ASK_LAG_S)
    assert [one.traced.arrived_ms for one in (first, second)] == [0, 2500]
    assert [one.traced.input_tokens for one in (first, second)] == [50, 50]
    assert [one.traced.output_tokens for one in (first, second)] == [7, 64]
    assert [one.traced.block_ids for one in (first, second)] == [(0, 1, 2), (0, 1, 3)]


def test_the_cluster_is_the_one_that_was_registered() -> None:
    setup = recorded_run(small_recording(), LIMITS_OF_WORKERS).setup
    assert (setup.prefill, setup.decode, setup.coupled, setup.block_tokens) == (2, 1, 0, 16)
    assert (setup.placement, setup.booking_ttl_s) == (LIMITS, BOOKING_TTL_S)
    assert (setup.ttft_s_max, setup.tbt_s_max) == (1.5, NO_TARGET_S)
    assert setup.message_s == pytest.approx(0.001)
    assert (setup.node.cost, setup.node.device_blocks, setup.node.layers) == (ROUND_COST, 4096, 30)
    assert setup.node.kv_bytes_per_token * 16 == setup.block_bytes == 700_000


def test_steps_take_what_they_took_then() -> None:
    """Since the snapshot that told of those before, or a tenth of a second earlier: so late it may have come.
    Snapshots without new steps say nothing."""
    announced = recorded_run(small_recording(), LIMITS_OF_WORKERS).setup.announced
    told = [(one.instance, round(one.at_s, 3), round(one.cost.prefill_per_token_s, 6)) for one in announced]
    first_s = 51.0 - 0.01 - ASK_LAG_S
    assert told == [
        ("prefill-1", 0.0, 1e-3),
        ("decode-2", 0.0, 1e-3),
        ("prefill-0", 0.0, 1e-3),
        ("prefill-0", 0.0, 3e-3),
        ("prefill-0", round(53.999 - 0.1 - first_s, 3), 1e-3),
    ]
    assert announced[3].cost.step_fixed_s == pytest.approx(1.5 * ROUND_COST.step_fixed_s)
    assert announced[3].cost.transfer_fixed_s == ROUND_COST.transfer_fixed_s


def test_what_first_tokens_take_holds_from_the_start_once_it_was_measured() -> None:
    announced = recorded_run(small_recording(), LIMITS_OF_WORKERS).setup.announced
    fixed_s = {(one.instance, one.cost.first_token_fixed_s) for one in announced}
    assert fixed_s == {("prefill-0", 0.02), ("prefill-1", 0.0), ("decode-2", 0.0)}


def test_it_is_simulated_with_the_prefixes_that_were_shared() -> None:
    run = recorded_run(small_recording(), LIMITS_OF_WORKERS)
    results = simulate_cluster([one.traced for one in run.requests], run.setup).results
    served = [one.served for one in results if one.served is not None]
    # By the instance whose first tokens take no more than their six messages.
    assert [one.prefill for one in served] == ["prefill-1", "prefill-1"]
    assert [one.ttft_s for one in served] == pytest.approx([0.050 + 0.006, 0.018 + 0.006])
    assert [one.cached_tokens for one in served] == [0, 32]


def test_coupled_instances_are_simulated_as_such() -> None:
    both = tuple(replace(record, roles=(Role.PREFILL, Role.DECODE)) for record in RECORDS)
    lines = [
        replace(line, entry=Registered(both)) if isinstance(line.entry, Registered) else line
        for line in small_recording()
    ]
    setup = recorded_run(lines, LIMITS_OF_WORKERS).setup
    assert (setup.prefill, setup.decode, setup.coupled, setup.decode_node) == (0, 0, 3, None)
    assert {one.instance for one in setup.announced} == {"coupled-0", "coupled-1", "coupled-2"}


def test_a_request_that_was_placed_twice_is_one() -> None:
    lines = small_recording()
    again = next(line for line in lines if isinstance(line.entry, Decided))
    assert isinstance(again.entry, Decided)
    second = replace(again.entry, request=replace(again.entry.request, attempt=1, prompt_tokens=60))
    run = recorded_run([*lines[:-1], Line(54.9, second)], LIMITS_OF_WORKERS)
    assert [(one.request_id, one.traced.input_tokens) for one in run.requests] == [
        ("first", 50),
        ("second", 50),
    ]


def test_what_cannot_be_simulated_is_told() -> None:
    lines = small_recording()
    with pytest.raises(RunError, match="no decision"):
        recorded_run(without(lines, Decided), LIMITS_OF_WORKERS)
    with pytest.raises(RunError, match="one model can be simulated; the recording has 0: none"):
        recorded_run(without(lines, Registered), LIMITS_OF_WORKERS)
    with pytest.raises(RunError, match="no cost was announced by p-a, p-b"):
        recorded_run(without(lines, LoadHeard), LIMITS_OF_WORKERS)
    model = RECORDS[0].model
    assert model is not None
    other = replace(RECORDS[0], instance="x", model=replace(model, name="other", fingerprint="f1"))
    with pytest.raises(RunError, match="has 2: other, smollm2"):
        recorded_run([*lines[:2], Line(50.1, Registered((other,))), *lines[2:]], LIMITS_OF_WORKERS)
    only = Line(50.1, Registered((RECORDS[0],)))
    with pytest.raises(RunError, match="none that decodes"):
        recorded_run([lines[0], only, load_line(50.2, "p-b", 1), *lines[5:]], LIMITS_OF_WORKERS)


def test_limits_are_the_workers_defaults() -> None:
    config = WorkerConfig()
    assert (
        LIMITS_OF_WORKERS.step_tokens_max,
        LIMITS_OF_WORKERS.batch_requests_max,
        LIMITS_OF_WORKERS.prefill_requests_max,
        LIMITS_OF_WORKERS.queue_requests_max,
    ) == (
        config.step_tokens_max,
        config.batch_requests_max,
        config.prefill_requests_max,
        config.queue_requests_max,
    )


def test_decisions_come_out_as_they_did_and_by_others_as_those_would_have() -> None:
    lines = small_recording()
    made = list(remade_decisions(lines))
    assert [one.at_s for one in made] == [1.0, 3.5]
    assert all(one.identical and one.same_place for one in made)
    by_chance = list(remade_decisions(lines, lambda limits: replace(limits, strategy=Strategy.RANDOM)))
    assert [one.recorded for one in by_chance] == [one.recorded for one in made]
    wrong = [
        replace(line, entry=replace(line.entry, placement=replace(line.entry.placement, prefill="p-z")))
        if isinstance(line.entry, Decided) and line.entry.placement is not None
        else line
        for line in lines
    ]
    differ = list(remade_decisions(wrong))
    assert [one.identical for one in differ] == [False, False]
    assert not any(one.same_place for one in differ)
    assert isinstance(differ[0].remade, Placement)
    assert differ[0].remade == made[0].recorded
