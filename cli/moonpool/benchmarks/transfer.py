"""`moonpool bench transfer`: bytes between two processes of this host, beside what the machine allows.

Each form of a call (`transfer_plan`) is written and read over each transport, one call at a time and four
at once, in turn with the ceilings of the same minute: memcpy by one thread, and blocking TCP in Python
between two processes. Every share is taken within a round.
"""

import argparse
import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moonpool.arguments import Command
from moonpool.benchmarks.command_line import add_case_arguments, add_json_argument, print_results, say
from moonpool.benchmarks.transfer_plan import DEPTH, MEMORY_BYTES, ROWS, Direction, Row, Sample, percentile
from moonpool.errors import EXIT_OK, CommandError
from moonpool.machine import machine_context
from moonpool.measurement import Measurement, measurement
from moonpool.table import format_table

if TYPE_CHECKING:
    from moonpool.benchmarks.transfer_caller import TransferCaller
    from moonpool.benchmarks.transfer_ceilings import Ceilings

NAME = "transfer"
TRANSPORTS = ("tcp", "shm", "rdma")
REPEATS_MAX = 1000
SIGNAL_BYTES = 64
"""Message of the unix socket's round trip: what two processes need to tell each other at least."""
ECHO_ROW = ROWS[0]
"""Measured together with this row; its size is that of the message that TCP echoes."""

MEMCPY, TCP_STREAM, TCP_ACKED = "memcpy", "tcp_stream", "tcp_acked"
TCP_ECHO, UNIX_ECHO = "tcp_echo", "unix_echo"
CEILINGS = (MEMCPY, TCP_STREAM, TCP_ACKED)
CEILINGS_OF = {"tcp": (TCP_STREAM, TCP_ACKED), "shm": (MEMCPY,), "rdma": (MEMCPY, TCP_STREAM)}
ECHO_OF = {"tcp": TCP_ECHO, "shm": UNIX_ECHO, "rdma": TCP_ECHO}


@dataclass(frozen=True, slots=True)
class Moved:
    """What one sample moves: over which transport, which way, and how many calls are in flight."""

    transport: str
    direction: Direction
    depth: int


ProbeName = Moved | str
"""A transfer, or one of the ceilings and round trips."""
Round = Mapping[ProbeName, Sample]


@dataclass(frozen=True, slots=True)
class Probe:
    """`sample(first, calls)` times calls of the row from number `first` of its walk on."""

    name: ProbeName
    sample: Callable[[int, int], Awaitable[Sample]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_json_argument(parser)
    parser.add_argument(
        "--transport",
        dest="transports",
        action="append",
        choices=TRANSPORTS,
        help="only this transport; may be repeated (default: all that this machine has)",
    )
    add_case_arguments(parser, [row.name for row in ROWS], REPEATS_MAX)


def run(options: argparse.Namespace) -> int:
    rows = [row for row in ROWS if options.cases is None or row.name in options.cases]
    results = asyncio.run(measure(options.transports or TRANSPORTS, rows, options.repeats))
    if options.json:
        print_results(results, as_json=True)
    else:
        print(as_transfer_table(results))
    return EXIT_OK


async def measure(
    transports: Sequence[str], rows: Sequence[Row], repeats: int, memory_bytes: int = MEMORY_BYTES
) -> list[Measurement]:
    """Row by row, `repeats` rounds of each. Raises CommandError where no transport is to be had, where one
    fails, or where the wrong bytes arrive."""
    # Here, and not above: other commands need none of it.
    from kvtransfer import TransferError, TransportUnavailable
    from moonpool.benchmarks.transfer_caller import TransferCaller, WrongTransfer
    from moonpool.benchmarks.transfer_ceilings import Ceilings

    unavailable: dict[str, str] = {}
    async with AsyncExitStack() as stack:
        callers = []
        for transport in transports:
            try:
                callers.append(
                    await stack.enter_async_context(TransferCaller.running(transport, memory_bytes))
                )
            except TransportUnavailable as error:
                unavailable[transport] = str(error)
                say(f"not measured: {error}")
        if not callers:
            raise CommandError("this machine has none of the transports asked for")
        ceilings = stack.enter_context(Ceilings(memory_bytes))
        results = [_available(transport, unavailable.get(transport)) for transport in transports]
        for row in rows:
            say(row.name)
            try:
                rounds = await _rounds(row, callers, ceilings, repeats)
            except (WrongTransfer, TransferError) as error:
                raise CommandError(f"{row.name}: {error}") from error
            results += summarise(row, rounds, machine_context())
    return results


async def _rounds(
    row: Row, callers: Sequence["TransferCaller"], ceilings: "Ceilings", repeats: int
) -> list[Round]:
    """Every probe in turn, beginning with another one each round; each continues the walk, so that none finds
    in a cache what the one before it left there."""
    for caller in callers:
        for direction in Direction:
            await caller.verify(direction, row)
    probes = _probes(row, callers, ceilings)
    rounds: list[Round] = []
    first = 0
    for number in range(repeats):
        samples: dict[ProbeName, Sample] = {}
        start = number % len(probes)
        for probe in probes[start:] + probes[:start]:
            await probe.sample(first, row.warm_calls)
            samples[probe.name] = await probe.sample(first + row.warm_calls, row.calls)
            first += row.warm_calls + row.calls
        rounds.append(samples)
    return rounds


def _probes(row: Row, callers: Sequence["TransferCaller"], ceilings: "Ceilings") -> list[Probe]:
    async def memcpy(first: int, calls: int) -> Sample:
        return ceilings.memcpy(row, first, calls)

    async def tcp_stream(first: int, calls: int) -> Sample:
        return ceilings.tcp(row, first, calls, each_acknowledged=False)

    async def tcp_acked(first: int, calls: int) -> Sample:
        return ceilings.tcp(row, first, calls, each_acknowledged=True)

    async def tcp_echo(_: int, calls: int) -> Sample:
        return ceilings.tcp_echo(row.call_bytes, calls)

    async def unix_echo(_: int, calls: int) -> Sample:
        return ceilings.unix_echo(SIGNAL_BYTES, calls)

    probes = [Probe(MEMCPY, memcpy), Probe(TCP_STREAM, tcp_stream), Probe(TCP_ACKED, tcp_acked)]
    if row == ECHO_ROW:
        probes += [Probe(TCP_ECHO, tcp_echo), Probe(UNIX_ECHO, unix_echo)]
    for caller in callers:
        for direction in Direction:
            probes += [_moving(caller, direction, row, depth) for depth in (1, DEPTH)]
    return probes


def _moving(caller: "TransferCaller", direction: Direction, row: Row, depth: int) -> Probe:
    async def sample(first: int, calls: int) -> Sample:
        return await caller.sample(direction, row, first, calls, depth)

    return Probe(Moved(caller.transport, direction, depth), sample)


def summarise(row: Row, rounds: Sequence[Round], context: Mapping[str, object]) -> list[Measurement]:
    """The ceilings of a row, then rates, latencies and shares of each transfer."""
    context = {**context, "call_bytes": row.call_bytes, "ranges": row.ranges, "calls": row.calls}
    results = []
    for name in rounds[0]:
        if isinstance(name, Moved):
            results += _summarise_moved(row, name, rounds, {**context, "depth": name.depth})
        elif name in CEILINGS:
            rates = [_rate(row, samples[name]) for samples in rounds]
            results.append(measurement(NAME, f"{name}/{row.name}", "rate", "GB/s", rates, context))
        else:
            results += _latencies(f"{name}/{row.name}", name, rounds, context)
    return results


def _summarise_moved(
    row: Row, name: Moved, rounds: Sequence[Round], context: Mapping[str, object]
) -> list[Measurement]:
    case = f"{name.transport}/{name.direction}/{row.name}"
    if name.depth > 1:
        case = f"{case}/depth_{name.depth}"
    rates = [_rate(row, samples[name]) for samples in rounds]
    results = [measurement(NAME, case, "rate", "GB/s", rates, context)]
    for ceiling in CEILINGS_OF[name.transport]:
        shares = [rate / _rate(row, samples[ceiling]) for rate, samples in zip(rates, rounds, strict=True)]
        results.append(measurement(NAME, case, f"share_of_{ceiling}", "x", shares, context))
    if name.depth == 1:
        results += _latencies(case, name, rounds, context)
        echo = ECHO_OF[name.transport]
        if echo in rounds[0]:
            ratios = [
                percentile(samples[name].call_s, 0.5) / percentile(samples[echo].call_s, 0.5)
                for samples in rounds
            ]
            results.append(measurement(NAME, case, f"latency_p50_over_{echo}", "x", ratios, context))
    return results


def _latencies(
    case: str, name: ProbeName, rounds: Sequence[Round], context: Mapping[str, object]
) -> list[Measurement]:
    return [
        measurement(
            NAME,
            case,
            f"latency_{label}",
            "us",
            [percentile(samples[name].call_s, share) * 1e6 for samples in rounds],
            context,
        )
        for label, share in (("p50", 0.5), ("p99", 0.99))
    ]


def _rate(row: Row, sample: Sample) -> float:
    """GB/s of all calls of a sample."""
    return len(sample.call_s) * row.call_bytes / sample.seconds / 1e9


def _available(transport: str, reason: str | None) -> Measurement:
    context = {} if reason is None else {"reason": reason}
    return measurement(NAME, transport, "available", "bool", [float(reason is None)], context)


def as_transfer_table(results: Sequence[Measurement]) -> str:
    """A line for each transport, way and row, with the share of the first of its ceilings; then the round
    trips, and what is not here."""
    values = {(result.case, result.metric): result for result in results}
    share = f"share ×{DEPTH}"
    header = ("case", "GB/s", "p50 µs", "p99 µs", f"GB/s ×{DEPTH}", "ceiling", "GB/s", "share", share)
    lines, notes = [], []
    for result in results:
        kind, row = result.case.split("/")[0], result.case.split("/")[-1]
        if result.metric == "latency_p50" and kind in CEILINGS_OF:
            lines.append(_table_line(values, result.case, CEILINGS_OF[kind][0], row))
        elif result.metric == "latency_p50":
            p99 = values[result.case, "latency_p99"]
            notes.append(f"{result.case}: p50 {_short(result.value)} µs, p99 {_short(p99.value)} µs")
        elif "reason" in result.context:
            notes.append(f"not measured: {result.context['reason']}")
    return "\n".join([format_table(header, lines), *notes])


def _table_line(
    values: Mapping[tuple[str, str], Measurement], case: str, ceiling: str, row: str
) -> tuple[str, ...]:
    deep, share = f"{case}/depth_{DEPTH}", f"share_of_{ceiling}"
    return (
        case,
        _short(values[case, "rate"].value),
        _short(values[case, "latency_p50"].value),
        _short(values[case, "latency_p99"].value),
        _short(values[deep, "rate"].value),
        ceiling,
        _short(values[f"{ceiling}/{row}", "rate"].value),
        _spread(values[case, share]),
        _spread(values[deep, share]),
    )


def _short(value: float) -> str:
    return f"{value:.3g}" if value < 100 else f"{value:.0f}"


def _spread(result: Measurement) -> str:
    return f"{result.value:.2f} ({result.min:.2f}–{result.max:.2f})"


COMMAND = Command(
    NAME, "bytes between two processes over each transport, beside the machine's ceilings", add_arguments, run
)
