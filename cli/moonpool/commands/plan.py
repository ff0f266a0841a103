"""`moonpool plan`: which split of GPUs into prefill and decode instances serves most within the targets.

Every split of the instances, and all of them coupled, is simulated at growing and falling rates of the same
requests until the highest is known at which the attainment, the share of the requests that are served within
both targets, is at least `--attainment`. With `--speedup` (of a trace) or `--rate` (of a data set) each split
is simulated once, at that. See `simulator.planning`. Instances are one node of 8 GPUs as in `moonpool
simulate cluster`; with `--parallelism` they have so many GPUs each, with what it takes to connect them
counted (`simulator.parallelism`), also for 8.

`--json` prints one object:

    {"trace": path, "dataset": name, "rate", "reuse": bool, "seed", "requests", "gpus", "policy", "admission",
     "model", "efficiency", "pool_tokens", "ssd_tokens", "eviction", "step_tokens", "conductors",
     "replication": bool, "balancing_threshold", "adaptive": bool, "target_share", "ttft_s_max", "tbt_s_max",
     "tbt_measure", "attainment_min", "tolerance",
     "best": index into `splits` or null,
     "splits": [{"gpus_per_instance", "prefill", "decode", "coupled", "gpus", "speedup", "offered_per_s",
                 "attainment", "goodput_per_s", "goodput_per_gpu_s", "hit_rate", "ttft_s": D, "tbt_s": D,
                 "simulations", "exact": bool}, …]}

`D` is as in `moonpool simulate cluster`. What a split was not found to do is null: no rate was low enough
for the attainment, and its goodput a GPU is 0. `exact` is false where the search ended at a bound instead of
within the tolerance. `offered_per_s` counts while requests arrive, and goodput is that times the attainment;
the best has most of it a GPU.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from moonpool.arguments import Command, positive, whole_number
from moonpool.errors import EXIT_OK, CommandError, UsageError
from moonpool.html_file import claim_html
from moonpool.simulations.cluster_options import (
    add_cluster_arguments,
    cluster_object,
    node_shape,
    placement_limits,
)
from moonpool.simulations.plan_report import as_page, as_table, found_line, split_object
from moonpool.simulations.progress import Progress
from moonpool.simulations.workload import (
    add_workload_arguments,
    read_workload,
    workload_name,
    workload_object,
)
from policy.choice import AdmissionMode
from simulator.parallelism import GPUS_AN_INSTANCE, NODE_GPUS, instance_of
from simulator.planning import (
    SIMULATIONS_LIMIT,
    Planned,
    Planner,
    SearchLimits,
    Split,
    best_of,
    splits_of,
)
from simulator.results import TbtMeasure
from simulator.setup import INSTANCES_MAX, SPEEDUP_MAX, ClusterSetup, NodeShape, SetupError

GPUS_MAX = INSTANCES_MAX * NODE_GPUS
COUPLED = "coupled"
SPLITS_LIMIT = 1024
SPLITS_MAX_DEFAULT = 64
LIMITS = SearchLimits()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument("--html", type=Path, metavar="FILE", help="also a page with the curve")
    add_workload_arguments(parser, "of --dataset: only at so many requests a second")
    size = parser.add_mutually_exclusive_group(required=True)
    size.add_argument(
        "--instances", type=whole_number(1, INSTANCES_MAX), metavar="N", help=f"of {NODE_GPUS} GPUs each"
    )
    size.add_argument("--gpus", type=whole_number(1, GPUS_MAX), metavar="G", help="in all")
    parser.add_argument(
        "--parallelism",
        type=gpu_numbers,
        metavar="G,…",
        help=f"of --gpus: GPUs an instance, each number tried, of {', '.join(map(str, GPUS_AN_INSTANCE))} "
        f"(default {NODE_GPUS}, as in `moonpool simulate cluster`)",
    )
    parser.add_argument(
        "--splits",
        type=split_names,
        metavar="P:D,…",
        help=f"only these; {COUPLED} is the one without a split (default all)",
    )
    parser.add_argument(
        "--speedup",
        type=positive(SPEEDUP_MAX),
        metavar="X",
        help="of --trace: only with arrivals so many times as fast",
    )
    parser.add_argument(
        "--attainment",
        type=positive(1.0),
        default=LIMITS.attainment,
        metavar="SHARE",
        help=f"of the requests, that must meet both targets (default {LIMITS.attainment})",
    )
    parser.add_argument(
        "--tolerance",
        type=positive(1.0),
        default=LIMITS.tolerance,
        metavar="SHARE",
        help=f"how far below the highest rate the one found may be (default {LIMITS.tolerance})",
    )
    parser.add_argument(
        "--splits-max",
        type=whole_number(1, SPLITS_LIMIT),
        default=SPLITS_MAX_DEFAULT,
        metavar="N",
        help=f"refuse to try more splits (default {SPLITS_MAX_DEFAULT})",
    )
    parser.add_argument(
        "--simulations-max",
        type=whole_number(1, SIMULATIONS_LIMIT),
        default=LIMITS.simulations_max,
        metavar="N",
        help=f"for one split (default {LIMITS.simulations_max})",
    )
    add_cluster_arguments(parser, AdmissionMode.NONE)


def gpu_numbers(text: str) -> tuple[int, ...]:
    """An argparse type: numbers of GPUs, with commas between."""
    parse = whole_number(1, max(GPUS_AN_INSTANCE))
    numbers = tuple(dict.fromkeys(parse(word) for word in text.split(",")))
    for number in numbers:
        if number not in GPUS_AN_INSTANCE:
            allowed = ", ".join(map(str, GPUS_AN_INSTANCE))
            raise argparse.ArgumentTypeError(f"must be of {allowed}, not {number}")
    return numbers


def split_names(text: str) -> tuple[str, ...]:
    """An argparse type: how many prefill and decode, such as 3:1, or COUPLED; with commas between."""
    instances = whole_number(1, INSTANCES_MAX)
    names = []
    for word in text.split(","):
        prefill, _, decode = word.partition(":")
        names.append(word if word == COUPLED else f"{instances(prefill)}:{instances(decode)}")
    return tuple(names)


def run(options: argparse.Namespace) -> int:
    _check_usage(options)
    gpus = options.gpus or options.instances * NODE_GPUS
    splits = _splits(options, gpus)
    requests = read_workload(options)
    if len({request.arrived_ms for request in requests}) < 2:
        raise CommandError("requests: all arrive at once, so that they have no rate")
    claim_html(options.html)
    try:
        nodes = _nodes(options)
        for split in splits:
            nodes(split.gpus_per_instance)
        limits = SearchLimits(options.attainment, options.tolerance, options.simulations_max)
        setup = ClusterSetup(
            coupled=1,
            placement=placement_limits(options),
            ttft_s_max=options.ttft_s,
            tbt_s_max=options.tbt_s,
            tbt_measure=TbtMeasure(options.tbt_measure),
            conductors=options.conductors,
            replication=options.replication,
            seed=options.seed,
        )
    except SetupError as error:
        raise CommandError(str(error)) from None
    try:
        with Progress(len(splits), "splits", sys.stderr) as progress:
            done: list[Planned] = []
            planner = Planner(
                requests, setup, nodes, limits, lambda split, speedup: progress.show(len(done), split.name)
            )
            for planned in _planned(planner, splits, options):
                done.append(planned)
                progress.finished(len(done), found_line(planned))
    except SetupError as error:
        raise CommandError(str(error)) from None
    if options.json:
        print(json.dumps(as_object(options, len(requests), gpus, done)))
    else:
        print(as_table(done, _is_fixed(options)))
    if options.html is not None:
        page = as_page(f"Splits for {workload_name(options)}", done, _is_fixed(options))
        options.html.write_text(page, encoding="utf-8")
    return EXIT_OK


def _check_usage(options: argparse.Namespace) -> None:
    if options.parallelism is not None and options.gpus is None:
        raise UsageError("--parallelism is for --gpus")
    if options.dataset is not None and options.speedup is not None:
        raise UsageError("--speedup is for --trace: a data set has --rate")


def _splits(options: argparse.Namespace, gpus: int) -> list[Split]:
    splits = [
        split
        for gpus_per_instance in options.parallelism or (NODE_GPUS,)
        for split in splits_of(gpus, gpus_per_instance)
    ]
    if options.splits is not None:
        there_are = {_name(split) for split in splits}
        for name in options.splits:
            if name not in there_are:
                raise UsageError(f"--splits: {name} is no split of {gpus} GPUs")
        splits = [split for split in splits if _name(split) in options.splits]
    if not 0 < len(splits) <= options.splits_max:
        raise UsageError(
            f"{len(splits)} splits of {gpus} GPUs, must be 1 to --splits-max {options.splits_max}; "
            "--splits names those to try"
        )
    return splits


def _name(split: Split) -> str:
    """As `--splits` has it."""
    return COUPLED if split.coupled else f"{split.prefill}:{split.decode}"


def _nodes(options: argparse.Namespace) -> Callable[[int], NodeShape]:
    """The shape of an instance by its GPUs."""
    node = node_shape(options)
    if options.parallelism is None:
        return lambda gpus: node
    return partial(instance_of, node=node, efficiency=options.efficiency)


def _planned(planner: Planner, splits: Sequence[Split], options: argparse.Namespace) -> Iterator[Planned]:
    """Each search begins where the one before ended: neighbours are alike."""
    guess = 1.0
    for split in splits:
        planned = (
            planner.fixed(split, options.speedup or 1.0)
            if _is_fixed(options)
            else planner.highest(split, guess)
        )
        yield planned
        guess = guess if planned.best is None else planned.best.speedup


def _is_fixed(options: argparse.Namespace) -> bool:
    """Whether nothing is searched: each split is simulated at the one rate that is named."""
    return options.speedup is not None or options.rate is not None


def as_object(
    options: argparse.Namespace, requests: int, gpus: int, planned: Sequence[Planned]
) -> dict[str, object]:
    """What `--json` prints; its keys are told at the top of this module."""
    best = best_of(planned)
    return {
        **workload_object(options),
        "requests": requests,
        "gpus": gpus,
        "policy": options.policy,
        "admission": options.admission,
        **cluster_object(options),
        "ttft_s_max": options.ttft_s,
        "tbt_s_max": options.tbt_s,
        "tbt_measure": options.tbt_measure,
        "attainment_min": options.attainment,
        "tolerance": options.tolerance,
        "best": None if best is None else planned.index(best),
        "splits": [split_object(one) for one in planned],
    }


COMMAND = Command("plan", "the split of GPUs that serves most within targets", add_arguments, run)
