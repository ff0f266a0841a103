import pytest
from benchmarks.engine_vs_peers import CaseResult, as_ratio_table, equal_share, summarise
from tests.support.models import tiny_folder

from engine.model_folder import ModelConfig
from moonpool.benchmarks.engine import Case, Phase
from moonpool.benchmarks.engine_under_test import decode_bytes

pytestmark = pytest.mark.unit

DECODE = Case(Phase.DECODE, 2, 20, 3)
RESULT = CaseResult(
    case=DECODE,
    rates={"moonpool": [20.0, 30.0, 40.0], "vllm": [10.0, 30.0, 10.0]},
    bandwidths=[1e9, 1e9, 2e9],
    outputs={"moonpool": [[1, 2, 3], [4, 5]], "vllm": [[1, 2], [9, 5, 6]]},
)
ABOUTS = {"moonpool": {"backend": "native"}, "vllm": {"vllm": "0"}}


def test_tokens_are_compared_as_far_as_both_have_one() -> None:
    assert equal_share([[1, 2, 3], [4, 5]], [[1, 2], [9, 5, 6]]) == 0.75


def test_ratios_are_taken_within_a_round() -> None:
    lines = {(r.case, r.metric): r for r in summarise(RESULT, ABOUTS, ModelConfig.load(tiny_folder()), {})}
    ratio = lines["decode_2/moonpool:vllm", "rate_ratio"]
    assert (ratio.value, ratio.min, ratio.max, ratio.n) == (2.0, 1.0, 4.0, 3)
    theirs = lines["decode_2/vllm", "rate"]
    assert (theirs.value, theirs.context["system"]) == (10.0, {"vllm": "0"})
    assert theirs.context["output_tokens_equal_to_moonpool"] == 0.75


def test_decode_is_held_against_the_bandwidth_of_its_round() -> None:
    config = ModelConfig.load(tiny_folder())
    lines = {(r.case, r.metric): r for r in summarise(RESULT, ABOUTS, config, {})}
    shares = lines["decode_2/moonpool", "share_of_bandwidth_bound"]
    step_bytes = decode_bytes(config, 2, 20)
    assert shares.min == pytest.approx(20.0 / (2 * 1e9 / step_bytes))
    assert shares.max == pytest.approx(30.0 / (2 * 1e9 / step_bytes))
    assert lines["decode_2/memory_read", "rate"].max == 2.0


def test_the_table_has_a_column_for_each_system_and_each_ratio() -> None:
    header, row = as_ratio_table([RESULT]).splitlines()
    assert header.split("  ")[0] == "case"
    assert row.split() == ["decode_2", "30.0", "10.0", "2.00", "(1.00–4.00)"]
