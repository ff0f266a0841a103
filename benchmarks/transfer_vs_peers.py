"""Moonpool's transfers beside its peers: the same calls by one system after the other, round by round.

Every system is a pair of processes that is loaded once. A round times every call form, direction and depth
by every system in turn, beginning with another each time, while the others are stopped. Compared is what
happens between two timestamps in the caller's own process: see `transfer_systems/driven.py`.

benchmarks/README.md says how to set up the peers.
"""

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from benchmarks.comparison import add_comparison_arguments, now, rotated, say
from benchmarks.resident import Resident, ResidentError

from moonpool.benchmarks.transfer_plan import DEPTH, ROWS, Direction, Row, percentile
from moonpool.measurement import Measurement, as_json_line, measurement
from moonpool.table import format_table

BENCH = "transfer_vs_peers"
SYSTEMS_FOLDER = Path(__file__).parent / "transfer_systems"
CLI_FOLDER = Path(__file__).parents[1] / "cli"


@dataclass(frozen=True, slots=True)
class Compared:
    """A system: its script with arguments, and what its environment says."""

    script: tuple[str, ...]
    environment: Mapping[str, str]


PLAN = {"PYTHONPATH": str(CLI_FOLDER)}
"""The plan of calls is one for all, and needs no more than a peer's environment has."""
MOONCAKE = PLAN | {
    "MC_LOG_LEVEL": "ERROR",
    "GLOG_minloglevel": "2",
    "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "65535",
    "MC_TCP_MAX_PENDING_ADMISSIONS_PER_PEER": "65535",
}
"""By itself it logs a line for each batch, and fails where more than 2,048 ranges are under way, as four
batches of 1,024 are."""
POOLED = MOONCAKE | {"MC_TCP_ENABLE_CONNECTION_POOL": "1"}
"""By itself it may connect for each transfer."""
SYSTEMS = {
    "moonpool_tcp": Compared(("moonpool_system.py", "tcp"), {}),
    "moonpool_shm": Compared(("moonpool_system.py", "shm"), {}),
    "mooncake_tcp": Compared(("mooncake_system.py",), MOONCAKE),
    "mooncake_tcp_pooled": Compared(("mooncake_system.py",), POOLED),
    "mooncake_tcp_tuned": Compared(("mooncake_system.py",), POOLED | {"MC_TCP_SLICE_SIZE": str(1 << 20)}),
    "nixl": Compared(("nixl_system.py",), PLAN),
    "nixl_tcp": Compared(("nixl_system.py",), PLAN | {"UCX_TLS": "tcp"}),
}
OURS = tuple(name for name in SYSTEMS if name.startswith("moonpool_"))
COUNTERPARTS = {
    "mooncake_tcp": "moonpool_tcp",
    "mooncake_tcp_pooled": "moonpool_tcp",
    "mooncake_tcp_tuned": "moonpool_tcp",
    "nixl": "moonpool_shm",
    "nixl_tcp": "moonpool_tcp",
}
"""Which of ours a peer is held against: the one that goes the same way."""


@dataclass(frozen=True, slots=True)
class Form:
    """What is timed as one: calls of a row, one way, so many at once."""

    row: Row
    direction: Direction
    depth: int

    @property
    def name(self) -> str:
        name = f"{self.direction}/{self.row.name}"
        return name if self.depth == 1 else f"{name}/depth_{self.depth}"


@dataclass(frozen=True, slots=True)
class Timing:
    """One sample of a form by one system."""

    rate: float
    """GB/s."""
    call_s: tuple[float, ...]
    """Of single calls; empty where several are under way."""


Timings = Mapping[str, Sequence[Timing]]
"""By system, one for each round."""


def main() -> int:
    options = _arguments()
    rows = [row for row in ROWS if options.cases is None or row.name in options.cases]
    with ExitStack() as stack, options.output.open("w", encoding="utf-8") as output:
        systems = _start_all(dict(options.peers), options.ours or OURS, stack)
        abouts = {system.name: system.about for system in systems}
        results: list[Measurement] = []
        for row in rows:
            for form, timings in measure(row, systems, options.rounds).items():
                lines = summarise(form, timings, abouts, now())
                results += lines
                print("\n".join(map(as_json_line, lines)), file=output, flush=True)
    print(as_comparison_table(results))
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Compare Moonpool's transfers with its peers on this machine."
    )
    add_comparison_arguments(parser, tuple(COUNTERPARTS), [row.name for row in ROWS], python=None)
    parser.add_argument(
        "--ours",
        action="append",
        choices=OURS,
        help="only this of our transports; repeatable (default: both)",
    )
    return parser.parse_args()


def _start_all(peers: Mapping[str, Path], ours: Sequence[str], stack: ExitStack) -> list[Resident]:
    """Starts ours and the peers one after the other; `stack` ends them."""
    log_folder = Path(tempfile.mkdtemp(prefix="transfer_vs_peers_"))
    systems = []
    for name, python in {**dict.fromkeys(ours, Path(sys.executable)), **peers}.items():
        say(f"starting {name} (log in {log_folder})")
        script, *arguments = SYSTEMS[name].script
        command = [str(python), str(SYSTEMS_FOLDER / script), *arguments]
        systems.append(Resident.start(name, command, SYSTEMS[name].environment, log_folder))
        stack.callback(systems[-1].close)
    return systems


def measure(row: Row, systems: Sequence[Resident], rounds: int) -> dict[Form, dict[str, list[Timing]]]:
    """`rounds` samples of every form of a row by every system, after each was seen to move the bytes.

    Each sample continues the walk, on the same calls for all systems.
    """
    for system in systems:
        for direction in Direction:
            ask(system, do="verify", row=[row.ranges, row.range_bytes], direction=direction)
    forms = [Form(row, direction, depth) for direction in Direction for depth in (1, DEPTH)]
    found: dict[Form, dict[str, list[Timing]]] = {
        form: {system.name: [] for system in systems} for form in forms
    }
    first = 0
    for number in range(rounds):
        for form in forms:
            for system in rotated(systems, number):
                found[form][system.name].append(_timing(system, form, first))
            first += row.warm_calls + row.calls
        say(f"{row.name}: round {number}")
    return found


def _timing(system: Resident, form: Form, first: int) -> Timing:
    row = form.row
    answer = ask(
        system,
        do="sample",
        row=[row.ranges, row.range_bytes],
        direction=form.direction,
        first=first,
        depth=form.depth,
    )
    call_s = tuple(answer["call_s"]) if form.depth == 1 else ()
    return Timing(row.calls * row.call_bytes / answer["seconds"] / 1e9, call_s)


def ask(system: Resident, **question: object) -> dict:
    """Raises ResidentError also for what the system says is wrong."""
    answer = system.ask(**question)
    if "error" in answer:
        raise ResidentError(f"{system.name}: {answer['error']}")
    return answer


def summarise(
    form: Form,
    timings: Timings,
    abouts: Mapping[str, Mapping[str, str]],
    context: Mapping[str, object],
) -> list[Measurement]:
    """Each system's rate and latencies, and for each peer how ours compares, round by round."""
    row = form.row
    context = {**context, "call_bytes": row.call_bytes, "calls": row.calls, "depth": form.depth}
    lines = []
    for name, samples in timings.items():
        about = {**context, "system": abouts[name]}
        case = f"{form.name}/{name}"
        lines.append(measurement(BENCH, case, "rate", "GB/s", [one.rate for one in samples], about))
        if form.depth == 1:
            for label, share in (("latency_p50", 0.5), ("latency_p99", 0.99)):
                values = [percentile(one.call_s, share) * 1e6 for one in samples]
                lines.append(measurement(BENCH, case, label, "us", values, about))
    for peer, ours in COUNTERPARTS.items():
        if peer in timings and ours in timings:
            pairs = list(zip(timings[ours], timings[peer], strict=True))
            case = f"{form.name}/{ours}:{peer}"
            rates = [our.rate / their.rate for our, their in pairs]
            lines.append(measurement(BENCH, case, "rate_ratio", "x", rates, context))
            if form.depth == 1:
                latencies = [percentile(o.call_s, 0.5) / percentile(t.call_s, 0.5) for o, t in pairs]
                lines.append(measurement(BENCH, case, "latency_p50_ratio", "x", latencies, context))
    return lines


def as_comparison_table(results: Sequence[Measurement]) -> str:
    """Medians in GB/s (and µs for one call at a time), and ours over each peer's with its extremes."""
    found = {(result.case, result.metric): result for result in results}
    systems = list(
        dict.fromkeys(result.case.rpartition("/")[2] for result in results if result.metric == "rate")
    )
    pairs = list(
        dict.fromkeys(result.case.rpartition("/")[2] for result in results if result.metric == "rate_ratio")
    )
    forms = dict.fromkeys(result.case.rpartition("/")[0] for result in results if result.metric == "rate")
    header = [
        "case",
        *(f"{name} GB/s (p50 µs)" for name in systems),
        *(f"{pair} (min–max)" for pair in pairs),
    ]
    rows = []
    for form in forms:
        cells = [form]
        for name in systems:
            cell = f"{found[f'{form}/{name}', 'rate'].value:.3g}"
            latency = found.get((f"{form}/{name}", "latency_p50"))
            cells.append(cell if latency is None else f"{cell} ({latency.value:.0f})")
        for pair in pairs:
            ratio = found[f"{form}/{pair}", "rate_ratio"]
            cells.append(f"{ratio.value:.2f} ({ratio.min:.2f}–{ratio.max:.2f})")
        rows.append(cells)
    return format_table(header, rows)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ResidentError as error:
        sys.exit(f"transfer_vs_peers: error: {error}")
