"""`moonpool bench attention`: the attention kernels on a GPU, beside what the chip and torch can do there.

Decode attention reads keys and values once and is bound by memory: GB/s, beside a copy measured in the
same run. Prefill attention is bound by products: TFLOP/s, beside torch's scaled_dot_product_attention on
the same shapes, measured in turn with ours. And a whole model of Llama 8B's shape with random weights:
tokens/s, beside what the memory's bandwidth allows.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from moonpool.arguments import Command
from moonpool.benchmarks.command_line import add_case_arguments, add_json_argument, print_results
from moonpool.errors import EXIT_OK, CommandError
from moonpool.measurement import Measurement, measurement

NAME = "attention"
REPEATS_MAX = 1000
HEADS, KV_HEADS, HEAD_DIM, BLOCK_TOKENS = 32, 8, 128, 16
"""Llama 8B's attention; bfloat16."""
DTYPE_BYTES = 2


@dataclass(frozen=True, slots=True)
class DecodeCase:
    """Sequences with one new token each; the contexts that its keys and values are read of."""

    name: str
    contexts: tuple[int, ...]

    @property
    def kv_bytes(self) -> int:
        """Keys and values of all contexts, each read once."""
        return sum(self.contexts) * 2 * KV_HEADS * HEAD_DIM * DTYPE_BYTES


@dataclass(frozen=True, slots=True)
class PrefillCase:
    """`sequences` prompts of `new` tokens each, on a cached prefix of `cached` tokens."""

    name: str
    sequences: int
    new: int
    cached: int = 0

    @property
    def flops(self) -> int:
        """Two products of head_dim for each pair of a query and a key that it sees."""
        pairs = self.new * self.cached + self.new * (self.new + 1) // 2
        return self.sequences * pairs * HEADS * HEAD_DIM * 4


@dataclass(frozen=True, slots=True)
class ModelCase:
    """The whole model: prefill of a prompt of `context` tokens, or decode at that context."""

    name: str
    sequences: int
    context: int
    decode_steps: int
    """0: prefill."""


RAGGED = tuple(128 + (index * 7919) % 8064 for index in range(32))
"""From 128 to 8191 tokens, in no order."""
DECODE_CASES = (
    DecodeCase("decode_1x32768", (32_768,)),
    DecodeCase("decode_8x8192", (8192,) * 8),
    DecodeCase("decode_32x2048", (2048,) * 32),
    DecodeCase("decode_32_ragged", RAGGED),
    DecodeCase("decode_128x2048", (2048,) * 128),
)
PREFILL_CASES = (
    PrefillCase("prefill_1x2048", 1, 2048),
    PrefillCase("prefill_4x2048", 4, 2048),
    PrefillCase("prefill_1x8192", 1, 8192),
    PrefillCase("prefill_1024_on_8192", 1, 1024, 8192),
)
MODEL_CASES = (
    ModelCase("model_prefill_2048", 1, 2048, 0),
    ModelCase("model_decode_1", 1, 1024, 32),
    ModelCase("model_decode_32", 32, 1024, 32),
    ModelCase("model_decode_128", 128, 1024, 16),
)
CASE_NAMES = tuple(case.name for case in (*DECODE_CASES, *PREFILL_CASES, *MODEL_CASES))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_json_argument(parser)
    add_case_arguments(parser, CASE_NAMES, REPEATS_MAX)


def run(options: argparse.Namespace) -> int:
    import torch

    try:
        results = measure(options.cases or CASE_NAMES, options.repeats)
    except torch.cuda.OutOfMemoryError as error:
        raise CommandError(f"bench attention: {str(error).splitlines()[0]} (choose with --case)") from error
    print_results(results, as_json=options.json)
    return EXIT_OK


def measure(case_names: Sequence[str], repeats: int) -> list[Measurement]:
    """Raises CommandError where there is no CUDA device."""
    # Here, and not above: torch takes longer to import than other commands to run.
    import torch

    if not torch.cuda.is_available():
        raise CommandError("bench attention needs a CUDA device, and torch sees none")
    import triton

    from engine.decode_graphs import CudaRecorder
    from engine.triton_ops import TritonOps
    from moonpool.benchmarks.gpu_attention import AttentionUnderTest
    from moonpool.benchmarks.gpu_model import LLAMA_8B, ModelUnderTest
    from moonpool.benchmarks.gpu_timing import GraphTiming

    context: dict[str, object] = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": triton.__version__,
        "dtype": "bfloat16",
    }
    ops = TritonOps()
    attention = AttentionUnderTest(ops, GraphTiming)
    copies = attention.copy_rates(repeats)
    results = [measurement(NAME, "copy", "rate", "GB/s", copies, context)]
    for decode in (case for case in DECODE_CASES if case.name in case_names):
        results += summarise_decode(decode, attention.decode_rates(decode, repeats), max(copies), context)
    for prefill in (case for case in PREFILL_CASES if case.name in case_names):
        ours, torchs = attention.prefill_rates(prefill, repeats)
        results += summarise_prefill(prefill, ours, torchs, context)
    chosen = [case for case in MODEL_CASES if case.name in case_names]
    if chosen:
        model = ModelUnderTest(
            LLAMA_8B,
            ops,
            CudaRecorder(ops.device),
            sequences_max=max(case.sequences for case in chosen),
            tokens_max=max(case.context + case.decode_steps * (1 + repeats) for case in chosen),
        )
        for case in chosen:
            step_bytes = model.step_bytes(case) if case.decode_steps else None
            results += summarise_model(case, model.rates(case, repeats), step_bytes, max(copies), context)
    return results


def summarise_decode(
    case: DecodeCase, rates: Sequence[float], copy_rate: float, context: dict[str, object]
) -> list[Measurement]:
    """GB/s of keys and values, and the share of a copy's GB/s, which counts bytes read and written."""
    context = context | {"sequences": len(case.contexts), "kv_bytes": case.kv_bytes}
    shares = [rate / copy_rate for rate in rates]
    return [
        measurement(NAME, case.name, "rate", "GB/s", rates, context),
        measurement(NAME, case.name, "share_of_copy", "x", shares, context),
    ]


def summarise_prefill(
    case: PrefillCase, ours: Sequence[float], torchs: Sequence[float], context: dict[str, object]
) -> list[Measurement]:
    """TFLOP/s of both; the ratio is of samples taken one right after the other."""
    context = context | {"sequences": case.sequences, "new": case.new, "cached": case.cached}
    ratios = [mine / theirs for mine, theirs in zip(ours, torchs, strict=True)]
    return [
        measurement(NAME, case.name, "rate", "TFLOP/s", ours, context),
        measurement(NAME, f"{case.name}/torch_sdpa", "rate", "TFLOP/s", torchs, context),
        measurement(NAME, case.name, "ratio_to_torch_sdpa", "x", ratios, context),
    ]


def summarise_model(
    case: ModelCase,
    rates: Sequence[float],
    step_bytes: int | None,
    copy_rate: float,
    context: dict[str, object],
) -> list[Measurement]:
    """tokens/s; for a decode also the share of what reading weights and context at a copy's GB/s allows."""
    context = context | {"sequences": case.sequences, "context": case.context}
    results = [measurement(NAME, case.name, "rate", "tokens/s", rates, context)]
    if step_bytes is not None:
        bound = case.sequences * copy_rate * 1e9 / step_bytes
        shares = [rate / bound for rate in rates]
        context = context | {"step_bytes": step_bytes}
        results.append(measurement(NAME, case.name, "share_of_bandwidth_bound", "x", shares, context))
    return results


COMMAND = Command(
    NAME, "the GPU's attention kernels beside a memory copy and torch, and a whole model", add_arguments, run
)
