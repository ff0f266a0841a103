"""`moonpool bench serve`: what the whole control path costs a request, beside a router that does less.

Real gateway, conductor, kvmeta, NATS and etcd processes lead each request to stub instances that answer at
once with one token (`moonpool.benchmarks.stub_workers`): what is left is what Moonpool adds. In the same run
and in turn the same client sends the same prompts to as many stub servers straight, and through
`sglang-router` where `--router-python` names an environment that has it: it forwards to one of the servers
by the text's prefix and does no tokenising, no hashing, no index of blocks, no placement by cost.

A closed loop tells requests a second, an open loop at a moderate rate the latency, which is all added. What
each process takes of a processor is told for both; the client's own share stands beside them.
"""

import argparse
import asyncio
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from moonpool.arguments import Command, positive
from moonpool.benchmarks.command_line import add_json_argument, add_number_arguments, print_results, say
from moonpool.benchmarks.services import processor_s
from moonpool.benchmarks.transfer_plan import percentile
from moonpool.errors import EXIT_OK, CommandError
from moonpool.machine import machine_context
from moonpool.measurement import Measurement, measurement

if TYPE_CHECKING:
    from moonpool.benchmarks.http_load import Outcomes
    from moonpool.benchmarks.serving_systems import Profiled, System

NAME = "serve"
GATEWAYS_MAX = 8
WORKERS_MIN, WORKERS_MAX = 2, 64
CONCURRENCY_MAX = 256
WORDS_MAX = 20_000
GROUPS = 8
"""Prompts come in so many families; those of one are alike but for their end."""
SECONDS_MAX = 600
REPEATS_MAX = 100
RATE_MAX = 10_000.0
RATE_DEFAULT = 50.0
WARM_UP_S = 2.0
PATH = "/v1/completions"
GOOD = b'"choices"'
CLIENT = "client"
PROFILED_DEFAULT = "gateway-0"


@dataclass(frozen=True, slots=True)
class Setting:
    model: str
    gateways: int
    workers: int
    concurrency: int
    rate: float
    prompt_words: int
    seconds: int
    """Of each sample, once in each loop."""


@dataclass(frozen=True, slots=True)
class Load:
    """One loop's outcome with what each process took meanwhile, in seconds of a processor."""

    outcomes: "Outcomes"
    processor_s: Mapping[str, float]

    @property
    def answered(self) -> int:
        return len(self.outcomes.latencies_s)


@dataclass(frozen=True, slots=True)
class Sample:
    closed: Load
    open: Load


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_json_argument(parser)
    parser.add_argument("--model", default="smollm2", help="smollm2 (default), tiny, or a model's folder")
    parser.add_argument(
        "--rate",
        type=positive(RATE_MAX),
        default=RATE_DEFAULT,
        metavar="X",
        help=f"requests a second of the open loop (default {RATE_DEFAULT:g})",
    )
    add_number_arguments(
        parser,
        (
            ("--gateways", 1, GATEWAYS_MAX, 1, "gateway processes"),
            ("--workers", WORKERS_MIN, WORKERS_MAX, 4, "stub instances, and stub servers"),
            ("--concurrency", 1, CONCURRENCY_MAX, 8, "requests in flight in the closed loop"),
            ("--prompt-words", 1, WORDS_MAX, 200, "words of a prompt"),
            ("--seconds", 1, SECONDS_MAX, 5, "of each loop of each sample"),
            ("--repeats", 1, REPEATS_MAX, 3, "samples, all systems in turn"),
        ),
    )
    parser.add_argument(
        "--router-python",
        type=Path,
        metavar="FILE",
        help="python of an environment with sglang-router; without it that router is not measured",
    )
    parser.add_argument(
        "--profile", type=Path, metavar="FILE", help="write a profile of one service (cProfile) to this file"
    )
    parser.add_argument(
        "--profiled",
        default=PROFILED_DEFAULT,
        metavar="SERVICE",
        help=f"the service to profile, such as conductor-0 (default {PROFILED_DEFAULT})",
    )


def run(options: argparse.Namespace) -> int:
    import uvloop

    from moonpool.benchmarks.serving_systems import Profiled

    if options.router_python is not None and not options.router_python.exists():
        options.usage_error(f"--router-python: {options.router_python} does not exist")
    setting = Setting(
        options.model,
        options.gateways,
        options.workers,
        options.concurrency,
        options.rate,
        options.prompt_words,
        options.seconds,
    )
    profiled = Profiled(options.profiled, options.profile.absolute()) if options.profile else None
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        samples = runner.run(measure(setting, options.repeats, options.router_python, profiled))
    print_results(summarise(samples, setting), as_json=options.json)
    return EXIT_OK


async def measure(
    setting: Setting, repeats: int, router_python: Path | None, profiled: "Profiled | None"
) -> dict[str, list[Sample]]:
    """By system. CommandError where one does not come up, or answers nothing in some loop."""
    from moonpool.benchmarks.serving_systems import start_moonpool, start_router
    from moonpool.stack import find_model

    model_folder = await asyncio.to_thread(find_model, setting.model, say)
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        moonpool = await start_moonpool(
            stack,
            folder,
            model_folder,
            gateways=setting.gateways,
            workers=setting.workers,
            profiled=profiled,
        )
        direct, router = await start_router(stack, folder, router_python, workers=setting.workers)
        if router is None:
            say("without --router-python there is no router beside it")
        systems = [moonpool, direct, *([router] if router else [])]
        requests = {
            system.name: request_stream(model_folder.name, setting.prompt_words) for system in systems
        }
        for system in systems:
            await _closed(system, requests[system.name], setting, WARM_UP_S)
        samples: dict[str, list[Sample]] = {system.name: [] for system in systems}
        for number in range(repeats):
            for place in range(len(systems)):
                system = systems[(number + place) % len(systems)]
                sample = await _sample(system, requests[system.name], setting, seed=number)
                samples[system.name].append(sample)
                say(told(system.name, sample))
    return samples


def request_stream(model: str, prompt_words: int) -> Iterator[bytes]:
    """Without end: prompts of GROUPS families in turn, the last word of each its own."""
    from moonpool.benchmarks.http_load import request_bytes

    beginnings = [f"group{group} " * (prompt_words - 1) for group in range(GROUPS)]
    for number in count():
        prompt = f"{beginnings[number % GROUPS]}{number}"
        body = f'{{"model":"{model}","prompt":"{prompt}","max_tokens":1,"temperature":0}}'
        yield request_bytes(PATH, body.encode())


def told(name: str, sample: Sample) -> str:
    closed, steady = sample.closed, sample.open
    rate = closed.answered / closed.outcomes.took_s
    p50_ms = percentile(steady.outcomes.latencies_s, 0.5) * 1e3
    spent = ", ".join(f"{process} {ms:.2f}" for process, ms in _ms_per_request(closed).items())
    lost = sum(sum(load.outcomes.failed.values()) + load.outcomes.unsent for load in (closed, steady))
    failed = f"; {lost} refused or failed" if lost else ""
    return f"{name}: {rate:.0f} requests/s, p50 {p50_ms:.2f} ms; ms of a processor: {spent}{failed}"


def summarise(samples: Mapping[str, Sequence[Sample]], setting: Setting) -> list[Measurement]:
    """A case for each system. Ratios are taken within a round."""
    context = {
        **machine_context(),
        "model": setting.model,
        "gateways": setting.gateways,
        "workers": setting.workers,
        "concurrency": setting.concurrency,
        "rate": setting.rate,
        "prompt_words": setting.prompt_words,
        "seconds": setting.seconds,
    }
    rows = [(name, *row) for name, taken in samples.items() for row in _rows(taken)]
    ours = samples["moonpool"]
    for name, theirs in samples.items():
        if name != "moonpool":
            ratios = [
                _rate(their.closed) / _rate(our.closed) for our, their in zip(ours, theirs, strict=True)
            ]
            rows.append((name, "requests_by_moonpool", "x", ratios))
    return [measurement(NAME, case, metric, unit, values, context) for case, metric, unit, values in rows]


def _rows(samples: Sequence[Sample]) -> list[tuple[str, str, list[float]]]:
    """(metric, unit, a value for each sample)"""
    rows: list[tuple[str, str, list[float]]] = [
        ("requests", "1/s", [_rate(sample.closed) for sample in samples]),
    ]
    loops = (("closed", [each.closed for each in samples]), ("open", [each.open for each in samples]))
    for loop_name, loads in loops:
        for label, share in (("p50", 0.5), ("p99", 0.99)):
            latencies = [percentile(load.outcomes.latencies_s, share) * 1e3 for load in loads]
            rows.append((f"{loop_name}_latency_{label}", "ms", latencies))
        for process in loads[0].processor_s:
            spent = [_ms_per_request(load)[process] for load in loads]
            rows.append((f"{loop_name}_processor_{process}", "ms", spent))
        failures = [float(sum(load.outcomes.failed.values()) + load.outcomes.unsent) for load in loads]
        rows.append((f"{loop_name}_failed", "requests", failures))
    return rows


def _rate(load: Load) -> float:
    return load.answered / load.outcomes.took_s


def _ms_per_request(load: Load) -> dict[str, float]:
    return {process: spent_s * 1e3 / load.answered for process, spent_s in load.processor_s.items()}


async def _sample(system: "System", requests: Iterator[bytes], setting: Setting, *, seed: int) -> Sample:
    from moonpool.benchmarks.http_load import open_loop

    closed = await _closed(system, requests, setting, setting.seconds)
    before_s = _spent_s(system)
    outcomes = await open_loop(
        system.addresses, requests, rate=setting.rate, seconds=setting.seconds, good=GOOD, seed=seed
    )
    return Sample(closed, _load(system, outcomes, before_s))


async def _closed(system: "System", requests: Iterator[bytes], setting: Setting, seconds: float) -> Load:
    from moonpool.benchmarks.http_load import closed_loop

    before_s = _spent_s(system)
    outcomes = await closed_loop(
        system.addresses, requests, concurrency=setting.concurrency, seconds=seconds, good=GOOD
    )
    return _load(system, outcomes, before_s)


def _load(system: "System", outcomes: "Outcomes", before_s: Mapping[str, float]) -> Load:
    after_s = _spent_s(system)
    if not outcomes.latencies_s:
        raise CommandError(f"{system.name} answered nothing; by status: {dict(outcomes.failed)}")
    return Load(outcomes, {name: after_s[name] - before_s[name] for name in before_s})


def _spent_s(system: "System") -> dict[str, float]:
    """Processor time of each process since its start, the client's included."""
    spent = {name: processor_s(pid) for name, pid in system.processes.items()}
    return {**spent, CLIENT: processor_s(os.getpid())}


COMMAND = Command(NAME, "requests a second and added latency of the whole control path", add_arguments, run)
