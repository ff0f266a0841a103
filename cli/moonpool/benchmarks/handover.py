"""`moonpool bench handover`: what handing a prompt's KV to decode adds to the time to first token.

A prefill by itself, one whose KV goes layer by layer while the next layer computes (as workers do), and one
whose KV goes in one copy when the prompt is computed, in turn. Prefill and handover are the worker's own
code; decode is another process of this host with blocks that were granted.
"""

import argparse
import asyncio
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moonpool.arguments import Command
from moonpool.benchmarks.command_line import (
    add_case_arguments,
    add_engine_arguments,
    add_json_argument,
    print_results,
    say,
)
from moonpool.benchmarks.transfer import TRANSPORTS
from moonpool.errors import EXIT_OK, CommandError
from moonpool.machine import machine_context
from moonpool.measurement import Measurement, measurement
from moonpool.run_folder import moonpool_home

if TYPE_CHECKING:
    from moonpool.benchmarks.handover_under_test import HandoverUnderTest, Mode, Run

NAME = "handover"
REPEATS_MAX = 1000
STEP_TOKENS = 512
"""As a worker computes a prompt by default."""
PROMPT_SEED = 3


@dataclass(frozen=True, slots=True)
class Case:
    tokens: int

    @property
    def name(self) -> str:
        return f"prompt_{self.tokens}"


CASES = (Case(1024), Case(4096))

Round = Mapping["Mode", "Run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_json_argument(parser)
    add_engine_arguments(parser)
    parser.add_argument(
        "--transport", choices=TRANSPORTS, help="default: the one that two workers of this host would take"
    )
    add_case_arguments(parser, [case.name for case in CASES], REPEATS_MAX)


def run(options: argparse.Namespace) -> int:
    cases = [case for case in CASES if options.cases is None or case.name in options.cases]
    results = asyncio.run(
        measure(
            options.model,
            cases,
            threads=options.threads,
            backend=options.backend,
            transport=options.transport,
            repeats=options.repeats,
        )
    )
    print_results(results, as_json=options.json)
    return EXIT_OK


async def measure(
    model: str,
    cases: Sequence[Case],
    *,
    threads: int,
    backend: str | None,
    transport: str | None,
    repeats: int,
) -> list[Measurement]:
    """`repeats` rounds of each case. Raises CommandError where the transport is not to be had or fails, where
    decode gets other bytes than prefill computed, or where the model takes no prompt of that length."""
    # Here, and not above: torch takes longer to import than other commands to run.
    from engine.model_folder import ModelConfig
    from engine.models import resolve_model
    from kvtransfer import TransferError, TransportUnavailable
    from moonpool.benchmarks.handover_under_test import HandoverUnderTest, WrongBytes

    folder = resolve_model(model, moonpool_home(), say)
    tokens_max = max(case.tokens for case in cases)
    context_tokens_max = ModelConfig.load(folder).context_tokens_max
    if tokens_max > context_tokens_max:
        raise CommandError(f"{model} takes {context_tokens_max} tokens, the case has {tokens_max} (--case)")
    try:
        async with HandoverUnderTest.running(
            folder,
            threads=threads,
            backend=backend,
            tokens_max=tokens_max,
            step_tokens=STEP_TOKENS,
            transport=transport,
        ) as tested:
            context: dict[str, object] = {
                "model": model,
                "dtype": tested.layout.dtype_name,
                "threads": threads,
                "backend": tested.backend,
                "step_tokens": STEP_TOKENS,
            }
            results = []
            for case in cases:
                rounds = await _rounds(tested, case, repeats)
                carried = {"transports": tested.carriers()}
                results += summarise(case, rounds, context | carried | machine_context())
            return results
    except TransportUnavailable as error:
        raise CommandError(f"not to be had here: {error}") from error
    except (WrongBytes, TransferError) as error:
        raise CommandError(str(error)) from error


async def _rounds(tested: "HandoverUnderTest", case: Case, repeats: int) -> list[Round]:
    """All modes in turn, beginning with another one each round. Each run has a prompt of its own, so that
    what decode holds of an earlier one is not taken for its KV."""
    from moonpool.benchmarks.handover_under_test import Mode

    numbers = random.Random(PROMPT_SEED)
    modes = list(Mode)

    def prompt(tokens: int) -> list[int]:
        return numbers.choices(range(tested.config.vocab_size), k=tokens)

    await tested.run(prompt(min(case.tokens, STEP_TOKENS)), Mode.STREAMED)  # warm: not counted
    rounds: list[Round] = []
    for number in range(repeats):
        start = number % len(modes)
        rounds.append(
            {mode: await tested.run(prompt(case.tokens), mode) for mode in modes[start:] + modes[:start]}
        )
        say(f"{case.name}: round {number}")
    return rounds


def summarise(case: Case, rounds: Sequence[Round], context: Mapping[str, object]) -> list[Measurement]:
    """The time to first token without a handover; for each way to hand over the time until decode has all
    bytes, what that is more than without in the same round, and how long decode waited for the last bytes
    after the prompt was computed."""
    from moonpool.benchmarks.handover_under_test import Mode

    context = {**context, "tokens": case.tokens}
    alone_ms = [one[Mode.NONE].computed_s * 1e3 for one in rounds]
    results = [measurement(NAME, f"{case.name}/{Mode.NONE}", "ttft", "ms", alone_ms, context)]
    for mode in (Mode.STREAMED, Mode.AT_END):
        runs = [one[mode] for one in rounds]
        about = {**context, "bytes": runs[0].handed_over_bytes}
        done_ms = [one.done_s * 1e3 for one in runs]
        samples = {
            "ttft": done_ms,
            "extra_ttft": [done - alone for done, alone in zip(done_ms, alone_ms, strict=True)],
            "after_prefill": [(one.done_s - one.computed_s) * 1e3 for one in runs],
        }
        for metric, values in samples.items():
            results.append(measurement(NAME, f"{case.name}/{mode}", metric, "ms", values, about))
    return results


COMMAND = Command(
    NAME,
    "time to first token with the KV handed to decode layer by layer, at once, or not",
    add_arguments,
    run,
)
