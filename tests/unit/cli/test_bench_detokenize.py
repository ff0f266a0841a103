"""What the benchmark of an answer's text measures and says, on a tokenizer that takes no time."""

import pytest
from tests.unit.gateway.model_files import write_model_folder

from moonpool.benchmarks import detokenize

pytestmark = pytest.mark.unit


def test_every_case_says_processor_time_a_token(tmp_path) -> None:
    results = detokenize.measure(write_model_folder(tmp_path), detokenize.CASES, repeats=2)
    assert [result.case for result in results] == list(detokenize.CASES)
    assert {(result.metric, result.unit, result.n) for result in results} == {("time_per_token", "us", 2)}
    assert all(0 < result.min <= result.value <= result.max for result in results)
    assert results[0].context["tokens"] > 1000
    (alone,) = detokenize.measure(tmp_path, ["slices"], repeats=1)
    assert alone.case == "slices"
