"""`moonpool bench place`: one decision in process: the prefix match and `policy.place`, together and apart.

Every instance holds the prompt to another depth, which is the most that there is to compare. From one
decision to the next the view changes as a conductor's does at a thousand decisions a second: the placement is
booked, an older booking runs out, and as many instances tell their loads as do in a millisecond, but at least
one. To fold a load or a booking is measured beside the decisions; what it leaves to be added up is done by
the next decision and counts as its time.
"""

import argparse
import time
from collections.abc import Mapping, Sequence

from kvhash import BLOCK_TOKENS, HASH_BYTES
from kvindex.directory import Directory
from moonpool.arguments import Command, whole_number
from moonpool.benchmarks.command_line import add_json_argument, add_number_arguments, print_results, say
from moonpool.benchmarks.directories import STAGGERED, Size, apply_all, filled
from moonpool.benchmarks.loaded_cluster import DECISION_S, LoadedCluster
from moonpool.benchmarks.transfer_plan import percentile
from moonpool.errors import EXIT_OK, CommandError
from moonpool.machine import machine_context
from moonpool.measurement import Measurement, measurement
from policy.choice import PlacementLimits
from policy.core import Placement
from policy.place import place

NAME = "place"
INSTANCES_MIN, INSTANCES_MAX = 2, 1024
INSTANCES = (64, 1000)
REPEATS_MAX = 1000
DECISIONS = 200
"""In one sample."""
PROMPT_BLOCKS_MAX = 16_384
TBT_MS_MAX = 60_000
REQUESTS_MAX = 1024
LOADS_PER_S = 10
"""Of an instance that is busy."""
MATCH, PLACE, BOTH = "match", "place", "match_and_place"
FOLD_LOAD, FOLD_BOOKING = "fold_load", "fold_booking"
BOTH_CPU = "match_and_place_cpu"
"""Processor time of the thread: what others on the machine take does not count."""
STEPS = (MATCH, PLACE, BOTH, BOTH_CPU, FOLD_LOAD, FOLD_BOOKING)
SHARES = (("p50", 0.5), ("p99", 0.99))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_json_argument(parser)
    parser.add_argument(
        "--instances",
        action="append",
        type=whole_number(INSTANCES_MIN, INSTANCES_MAX),
        metavar="N",
        help="instances in the cluster; may be repeated (default 64 and 1000)",
    )
    add_number_arguments(
        parser,
        (
            ("--prompt-blocks", 1, PROMPT_BLOCKS_MAX, 2048, "full blocks of the prompt"),
            ("--queued", 0, REQUESTS_MAX, 4, "requests that wait at each prefill instance"),
            ("--running", 1, REQUESTS_MAX, 32, "requests that run at each decode instance"),
            (
                "--tbt-ms",
                0,
                TBT_MS_MAX,
                0,
                "target between tokens; with one decodes are looked at ahead",
            ),
            ("--repeats", 1, REPEATS_MAX, 5, f"samples, each of {DECISIONS} decisions"),
        ),
    )


def run(options: argparse.Namespace) -> int:
    results: list[Measurement] = []
    for instances in options.instances or INSTANCES:
        say(f"{instances} instances")
        results += measure(
            instances,
            options.prompt_blocks,
            options.queued,
            options.running,
            options.repeats,
            tbt_ms=options.tbt_ms or None,
        )
    print_results(results, as_json=options.json)
    return EXIT_OK


def measure(
    instances: int,
    prompt_blocks: int,
    queued: int,
    running: int,
    repeats: int,
    decisions: int = DECISIONS,
    tbt_ms: float | None = None,
) -> list[Measurement]:
    """Microseconds by what is done, of one load or booking for the folds. CommandError where the request is
    not placed."""
    context = {
        **machine_context(),
        "instances": instances,
        "prompt_blocks": prompt_blocks,
        "queued": queued,
        "running": running,
        "decisions": decisions,
        "tbt_ms": tbt_ms,
    }
    size = Size(instances, 0, prompt_blocks)
    contents = filled(STAGGERED, size, seed=1)
    directory = Directory()
    apply_all(directory, contents.events)
    cluster = LoadedCluster(size.names, queued, running, seed=1)
    packed = contents.prompts[0].packed
    limits = PlacementLimits(tbt_ms_default=tbt_ms)
    _decisions(directory, cluster, packed, decisions, limits)
    samples = [_decisions(directory, cluster, packed, decisions, limits) for _ in range(repeats)]
    return [
        measurement(
            NAME,
            f"{instances}_instances",
            f"{step}_{label}",
            "us",
            [percentile(sample[step], share) for sample in samples],
            context,
        )
        for step in STEPS
        for label, share in SHARES
    ]


def _decisions(
    directory: Directory, cluster: LoadedCluster, packed: bytes, decisions: int, limits: PlacementLimits
) -> Mapping[str, Sequence[float]]:
    """Microseconds of each step of each decision."""
    loads = max(1, round(len(cluster.view.instances) * LOADS_PER_S * DECISION_S))
    # One token beyond the full blocks: all of them may come from a cache.
    prompt_tokens = len(packed) // HASH_BYTES * BLOCK_TOKENS + 1
    taken_us: dict[str, list[float]] = {step: [] for step in STEPS}
    for _ in range(decisions):
        request = cluster.request(packed, prompt_tokens)
        cpu_started_ns = time.thread_time_ns()
        started_ns = time.perf_counter_ns()
        matches = directory.match(packed)
        matched_ns = time.perf_counter_ns()
        decision = place(cluster.view, request, matches, limits, cluster.now_s)
        placed_ns = time.perf_counter_ns()
        cpu_placed_ns = time.thread_time_ns()
        if not isinstance(decision, Placement):
            raise CommandError(f"the request was not placed: {decision.reason}: {decision.detail}")
        to_book_ns = time.perf_counter_ns()
        cluster.book(decision, prompt_tokens)
        booked_ns = time.perf_counter_ns()
        snapshots = [cluster.next_snapshot() for _ in range(loads)]
        told_ns = time.perf_counter_ns()
        for snapshot in snapshots:
            cluster.fold(snapshot)
        folded_ns = time.perf_counter_ns()
        for step, taken_ns in (
            (MATCH, matched_ns - started_ns),
            (PLACE, placed_ns - matched_ns),
            (BOTH, placed_ns - started_ns),
            (BOTH_CPU, cpu_placed_ns - cpu_started_ns),
            (FOLD_LOAD, (folded_ns - told_ns) / loads),
            (FOLD_BOOKING, booked_ns - to_book_ns),
        ):
            taken_us[step].append(taken_ns / 1e3)
    return taken_us


COMMAND = Command(NAME, "one decision in process: prefix match and placement", add_arguments, run)
