"""`moonpool bench predict`: what is read from metrics, what is told of it, and what load is sent."""

import argparse
from itertools import pairwise

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from cluster.prediction_errors import ERROR_BUCKETS, PredictionErrors
from moonpool.benchmarks.predict import (
    BLOCK_TOKENS_SENT,
    COMMAND,
    PROMPT_BLOCKS_MAX,
    SCALE,
    Setting,
    mixed_load,
    summarise,
)
from moonpool.benchmarks.prediction_metrics import PredictionTotals, added_up
from moonpool.errors import CommandError
from moonpool.replay.schedule import block_ends, reusable_tokens
from moonpool.stack_plan import StackConfig

pytestmark = pytest.mark.unit

SETTING = Setting(StackConfig(name="t", model="tiny"), rate=1.0, warm_up_s=1, seconds=6)


class Service:
    def __init__(self, *kinds: str) -> None:
        self.registry = CollectorRegistry()
        self.errors = PredictionErrors(self.registry, kinds)

    def text(self) -> str:
        return generate_latest(self.registry).decode()


def told(*services: Service) -> PredictionTotals:
    return added_up([service.text() for service in services])


def test_all_services_are_added_up_by_kind() -> None:
    one, other, gateway = Service("step", "prefill"), Service("step", "prefill"), Service("ttft")
    one.errors.observe("step", 1.0, 2.0)
    other.errors.observe("step", 3.0, 2.0)
    gateway.errors.observe("ttft", 1.0, 1.0)
    found = told(one, other, gateway)
    assert [found.count(kind) for kind in ("ttft", "step", "prefill", "transfer")] == [1, 2, 0, 0]
    assert (found.predicted_s["step"], found.actual_s["step"]) == (4.0, 4.0)


def test_percentiles_are_exact_to_a_bucket() -> None:
    service = Service("step")
    for percent in range(1, 101):
        service.errors.observe("step", 1 + (percent - 0.5) / 100, 1.0)
    found = told(service)
    for share in (0.1, 0.5, 0.9):
        bucket = min(bound for bound in ERROR_BUCKETS if bound >= share)
        below = max((bound for bound in ERROR_BUCKETS if bound < share), default=0.0)
        assert below <= found.error("step", share) <= bucket
    assert found.error("step", 0.5) == pytest.approx(0.5, abs=0.02)


def test_what_is_beyond_the_last_bucket_is_told_as_its_bound() -> None:
    service = Service("step")
    service.errors.observe("step", 1e9, 1.0)
    assert told(service).error("step", 0.5) == ERROR_BUCKETS[-1]


def test_a_window_has_only_what_came_in_it() -> None:
    service = Service("step")
    service.errors.observe("step", 3.0, 1.0)
    before = told(service)
    service.errors.observe("step", 1.0, 1.0)
    window = told(service).since(before)
    assert (window.count("step"), window.predicted_s["step"]) == (1, 1.0)
    assert window.error("step", 0.9) <= ERROR_BUCKETS[0]


def test_a_time_of_nothing_is_not_compared() -> None:
    service = Service("step")
    service.errors.observe("step", 1.0, 0.0)
    assert told(service).count("step") == 0


def test_each_window_is_one_sample() -> None:
    service = Service("ttft", "step", "transfer")
    looks = [told(service)]
    for error in (0.04, 0.14, 0.95):
        service.errors.observe("ttft", 1 + error, 1.0)
        service.errors.observe("step", 0.5, 1.0)
        looks.append(told(service))
    results = {(one.case, one.metric): one for one in summarise(looks, 3, SETTING)}
    assert {case for case, _ in results} == {"ttft", "step"}
    ttft = results["ttft", "error_p50"]
    assert (ttft.n, ttft.unit) == (3, "%")
    assert ttft.min <= 5 < ttft.value <= 15 < ttft.max
    assert results["ttft", "predicted_by_actual"].value == pytest.approx(1.14)
    assert results["step", "predicted_by_actual"].value == 0.5
    assert ttft.context["predictions"] == 3


def test_a_window_without_answers_is_a_failure() -> None:
    silent = told(Service("ttft"))
    with pytest.raises(CommandError, match="no first token"):
        summarise([silent, silent, silent, silent], 0, SETTING)


def test_the_load_is_of_many_lengths_and_shares_prefixes() -> None:
    load = mixed_load(5.0, 60.0, seed=1)
    assert load == mixed_load(5.0, 60.0, seed=1)
    assert len(load) == pytest.approx(300, rel=0.25)
    assert all(0 <= a.due_s < b.due_s < 60 for a, b in pairwise(load))
    lengths = sorted(request.prompt_tokens for request in load)
    assert 1 <= lengths[0] < 64
    assert lengths[-1] > BLOCK_TOKENS_SENT * PROMPT_BLOCKS_MAX / 2
    for request in load:
        ends = block_ends(request, SCALE)
        assert ends[-1] == request.prompt_tokens
        assert ends == sorted(set(ends))
    shared = reusable_tokens(load, SCALE) / sum(lengths)
    assert 0.1 < shared < 0.5


def test_nobody_to_prefill_is_bad_usage() -> None:
    parser = argparse.ArgumentParser()
    COMMAND.add_arguments(parser)
    options = parser.parse_args(["--prefill", "0"])
    options.usage_error = parser.error
    with pytest.raises(SystemExit):
        COMMAND.run(options)
