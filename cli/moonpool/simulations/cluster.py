"""`moonpool simulate cluster`: a trace through a simulated cluster, with the conductor's own policy.

What is simulated, and what is assumed, stands in docs/simulator.md and in `simulator`'s modules. The same
arguments print the same bytes.

`--json` prints one object:

    {"trace": path, "dataset": name, "rate", "reuse": bool, "seed",
     "prefill", "decode", "coupled": instances, "policy", "admission", "speedup",
     "model", "efficiency", "pool_tokens", "ssd_tokens", "eviction", "step_tokens", "conductors",
     "replication": bool, "balancing_threshold", "adaptive": bool, "target_share",
     "failures": [{"instance", "at_s", "back_at_s"}, …], "joins": [{"instance", "at_s"}, …],
     "ttft_s_max", "tbt_s_max", "tbt_measure": "tail", "p90" or "mean",
     "requests", "served", "rejected": {reason: requests}, "in_targets", "ttft_in_target", "tbt_in_target",
     "duration_s", "goodput_per_s", "ttft_s": D, "ttft_error": D, "tbt_s": D, "hit_rate",
     "priorities": {priority: {"requests", "served", "in_targets"}},
     "losses", "resumed", "recomputed_tokens",
     "preempted", "evicted_blocks", "moved_bytes", "copied_prefixes", "busy": {instance: share}, "events",
     "load": [{"at_s", "prefill_requests", "prefill_tokens", "decode_requests", "decode_kv_tokens"}, …],
     "per_request": [{"index", "arrived_s", "prompt_tokens", "output_tokens", "attempts", "rejected",
                      "ttft_s", "predicted_ttft_s", "tbt_s", "done_at_s", "prefill", "decode",
                      "cached_tokens", "priority", "losses", "resumed", "recomputed_tokens"}, …]}

`trace` is null where there is a `dataset`, which is null otherwise, as is its `rate`.
`D` is {"mean", "p50", "p90", "p99", "max"}, null where there is nothing to count. TTFT and TBT are those of
`simulator.results`, `ttft_error` is how far predicted TTFTs were off, in shares of the actual ones; goodput
counts requests that met both targets. `losses` counts how often an instance failed under a request, `resumed`
the placements after a first token, `recomputed_tokens` what was prefilled after losses. `busy` is the share
of the duration in which an engine computed. `per_request` is there with `--per-request`; its `rejected` is
null for a request that was served, and what only those have is null for the others.
"""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

from kvindex.core import InstanceId
from moonpool.arguments import Command, positive, whole_number
from moonpool.errors import EXIT_OK, CommandError, UsageError
from moonpool.html_file import claim_html
from moonpool.simulations.cluster_options import (
    add_cluster_arguments,
    cluster_object,
    node_shape,
    placement_limits,
)
from moonpool.simulations.cluster_table import as_table, busy_shares, cluster_rows
from moonpool.simulations.page import as_page
from moonpool.simulations.progress import Progress
from moonpool.simulations.workload import (
    add_workload_arguments,
    read_workload,
    workload_name,
    workload_object,
)
from policy.choice import AdmissionMode
from simulator.cluster import SimulatedRun, simulate_cluster
from simulator.results import RequestResult, Summary, TbtMeasure, by_priority, summary
from simulator.setup import INSTANCES_MAX, SPEEDUP_MAX, ClusterSetup, NodeFailure, NodeJoin, SetupError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    instances = whole_number(0, INSTANCES_MAX)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument("--per-request", action="store_true", help="with --json: every request's own result")
    parser.add_argument("--html", type=Path, metavar="FILE", help="also a page with charts")
    add_workload_arguments(parser, "of --dataset: requests a second, in the mean")
    parser.add_argument("--prefill", type=instances, default=0, metavar="P", help="instances that prefill")
    parser.add_argument("--decode", type=instances, default=0, metavar="D", help="instances that decode")
    parser.add_argument("--coupled", type=instances, default=0, metavar="N", help="instances that do both")
    parser.add_argument(
        "--speedup",
        type=positive(SPEEDUP_MAX),
        default=1.0,
        metavar="X",
        help="arrivals, so many times as fast (default 1)",
    )
    parser.add_argument(
        "--fail",
        type=failure,
        action="append",
        default=[],
        metavar="INSTANCE@S[:S]",
        help="an instance is gone at a time, and back at a later one or never; may be given several times; "
        "numbers run on from prefill to decode to coupled: of two and two the last is decode-3",
    )
    parser.add_argument(
        "--join",
        type=join,
        action="append",
        default=[],
        metavar="INSTANCE@S",
        help="an instance, one of those counted, comes only at a time, empty; may be given several times",
    )
    add_cluster_arguments(parser, AdmissionMode.PREDICTIVE)


def failure(text: str) -> NodeFailure:
    """An argparse type."""
    name, _, times = text.rpartition("@")
    at_s, colon, back_at_s = times.partition(":")
    return NodeFailure(InstanceId(name), _moment(at_s, text), _moment(back_at_s, text) if colon else None)


def join(text: str) -> NodeJoin:
    """An argparse type."""
    name, _, at_s = text.rpartition("@")
    return NodeJoin(InstanceId(name), _moment(at_s, text))


def _moment(at_s: str, text: str) -> float:
    try:
        return float(at_s)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"must look like prefill-0@60 or prefill-0@60:120, not {text!r}"
        ) from None


def run(options: argparse.Namespace) -> int:
    if not options.coupled and not (options.prefill and options.decode):
        raise UsageError("--prefill and --decode must both be at least 1, or --coupled must be")
    if options.dataset is not None and options.rate is None:
        raise UsageError("--dataset needs --rate, the requests a second")
    try:
        setup = setup_of(options)
    except SetupError as error:
        raise UsageError(str(error)) from None
    requests = read_workload(options)
    claim_html(options.html)
    try:
        with Progress(len(requests), "requests", sys.stderr) as progress:
            simulated = simulate_cluster(requests, setup, progress.show)
    except SetupError as error:
        raise CommandError(str(error)) from None
    told = summary(simulated.results, setup.ttft_s_max, setup.tbt_s_max)
    print(
        json.dumps(as_object(options, simulated, told)) if options.json else as_table(simulated, told, setup)
    )
    if options.html is not None:
        title = f"{workload_name(options)}, simulated"
        page = as_page(title, cluster_rows(simulated, told, setup), simulated, setup)
        options.html.write_text(page, encoding="utf-8")
    return EXIT_OK


def setup_of(options: argparse.Namespace) -> ClusterSetup:
    """SetupError where these cannot be simulated together."""
    return ClusterSetup(
        prefill=options.prefill,
        decode=options.decode,
        coupled=options.coupled,
        node=node_shape(options),
        placement=placement_limits(options),
        speedup=options.speedup,
        ttft_s_max=options.ttft_s,
        tbt_s_max=options.tbt_s,
        tbt_measure=TbtMeasure(options.tbt_measure),
        seed=options.seed,
        conductors=options.conductors,
        replication=options.replication,
        failures=tuple(options.fail),
        joins=tuple(options.join),
    )


def as_object(options: argparse.Namespace, run: SimulatedRun, told: Summary) -> dict[str, object]:
    """What `--json` prints; its keys are told at the top of this module."""
    printed: dict[str, object] = {
        **workload_object(options),
        "prefill": options.prefill,
        "decode": options.decode,
        "coupled": options.coupled,
        "policy": options.policy,
        "admission": options.admission,
        "speedup": options.speedup,
        **cluster_object(options),
        "failures": [asdict(one) for one in options.fail],
        "joins": [asdict(one) for one in options.join],
        "ttft_s_max": options.ttft_s,
        "tbt_s_max": options.tbt_s,
        "tbt_measure": options.tbt_measure,
        **asdict(told),
        "priorities": {
            str(priority): asdict(tally)
            for priority, tally in by_priority(run.results, options.ttft_s, options.tbt_s).items()
        },
        "losses": sum(result.losses for result in run.results),
        "resumed": sum(result.resumed for result in run.results),
        "recomputed_tokens": sum(result.recomputed_tokens for result in run.results),
        "preempted": run.preempted,
        "evicted_blocks": run.evicted_blocks,
        "moved_bytes": run.moved_bytes,
        "copied_prefixes": run.copied_prefixes,
        "busy": busy_shares(run, told),
        "events": run.events,
        "load": [asdict(sample) for sample in run.load],
    }
    if options.per_request:
        printed["per_request"] = [_result(result) for result in run.results]
    return printed


def _result(result: RequestResult) -> dict[str, object]:
    served = result.served
    return {
        "index": result.index,
        "arrived_s": result.arrived_s,
        "prompt_tokens": result.prompt_tokens,
        "output_tokens": result.output_tokens,
        "attempts": result.attempts,
        "rejected": result.rejected,
        "ttft_s": served and served.ttft_s,
        "predicted_ttft_s": served and served.predicted_ttft_s,
        "tbt_s": served and served.tbt_s,
        "done_at_s": served and served.done_at_s,
        "prefill": served and served.prefill,
        "decode": served and served.decode,
        "cached_tokens": served and served.cached_tokens,
        "priority": result.priority,
        "losses": result.losses,
        "resumed": result.resumed,
        "recomputed_tokens": result.recomputed_tokens,
    }


COMMAND = Command("cluster", "a trace through a simulated cluster with its policies", add_arguments, run)
