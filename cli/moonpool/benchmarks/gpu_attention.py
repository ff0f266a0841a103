"""Times the attention kernels on the GPU: many launches by one graph, so that the CPU's pace is left out."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
import triton
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from engine.ops import StepTensors
from engine.triton_ops import TritonOps
from moonpool.benchmarks.attention import (
    BLOCK_TOKENS,
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    DecodeCase,
    PrefillCase,
)

DTYPE = torch.bfloat16
COPY_BYTES = 2 << 30
"""Far more than any L2 cache."""
COLD_BYTES_MIN = 512 << 20
"""A case takes keys and values in turn from this much memory at least: none of it stays in the L2 cache."""
SAMPLE_S_MIN = 0.02
"""A sample repeats its launches until it takes about this long."""
LAUNCHES_MAX = 2000


def device_context() -> dict[str, object]:
    return {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": triton.__version__,
        "dtype": str(DTYPE).removeprefix("torch."),
    }


def copy_rates(repeats: int) -> list[float]:
    """GB/s of a copy within the device's memory, bytes read and written."""
    source = torch.zeros(COPY_BYTES, dtype=torch.int8, device="cuda")
    destination = torch.zeros_like(source)
    seconds = sample_s([lambda: destination.copy_(source)], repeats)
    return [2 * COPY_BYTES / second / 1e9 for second in seconds]


def decode_rates(case: DecodeCase, repeats: int) -> list[float]:
    """GB/s of keys and values."""
    ops = TritonOps()
    layers = max(1, -(-COLD_BYTES_MIN // case.kv_bytes))
    step = _step([(context - 1, 1) for context in case.contexts])
    cache = _cache(step, layers)
    query = torch.randn(len(case.contexts), HEADS, HEAD_DIM, dtype=DTYPE, device="cuda")

    def attend(layer: int) -> Callable[[], object]:
        keys, values = cache[:, layer, 0], cache[:, layer, 1]
        return lambda: ops.attend(query, keys, values, step, HEAD_DIM**-0.5, None)

    with torch.inference_mode():
        seconds = sample_s([attend(layer) for layer in range(layers)], repeats)
    return [case.kv_bytes / second / 1e9 for second in seconds]


def prefill_rates(case: PrefillCase, repeats: int) -> tuple[list[float], list[float]]:
    """TFLOP/s of ours and of torch's; its keys and values lie ready, contiguous, repeated for all heads."""
    ops = TritonOps()
    step = _step([(case.cached, case.new)] * case.sequences)
    cache = _cache(step, 1)
    query = torch.randn(case.sequences * case.new, HEADS, HEAD_DIM, dtype=DTYPE, device="cuda")
    context = case.cached + case.new
    dense_query, dense_keys, dense_values = (
        torch.randn(case.sequences, HEADS, tokens, HEAD_DIM, dtype=DTYPE, device="cuda")
        for tokens in (case.new, context, context)
    )
    scale = HEAD_DIM**-0.5

    def ours() -> Tensor:
        return ops.attend(query, cache[:, 0, 0], cache[:, 0, 1], step, scale, None)

    # With a cached prefix the diagonal ends at the lower right: torch's own type for that keeps it fused.
    mask = causal_lower_right(case.new, context) if case.cached else None

    def torchs() -> Tensor:
        return F.scaled_dot_product_attention(
            dense_query, dense_keys, dense_values, attn_mask=mask, is_causal=mask is None, scale=scale
        )

    with torch.inference_mode():
        mine, theirs = Timing([ours]), Timing([torchs])
        pairs = [(mine.sample_s(), theirs.sample_s()) for _ in range(repeats)]
    return [case.flops / one / 1e12 for one, _ in pairs], [case.flops / other / 1e12 for _, other in pairs]


def sample_s(launches: list[Callable[[], object]], repeats: int) -> list[float]:
    """Seconds of one launch, the mean over a sample, for `repeats` samples."""
    timing = Timing(launches)
    return [timing.sample_s() for _ in range(repeats)]


class Timing:
    """Launches in turn, recorded in one graph."""

    def __init__(self, launches: list[Callable[[], object]]) -> None:
        for launch in launches:  # compiles, and fills the libraries' caches
            launch()
        once_s = self._timed(lambda: [launch() for launch in launches]) / len(launches)
        rounds = int(SAMPLE_S_MIN / once_s / len(launches)) + 1
        self._count = min(rounds * len(launches), max(LAUNCHES_MAX, len(launches)))
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            for index in range(self._count):
                launches[index % len(launches)]()
        self._graph.replay()

    def sample_s(self) -> float:
        """Seconds of one launch."""
        return self._timed(self._graph.replay) / self._count

    def _timed(self, work: Callable[[], object]) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
        begin.record()
        work()
        end.record()
        torch.cuda.synchronize()
        return float(begin.elapsed_time(end)) / 1e3


def _step(runs: list[tuple[int, int]]) -> StepTensors:
    """Runs of (cached, new) tokens; their blocks lie in no order in the cache."""
    counts = [-(-(cached + new) // BLOCK_TOKENS) for cached, new in runs]
    order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(0)).to(torch.int32)
    table = torch.zeros(len(runs), max(counts), dtype=torch.int32)
    start = 0
    for row, count in zip(table, counts, strict=True):
        row[:count] = order[start : start + count]
        start += count
    new = torch.tensor([0] + [new for _, new in runs]).cumsum(0)
    nothing = torch.zeros(int(new[-1]), dtype=torch.int64, device="cuda")
    return StepTensors(
        token_ids=nothing,
        positions=nothing,
        slots=nothing,
        query_starts=new.to(torch.int32).cuda(),
        kv_tokens=torch.tensor([sum(run) for run in runs], dtype=torch.int32, device="cuda"),
        block_table=table.cuda(),
        decodes=sum(count == 1 for _, count in runs),
        query_tokens_max=max(count for _, count in runs),
        kv_tokens_max=max(sum(run) for run in runs),
    )


def _cache(step: StepTensors, layers: int) -> Tensor:
    blocks = int(step.block_table.max()) + 1
    shape = (blocks, layers, 2, KV_HEADS, BLOCK_TOKENS, HEAD_DIM)
    return torch.randn(shape, dtype=DTYPE, device="cuda")
