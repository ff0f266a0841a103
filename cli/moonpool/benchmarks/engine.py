"""`moonpool bench engine`: how fast the engine computes by itself, without services around it.

Prefill of one prompt, and decode of batches with 512 tokens of context each, beside what the memory
would allow: a decode step reads every weight once, so bytes over bandwidth bound its rate.
"""

import argparse
import platform
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from moonpool.arguments import Command
from moonpool.benchmarks.command_line import (
    add_case_arguments,
    add_engine_arguments,
    add_json_argument,
    print_results,
)
from moonpool.errors import EXIT_OK
from moonpool.machine import machine_context
from moonpool.measurement import Measurement, measurement
from moonpool.run_folder import moonpool_home

if TYPE_CHECKING:
    from moonpool.benchmarks.engine_under_test import EngineUnderTest

NAME = "engine"
REPEATS_MAX = 10_000
WARM_STEPS = 2
"""Decode steps before each timed stretch: what the reading of the bandwidth threw out of the caches."""
PROMPT_SEED = 1


class Phase(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class Case:
    """`sequences` prompts of `tokens` tokens; where they decode, one sample is `steps` steps."""

    phase: Phase
    sequences: int
    tokens: int
    steps: int

    @property
    def name(self) -> str:
        size = self.tokens if self.phase is Phase.PREFILL else self.sequences
        return f"{self.phase}_{size}"

    @property
    def tokens_max(self) -> int:
        """The longest a sequence becomes."""
        return self.tokens + (WARM_STEPS + self.steps if self.phase is Phase.DECODE else 0)


CASES = (
    Case(Phase.PREFILL, 1, 512, 0),
    Case(Phase.PREFILL, 1, 2048, 0),
    Case(Phase.DECODE, 1, 512, 16),
    Case(Phase.DECODE, 8, 512, 16),
    Case(Phase.DECODE, 32, 512, 8),
)


@dataclass(frozen=True, slots=True)
class Sample:
    """One timing of a case."""

    rate: float
    """Tokens a second: of the prompt, or of the output of all sequences."""
    bandwidth: float | None
    """Bytes a second that memory gave right before; None for a prefill, which is not bound by it."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_json_argument(parser)
    add_engine_arguments(parser)
    add_case_arguments(parser, [case.name for case in CASES], REPEATS_MAX)


def run(options: argparse.Namespace) -> int:
    cases = [case for case in CASES if options.cases is None or case.name in options.cases]
    results = measure(options.model, cases, options.threads, options.backend, options.repeats)
    print_results(results, as_json=options.json)
    return EXIT_OK


def measure(
    model: str, cases: Sequence[Case], threads: int, backend: str | None, repeats: int
) -> list[Measurement]:
    """Measures the cases one after the other, `repeats` samples of each after one that is not counted."""
    # Here, and not above: torch takes longer to import than other commands to run.
    import torch

    from engine.models import resolve_model
    from moonpool.benchmarks.engine_under_test import EngineUnderTest, decode_bytes
    from moonpool.benchmarks.read_bandwidth import READER, bandwidth_reader

    folder = resolve_model(model, moonpool_home(), lambda text: print(text, file=sys.stderr))
    engine = EngineUnderTest(
        folder,
        threads=threads,
        backend=backend,
        sequences_max=max(case.sequences for case in cases),
        tokens_max=max(case.tokens_max for case in cases),
    )
    read_bandwidth = bandwidth_reader(threads)
    results: list[Measurement] = []
    bandwidths: list[float] = []
    context: dict[str, object] = {
        "model": model,
        "dtype": engine.layout.dtype_name,
        "threads": threads,
        "backend": engine.backend,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    for case in cases:
        prompt = random.Random(PROMPT_SEED).choices(range(engine.config.vocab_size), k=case.tokens)
        samples = _samples(engine, case, prompt, read_bandwidth, repeats)
        bandwidths += [sample.bandwidth for sample in samples if sample.bandwidth is not None]
        step_bytes = decode_bytes(engine.config, case.sequences, case.tokens)
        results += summarise(case, samples, step_bytes, context | machine_context())
    if bandwidths:
        results.append(_read_bandwidth(bandwidths, context | machine_context() | {"reader": READER}))
    return results


def summarise(
    case: Case, samples: Sequence[Sample], step_bytes: int, context: dict[str, object]
) -> list[Measurement]:
    """The rate; for a decode also the rate that the bandwidth allows, and the share of it that was reached.

    `step_bytes` is what one decode step reads.
    """
    context = context | {"sequences": case.sequences, "tokens": case.tokens}
    rates = [sample.rate for sample in samples]
    results = [measurement(NAME, case.name, "rate", "tokens/s", rates, context)]
    bounds = [case.sequences * s.bandwidth / step_bytes for s in samples if s.bandwidth is not None]
    if bounds:
        shares = [rate / bound for rate, bound in zip(rates, bounds, strict=True)]
        context = context | {"step_bytes": step_bytes}
        results += [
            measurement(NAME, f"{case.name}/bandwidth_bound", "rate", "tokens/s", bounds, context),
            measurement(NAME, case.name, "share_of_bandwidth_bound", "x", shares, context),
        ]
    return results


def _read_bandwidth(bandwidths: Sequence[float], context: dict[str, object]) -> Measurement:
    rates = [bandwidth / 1e9 for bandwidth in bandwidths]
    return measurement(NAME, "memory_read", "rate", "GB/s", rates, context)


def _samples(
    engine: "EngineUnderTest",
    case: Case,
    prompt: Sequence[int],
    read_bandwidth: Callable[[], float],
    repeats: int,
) -> list[Sample]:
    if case.phase is Phase.PREFILL:
        return [_prefill(engine, prompt) for _ in range(1 + repeats)][1:]
    engine.start_copies(prompt, case.sequences)
    return [_decode(engine, case, read_bandwidth()) for _ in range(1 + repeats)][1:]


def _prefill(engine: "EngineUnderTest", prompt: Sequence[int]) -> Sample:
    started_s = time.perf_counter()
    engine.prefill(prompt)
    return Sample(len(prompt) / (time.perf_counter() - started_s), None)


def _decode(engine: "EngineUnderTest", case: Case, bandwidth: float) -> Sample:
    for _ in range(WARM_STEPS):
        engine.decode_step()
    started_s = time.perf_counter()
    for _ in range(case.steps):
        engine.decode_step()
    seconds = time.perf_counter() - started_s
    engine.rewind(WARM_STEPS + case.steps)
    return Sample(case.sequences * case.steps / seconds, bandwidth)


COMMAND = Command(
    NAME, "tokens per second of the engine alone, beside the memory's bound", add_arguments, run
)
