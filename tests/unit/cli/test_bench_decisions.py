"""`moonpool bench decisions`: what is made of its samples. The processes are an integration test's."""

import os

import pytest

from moonpool.benchmarks.decisions import Sample, Setting, bound_by, summarise
from moonpool.benchmarks.services import processor_s

pytestmark = pytest.mark.unit

SETTING = Setting(conductors=2, instances=4, prompt_blocks=8, window=16, seconds=2)


def sample(**busy: float) -> Sample:
    names = {"kvmeta": "kvmeta-0", "first": "conductor-0", "second": "conductor-1"}
    by_process = {names.get(name, name): share for name, share in busy.items()}
    return Sample(decided=1000, took_s=2.0, latencies_s=(0.001, 0.002, 0.01), busy=by_process)


def test_the_rate_latencies_and_processor_times_are_told() -> None:
    samples = [sample(kvmeta=0.1, first=0.3, second=0.2, nats=0.05, bench=0.4)] * 2
    found = {result.metric: result for result in summarise(samples, SETTING)}
    assert found["decisions"].value == 500.0
    assert found["latency_p50"].value == 2.0
    assert found["latency_p99"].value == 10.0
    assert found["processors_kvmeta-0"].value == 0.1
    # Both conductors took half a processor for 500 decisions a second.
    assert found["conductor_time_per_decision"].value == pytest.approx(1000.0)
    assert {result.case for result in found.values()} == {"2_conductors"}
    assert found["decisions"].context["prompt_blocks"] == 8


@pytest.mark.parametrize(
    ("busy", "said"),
    [
        ({"kvmeta": 0.1, "first": 0.95, "bench": 0.4}, "bound by conductor-0, which took 0.95"),
        ({"kvmeta": 0.4, "first": 0.8, "bench": 0.7}, "bound by the machine: all took 1.90 of 2"),
        ({"kvmeta": 0.1, "first": 0.3, "bench": 0.2}, "bound by the requests in flight, or by others"),
    ],
)
def test_it_says_what_bounds_the_rate(busy: dict[str, float], said: str) -> None:
    text = bound_by(sample(**busy), processors=2)
    assert text.startswith("500 decisions/s")
    assert said in text


def test_processor_time_only_rises() -> None:
    before_s = processor_s(os.getpid())
    assert sum(range(3_000_000)) > 0
    assert processor_s(os.getpid()) > before_s >= 0
