"""The attention kernels and what they are compared with, set up to be timed."""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from engine.ops import Ops, StepTensors
from moonpool.benchmarks.attention import (
    BLOCK_TOKENS,
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    DecodeCase,
    PrefillCase,
)
from moonpool.benchmarks.gpu_timing import Launch, Timing

DTYPE = torch.bfloat16
SCALE = HEAD_DIM**-0.5
COPY_BYTES = 2 << 30
"""Far more than any L2 cache."""
COLD_BYTES_MIN = 512 << 20
"""A case takes keys and values in turn from this much memory at least: none of it stays in the L2 cache."""


class AttentionUnderTest:
    """Rates of `ops` at Llama 8B's attention."""

    def __init__(self, ops: Ops, time_launches: Callable[[Sequence[Launch]], Timing]) -> None:
        self._ops = ops
        self._time_launches = time_launches

    def copy_rates(self, repeats: int, copy_bytes: int = COPY_BYTES) -> list[float]:
        """GB/s of a copy within the device's memory, bytes read and written."""
        source = torch.zeros(copy_bytes, dtype=torch.int8, device=self._ops.device)
        destination = torch.zeros_like(source)
        timing = self._time_launches([lambda: destination.copy_(source)])
        return [2 * copy_bytes / timing.sample_s() / 1e9 for _ in range(repeats)]

    def decode_rates(self, case: DecodeCase, repeats: int, cold_bytes: int = COLD_BYTES_MIN) -> list[float]:
        """GB/s of keys and values."""
        step = self._step([(context - 1, 1) for context in case.contexts])
        cache = self._cache(step, layers=-(-cold_bytes // case.kv_bytes))
        query = self._random(len(case.contexts), HEADS, HEAD_DIM)

        def attend(layer: int) -> Launch:
            keys, values = cache[:, layer, 0], cache[:, layer, 1]
            return lambda: self._ops.attend(query, keys, values, step, SCALE, None)

        with torch.inference_mode():
            timing = self._time_launches([attend(layer) for layer in range(cache.shape[1])])
            return [case.kv_bytes / timing.sample_s() / 1e9 for _ in range(repeats)]

    def prefill_rates(self, case: PrefillCase, repeats: int) -> tuple[list[float], list[float]]:
        """TFLOP/s of ours and of torch's; its keys and values lie ready, dense, repeated for all heads."""
        step = self._step([(case.cached, case.new)] * case.sequences)
        cache = self._cache(step, layers=1)
        query = self._random(case.sequences * case.new, HEADS, HEAD_DIM)
        context = case.cached + case.new
        dense_query, dense_keys, dense_values = (
            self._random(case.sequences, HEADS, tokens, HEAD_DIM) for tokens in (case.new, context, context)
        )
        # With a cached prefix the diagonal ends at the lower right: torch's own type for that keeps it fused.
        mask = causal_lower_right(case.new, context) if case.cached else None

        def ours() -> Tensor:
            return self._ops.attend(query, cache[:, 0, 0], cache[:, 0, 1], step, SCALE, None)

        def torchs() -> Tensor:
            return F.scaled_dot_product_attention(
                dense_query, dense_keys, dense_values, attn_mask=mask, is_causal=mask is None, scale=SCALE
            )

        with torch.inference_mode():
            mine, theirs = self._time_launches([ours]), self._time_launches([torchs])
            pairs = [(mine.sample_s(), theirs.sample_s()) for _ in range(repeats)]
        return [case.flops / one / 1e12 for one, _ in pairs], [case.flops / two / 1e12 for _, two in pairs]

    def _step(self, runs: Sequence[tuple[int, int]]) -> StepTensors:
        """Runs of (cached, new) tokens; their blocks lie in no order in the cache."""
        device = self._ops.device
        counts = [-(-(cached + new) // BLOCK_TOKENS) for cached, new in runs]
        order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(0)).to(torch.int32)
        table = torch.zeros(len(runs), max(counts), dtype=torch.int32)
        start = 0
        for row, count in zip(table, counts, strict=True):
            row[:count] = order[start : start + count]
            start += count
        new = torch.tensor([0] + [new for _, new in runs]).cumsum(0)
        nothing = torch.zeros(int(new[-1]), dtype=torch.int64, device=device)
        return StepTensors(
            token_ids=nothing,
            positions=nothing,
            slots=nothing,
            query_starts=new.to(dtype=torch.int32, device=device),
            kv_tokens=torch.tensor([sum(run) for run in runs], dtype=torch.int32, device=device),
            block_table=table.to(device),
            decodes=sum(new == 1 for _, new in runs),
            query_tokens_max=max(new for _, new in runs),
            kv_tokens_max=max(sum(run) for run in runs),
        )

    def _cache(self, step: StepTensors, layers: int) -> Tensor:
        blocks = int(step.block_table.max()) + 1
        return self._random(blocks, layers, 2, KV_HEADS, BLOCK_TOKENS, HEAD_DIM)

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(shape, dtype=DTYPE, device=self._ops.device)
