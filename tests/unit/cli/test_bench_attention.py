"""What is counted, and what is said; the measuring itself needs a GPU (tests/gpu)."""

import pytest
import torch

from moonpool.__main__ import main
from moonpool.benchmarks.attention import (
    CASE_NAMES,
    DECODE_CASES,
    DecodeCase,
    ModelCase,
    PrefillCase,
    summarise_decode,
    summarise_model,
    summarise_prefill,
)

pytestmark = pytest.mark.unit


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_without_a_gpu_one_line_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "attention", "--json"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert (
        err == "moonpool bench attention: error: bench attention needs a CUDA device, and torch sees none\n"
    )


def test_case_names_are_told_apart() -> None:
    assert len(set(CASE_NAMES)) == len(CASE_NAMES)
    assert any(len(set(case.contexts)) > 1 for case in DECODE_CASES), "one case is ragged"


def test_a_decode_reads_every_key_and_value_once() -> None:
    # 8 heads of 128 numbers of 2 bytes, for keys and for values.
    assert DecodeCase("two", (100, 50)).kv_bytes == 150 * 4096


def test_a_prefill_computes_what_each_token_sees() -> None:
    """Three tokens on two cached ones see 3 + 4 + 5; 32 heads, two products, two operations each."""
    assert PrefillCase("x", 1, 3, 2).flops == 12 * 32 * 128 * 4
    assert PrefillCase("x", 5, 3, 2).flops == 5 * 12 * 32 * 128 * 4


def test_a_decode_beside_a_copy() -> None:
    rate, share = summarise_decode(DecodeCase("two", (100, 50)), [900.0, 800.0, 850.0], 1000.0, {"gpu": "x"})
    assert (rate.bench, rate.case, rate.unit, rate.value, rate.n) == ("attention", "two", "GB/s", 850.0, 3)
    assert (share.metric, share.value, share.min, share.max) == ("share_of_copy", 0.85, 0.8, 0.9)
    assert rate.context == {"gpu": "x", "sequences": 2, "kv_bytes": 150 * 4096}


def test_a_prefill_beside_torch_sample_by_sample() -> None:
    ours, torchs, ratio = summarise_prefill(PrefillCase("p", 1, 3), [300.0, 200.0], [200.0, 400.0], {})
    assert (ours.case, torchs.case) == ("p", "p/torch_sdpa")
    assert (ours.value, torchs.value) == (250.0, 300.0)
    assert (ratio.min, ratio.max) == (0.5, 1.5)


def test_a_model_beside_what_reading_it_allows() -> None:
    """4 sequences, 2 GB a step at 1000 GB/s: 2000 tokens/s at most."""
    case = ModelCase("m", 4, 100, 10)
    rate, share = summarise_model(case, [1000.0, 1500.0], 2_000_000_000, 1000.0, {})
    assert (rate.unit, rate.value) == ("tokens/s", 1250.0)
    assert (share.min, share.max) == (0.5, 0.75)
    (alone,) = summarise_model(ModelCase("p", 1, 100, 0), [1000.0], None, 1000.0, {})
    assert alone.value == 1000.0
