"""`moonpool bench decisions`: placements a second through real NATS, etcd, kvmeta and conductor processes.

The instances are stubs in this process: registered, with real pools that hold prompts, loads that say what
was placed on them, and nothing that computes. A client keeps a window of requests in flight, as the
gateways of a busy cluster do. Beside the rate stands what each process took of a processor, which says what
bounds it: this process's share is the stubs' and the client's, no part of a decision.
"""

import argparse
import asyncio
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from moonpool.arguments import Command
from moonpool.benchmarks.command_line import add_json_argument, add_number_arguments, print_results, say
from moonpool.benchmarks.services import processor_s, start_service, until_ready
from moonpool.benchmarks.transfer_plan import percentile
from moonpool.errors import EXIT_OK, CommandError
from moonpool.machine import machine_context
from moonpool.measurement import Measurement, measurement

if TYPE_CHECKING:
    from cluster.bus import Bus
    from moonpool.benchmarks.simulated_instances import SimulatedInstances
    from policy.core import ScheduleRequest

NAME = "decisions"
CONDUCTORS_MAX = 16
INSTANCES_MIN, INSTANCES_MAX = 2, 256
PROMPT_BLOCKS_MAX = 4096
WINDOW_MAX = 4096
SECONDS_MAX = 600
REPEATS_MAX = 100
WARM_UP_S = 1.0
READY_S_MAX = 60.0
DECIDE_S_MAX = 10.0
BUSY_SHARE = 0.9
"""A process that takes this much of a processor does nothing but work, and so does a machine of its own."""
BENCH = "bench"
NATS = "nats"


@dataclass(frozen=True, slots=True)
class Setting:
    conductors: int
    instances: int
    """Half of them prefill, half decode."""
    prompt_blocks: int
    window: int
    """Requests in flight."""
    seconds: int
    """Of one sample."""


@dataclass(frozen=True, slots=True)
class Sample:
    decided: int
    took_s: float
    latencies_s: Sequence[float]
    """In order of size."""
    busy: Mapping[str, float]
    """By process: the share of one processor that it took."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_json_argument(parser)
    add_number_arguments(
        parser,
        (
            ("--conductors", 1, CONDUCTORS_MAX, 1, "conductor processes side by side"),
            ("--instances", INSTANCES_MIN, INSTANCES_MAX, 16, "stub instances, half of each kind"),
            ("--prompt-blocks", 1, PROMPT_BLOCKS_MAX, 64, "full blocks of a prompt"),
            ("--window", 1, WINDOW_MAX, 32, "requests in flight"),
            ("--seconds", 1, SECONDS_MAX, 5, "of each sample"),
            ("--repeats", 1, REPEATS_MAX, 3, "samples"),
        ),
    )


def run(options: argparse.Namespace) -> int:
    setting = Setting(
        options.conductors, options.instances, options.prompt_blocks, options.window, options.seconds
    )
    samples = asyncio.run(measure(setting, options.repeats))
    for sample in samples:
        say(bound_by(sample, os.cpu_count() or 1))
    print_results(summarise(samples, setting), as_json=options.json)
    return EXIT_OK


async def measure(setting: Setting, repeats: int) -> list[Sample]:
    """CommandError where a service does not come up or a request is not placed."""
    # Here, and not above: other commands need none of it.
    from moonpool.benchmarks.simulated_instances import running_instances
    from moonpool.cluster_client import bus, control_plane
    from moonpool.servers import etcd_server, nats_server

    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        nats = stack.enter_context(nats_server(folder))
        etcd = stack.enter_context(etcd_server(folder))
        control = await stack.enter_async_context(control_plane(etcd.url, timeout_s=READY_S_MAX))
        instances = await stack.enter_async_context(
            running_instances(nats.url, control, setting.instances, setting.prompt_blocks)
        )
        names = ("kvmeta-0", *(f"conductor-{number}" for number in range(setting.conductors)))
        say(f"{setting.instances} stub instances, {', '.join(names)}")
        addresses = ("--nats-url", nats.url, "--etcd-url", etcd.url)
        services = await _services(stack, names, addresses, folder)
        asker = await stack.enter_async_context(bus(nats.url, timeout_s=READY_S_MAX))
        processes = {**services, NATS: nats.pid or 0, BENCH: os.getpid()}
        requests = instances.requests()
        await _sample(asker, instances, requests, processes, setting.window, WARM_UP_S)
        return [
            await _sample(asker, instances, requests, processes, setting.window, setting.seconds)
            for _ in range(repeats)
        ]


def summarise(samples: Sequence[Sample], setting: Setting) -> list[Measurement]:
    context = {
        **machine_context(),
        "conductors": setting.conductors,
        "instances": setting.instances,
        "prompt_blocks": setting.prompt_blocks,
        "window": setting.window,
        "seconds": setting.seconds,
    }
    case = f"{setting.conductors}_conductors"
    rows = [
        ("decisions", "1/s", [sample.decided / sample.took_s for sample in samples]),
        *(
            (f"latency_{label}", "ms", [percentile(sample.latencies_s, share) * 1e3 for sample in samples])
            for label, share in (("p50", 0.5), ("p99", 0.99))
        ),
        ("conductor_time_per_decision", "us", [_conductor_us(sample) for sample in samples]),
        *((f"processors_{name}", "x", [sample.busy[name] for sample in samples]) for name in samples[0].busy),
    ]
    return [measurement(NAME, case, metric, unit, values, context) for metric, unit, values in rows]


def bound_by(sample: Sample, processors: int) -> str:
    """What there would have to be more of for more decisions, as far as processor times tell."""
    rate = f"{sample.decided / sample.took_s:.0f} decisions/s"
    busiest = max(sample.busy, key=lambda name: sample.busy[name])
    total = sum(sample.busy.values())
    if sample.busy[busiest] >= BUSY_SHARE:
        return f"{rate}, bound by {busiest}, which took {sample.busy[busiest]:.2f} of a processor"
    if total >= BUSY_SHARE * processors:
        return f"{rate}, bound by the machine: all took {total:.2f} of {processors} processors"
    return f"{rate}, bound by the requests in flight, or by others: all took {total:.2f} processors"


def _conductor_us(sample: Sample) -> float:
    """Processor time: what others on the machine take does not count."""
    busy = sum(share for name, share in sample.busy.items() if name.startswith("conductor-"))
    return busy * sample.took_s / sample.decided * 1e6


async def _services(
    stack: AsyncExitStack, names: Sequence[str], addresses: Sequence[str], folder: Path
) -> dict[str, int]:
    """Process ids by name, once all are ready; they end with `stack`."""
    from moonpool.servers import free_port

    pids: dict[str, int] = {}
    children = []
    ports = [free_port() for _ in names]
    for name, port in zip(names, ports, strict=True):
        arguments = (*addresses, "--http-port", str(port), "--log-level", "info")
        child = await start_service(name, arguments, folder)
        stack.push_async_callback(child.kill)
        pids[name] = child.pid
        children.append(child)
    try:
        async with asyncio.timeout(READY_S_MAX):
            for port in ports:
                await until_ready(port)
    except TimeoutError:
        tails = "\n".join(child.log_tail() for child in children)
        raise CommandError(f"not ready within {READY_S_MAX:g} s:\n{tails}") from None
    return pids


async def _sample(
    asker: "Bus",
    instances: "SimulatedInstances",
    requests: Iterator["ScheduleRequest"],
    processes: Mapping[str, int],
    window: int,
    seconds: float,
) -> Sample:
    loop = asyncio.get_running_loop()
    latencies_s: list[float] = []
    before_s = {name: processor_s(pid) for name, pid in processes.items()}
    started_s = loop.time()

    async def ask_on() -> None:
        while loop.time() - started_s < seconds:
            asked_s = loop.time()
            await _placed(asker, instances, next(requests))
            latencies_s.append(loop.time() - asked_s)

    try:
        async with asyncio.TaskGroup() as tasks:
            for _ in range(window):
                tasks.create_task(ask_on())
    except* CommandError as failed:
        raise failed.exceptions[0] from None
    took_s = loop.time() - started_s
    busy = {name: (processor_s(pid) - before_s[name]) / took_s for name, pid in processes.items()}
    return Sample(len(latencies_s), took_s, sorted(latencies_s), busy)


async def _placed(asker: "Bus", instances: "SimulatedInstances", request: "ScheduleRequest") -> None:
    from cluster import subjects
    from cluster.errors import MoonpoolError
    from policy.core import Placement

    try:
        answer = await asker.request(subjects.SCHEDULE, request, timeout_s=DECIDE_S_MAX)
    except MoonpoolError as error:
        raise CommandError(f"a request was not decided: {error}") from error
    if not isinstance(answer, Placement):
        raise CommandError(f"a request was not placed: {answer}")
    instances.take(answer)


COMMAND = Command(NAME, "placements a second through real servers and services", add_arguments, run)
