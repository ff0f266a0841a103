"""The GPU benchmarks come to their end without a GPU: what they set up is what they say."""

import pytest
from tests.support import gpu_bench_checks
from tests.support.interpreted import Interpreter

pytestmark = pytest.mark.unit


def test_attention(interpreter: Interpreter) -> None:
    interpreter.call(gpu_bench_checks.check_attention_bench)


def test_model(interpreter: Interpreter) -> None:
    interpreter.call(gpu_bench_checks.check_model_bench)
