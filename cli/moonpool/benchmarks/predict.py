"""`moonpool bench predict`: how far predicted times are off on a live stack under a moderate load.

A whole stack of real processes gets an open loop of prompts of many lengths, some of which share prefixes.
Its services compare what they predicted with what came (`cluster.prediction_errors`): workers their steps,
prefills and transfers, the gateway the placement's time to first token. Read are their metrics at the ends
of a few windows of equal length, after a while in which the corrections learn; each window is one sample.
"""

import argparse
import asyncio
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from moonpool.arguments import Command, positive
from moonpool.benchmarks.command_line import add_json_argument, add_number_arguments, print_results, say
from moonpool.benchmarks.prediction_metrics import PredictionTotals
from moonpool.errors import EXIT_OK, CommandError
from moonpool.machine import machine_context
from moonpool.measurement import Measurement, measurement
from moonpool.replay.schedule import ScheduledRequest
from simulator.trace import TRACE_BLOCK_TOKENS

if TYPE_CHECKING:
    from moonpool.replay.records import Results
    from moonpool.run_folder import StackState
    from moonpool.stack_plan import StackConfig

NAME = "predict"
KINDS = ("ttft", "step", "prefill", "transfer")
SHARES = (("error_p50", 0.5), ("error_p90", 0.9))
WINDOWS = 3
SECONDS_MIN, SECONDS_MAX = 3, 3600
INSTANCES_MAX = 16
THREADS_MAX = 256
RATE_MAX = 1000.0
RATE_DEFAULT = 0.5
"""Requests a second that keep two cores with SmolLM2 moderately busy."""
SEED = 11
IN_FLIGHT_MAX = 256
SILENCE_S_MAX = 120.0
ASK_S_MAX = 10.0

BLOCK_TOKENS_SENT = 32
"""Prompts are made of blocks of so many tokens: what two of them share is shared in whole blocks."""
SCALE = TRACE_BLOCK_TOKENS / BLOCK_TOKENS_SENT
PROMPT_BLOCKS_MAX = 24
OUTPUT_TOKENS = (8, 48)
FAMILIES = 4
FAMILY_BLOCKS = 12
"""Longest prefix that requests of one family share; each takes a part of it."""
FAMILY_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class Setting:
    stack: "StackConfig"
    rate: float
    warm_up_s: int
    seconds: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_json_argument(parser)
    parser.add_argument(
        "--model",
        default="smollm2",
        help="smollm2 (default), tiny, whose steps are shorter than what a busy machine is late by, or a "
        "model's folder",
    )
    parser.add_argument(
        "--rate",
        type=positive(RATE_MAX),
        default=RATE_DEFAULT,
        metavar="X",
        help=f"requests a second (default {RATE_DEFAULT:g})",
    )
    add_number_arguments(
        parser,
        (
            ("--seconds", SECONDS_MIN, SECONDS_MAX, 45, f"seconds that count, in {WINDOWS} windows"),
            ("--warm-up", 0, SECONDS_MAX, 10, "seconds of the same load before"),
            ("--prefill", 0, INSTANCES_MAX, 1, "prefill instances"),
            ("--decode", 0, INSTANCES_MAX, 1, "decode instances"),
            ("--coupled", 0, INSTANCES_MAX, 0, "instances that do both"),
            ("--threads", 1, THREADS_MAX, 1, "threads of each engine"),
        ),
    )


def run(options: argparse.Namespace) -> int:
    # Here, and not above: other commands need none of it.
    from moonpool.stack_plan import StackConfig

    if not options.coupled and not (options.prefill and options.decode):
        options.usage_error("nobody would prefill and decode: give --prefill and --decode, or --coupled")
    stack = StackConfig(
        name=f"bench-{NAME}",
        model=options.model,
        prefill=options.prefill,
        decode=options.decode,
        coupled=options.coupled,
        threads=options.threads,
    )
    setting = Setting(stack, options.rate, options.warm_up, options.seconds)
    print_results(asyncio.run(measure(setting)), as_json=options.json)
    return EXIT_OK


async def measure(setting: Setting) -> list[Measurement]:
    """CommandError where the stack does not start, or no answer came whole in some window."""
    from moonpool.stack import running_stack

    async with running_stack(setting.stack, say) as stack:
        looks, served = await _under_load(stack.state(), setting)
    return summarise(looks, served, setting)


async def _under_load(state: "StackState", setting: Setting) -> tuple[list[PredictionTotals], int]:
    """The cluster's totals at the ends of the windows, and how many requests were served in all."""
    from moonpool.api import Api
    from moonpool.benchmarks.prediction_metrics import totals
    from moonpool.cluster_client import ClusterAddresses, describe_all
    from moonpool.replay.prompts import TokenRange
    from moonpool.replay.records import Outcome, Results
    from moonpool.replay.sender import SenderConfig, send_all
    from moonpool.replay.target import find_target

    addresses = ClusterAddresses(state.nats_url, state.etcd_url)
    described = await describe_all(addresses, timeout_s=ASK_S_MAX)
    urls = [one.record.http_url for one in described]
    target = await asyncio.to_thread(find_target, Api(state.url), None, None)
    load = mixed_load(setting.rate, setting.warm_up_s + setting.seconds, SEED)
    config = SenderConfig(target, SCALE, SEED, TokenRange(), IN_FLIGHT_MAX, SILENCE_S_MAX)
    results = Results()
    sending = asyncio.create_task(send_all(load, config, results))
    try:
        await asyncio.sleep(setting.warm_up_s)
        looks = [await totals(urls, timeout_s=ASK_S_MAX)]
        for _ in range(WINDOWS):
            await asyncio.sleep(setting.seconds / WINDOWS)
            looks.append(await totals(urls, timeout_s=ASK_S_MAX))
            say(_progress(results, looks[-2:]))
        await sending
    finally:
        sending.cancel()
    return looks, sum(record.outcome is Outcome.SERVED for record in results.records)


def _progress(results: "Results", looks: Sequence[PredictionTotals]) -> str:
    window = looks[1].since(looks[0])
    errors = ", ".join(f"{kind} {window.error(kind, 0.5):.0%}" for kind in KINDS if window.count(kind))
    return f"{len(results.records)} answers, {results.in_flight} in flight; median errors: {errors}"


def summarise(looks: Sequence[PredictionTotals], served: int, setting: Setting) -> list[Measurement]:
    """Of each kind the median and the ninth decile of |predicted / actual - 1|, and the sum of all predicted
    times over that of the actual ones. A kind that nothing was predicted of in some window is left out."""
    windows = [after.since(before) for before, after in pairwise(looks)]
    if not all(window.count("ttft") for window in windows):
        raise CommandError("no first token came in some window; give a higher --rate or more --seconds")
    stack = setting.stack
    context = {
        **machine_context(),
        "model": stack.model,
        "instances": f"{stack.prefill}p{stack.decode}d{stack.coupled}c",
        "threads": stack.threads,
        "rate": setting.rate,
        "warm_up_s": setting.warm_up_s,
        "window_s": setting.seconds / WINDOWS,
        "served": served,
    }
    results = []
    for kind in KINDS:
        if not all(window.count(kind) for window in windows):
            continue
        about: Mapping[str, object] = {**context, "predictions": sum(one.count(kind) for one in windows)}
        for metric, share in SHARES:
            errors = [100 * window.error(kind, share) for window in windows]
            results.append(measurement(NAME, kind, metric, "%", errors, about))
        ratios = [window.predicted_s[kind] / window.actual_s[kind] for window in windows]
        results.append(measurement(NAME, kind, "predicted_by_actual", "x", ratios, about))
    return results


def mixed_load(rate: float, seconds: float, seed: int) -> list[ScheduledRequest]:
    """Poisson arrivals; prompts of 1 to PROMPT_BLOCKS_MAX blocks, short ones more often; FAMILY_SHARE of them
    begin with a part of one of FAMILIES prefixes."""
    numbers = random.Random(seed)
    requests: list[ScheduledRequest] = []
    due_s = numbers.expovariate(rate)
    fresh_id = FAMILIES * FAMILY_BLOCKS
    while due_s < seconds:
        blocks = max(1, round(PROMPT_BLOCKS_MAX ** numbers.random()))
        shared = 0
        if numbers.random() < FAMILY_SHARE:
            shared = min(numbers.randint(1, FAMILY_BLOCKS), blocks)
        first_id = numbers.randrange(FAMILIES) * FAMILY_BLOCKS
        fresh = blocks - shared
        block_ids = (*range(first_id, first_id + shared), *range(fresh_id, fresh_id + fresh))
        fresh_id += fresh
        # The last block is a part of one, mostly, as in real prompts.
        tokens = blocks * BLOCK_TOKENS_SENT - numbers.randrange(BLOCK_TOKENS_SENT)
        answer = numbers.randint(*OUTPUT_TOKENS)
        requests.append(ScheduledRequest(len(requests) + 1, due_s, block_ids, tokens, answer))
        due_s += numbers.expovariate(rate)
    return requests


COMMAND = Command(
    NAME,
    "how far predicted times to first token, steps and transfers are off on a live stack",
    add_arguments,
    run,
)
