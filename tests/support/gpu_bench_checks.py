"""What the GPU benchmarks do, without a GPU: interpreted kernels, a clock that stands, a tiny model."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from tests.support.repeating_recorder import RepeatingRecorder

from moonpool.benchmarks.attention import DecodeCase, ModelCase, PrefillCase

SAMPLE_S = 1e-3


class OnceTiming:
    """Launches once and says that it took a millisecond."""

    def __init__(self, launches: Sequence[Callable[[], torch.Tensor]]) -> None:
        for launch in launches:
            assert launch().isfinite().all()

    def sample_s(self) -> float:
        return SAMPLE_S


def check_attention_bench() -> None:
    from engine.triton_kernels.common import Chip
    from engine.triton_ops import TritonOps
    from moonpool.benchmarks.gpu_attention import AttentionUnderTest

    attention = AttentionUnderTest(TritonOps("cpu", chip=Chip(1, 99 * 1024)), OnceTiming)
    assert attention.copy_rates(2, copy_bytes=1000) == [2e-3] * 2
    decode = DecodeCase("decode", (5, 20))
    (rate,) = attention.decode_rates(decode, 1, cold_bytes=2 * decode.kv_bytes)
    assert rate == decode.kv_bytes / SAMPLE_S / 1e9
    for prefill in (PrefillCase("cold", 2, 3), PrefillCase("cached", 1, 3, 14)):
        ours, torchs = attention.prefill_rates(prefill, 1)
        assert ours == torchs == [prefill.flops / SAMPLE_S / 1e12]


def check_model_bench() -> None:
    from engine.triton_kernels.common import Chip
    from engine.triton_ops import TritonOps
    from moonpool.benchmarks.gpu_model import LLAMA_8B, ModelUnderTest

    config = replace(
        LLAMA_8B,
        layers=2,
        hidden_size=64,
        intermediate_size=96,
        heads=4,
        kv_heads=2,
        head_dim=16,
        vocab_size=300,
        windows=(None, None),
    )
    ops = TritonOps("cpu", chip=Chip(1, 99 * 1024))
    recorder = RepeatingRecorder()
    torch.manual_seed(0)
    model = ModelUnderTest(config, ops, recorder, sequences_max=3, tokens_max=40)
    (prefill,) = model.rates(ModelCase("prefill", 1, 12, 0), 1)
    (decode,) = model.rates(ModelCase("decode", 3, 15, 2), 1)
    assert prefill > 0
    assert decode > 0
    assert recorder.recorded == 1
    weights = 2 * (64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 96 + 2 * 64) + 64 + 300 * 64
    kv = 3 * 15 * 2 * 2 * 2 * 16
    assert model.step_bytes(ModelCase("decode", 3, 15, 2)) == 2 * (weights + kv)
