"""`moonpool simulate cluster`: a trace through a simulated cluster, with the conductor's own policy.

What is simulated, and what is assumed, stands in docs/simulator.md and in `simulator`'s modules. The same
arguments print the same bytes.

`--json` prints one object:

    {"trace": path, "prefill", "decode", "coupled": instances, "policy", "admission", "speedup",
     "model", "efficiency", "reuse": bool, "seed", "pool_tokens", "ttft_s_max", "tbt_s_max",
     "requests", "served", "rejected": {reason: requests}, "in_targets", "ttft_in_target", "tbt_in_target",
     "duration_s", "goodput_per_s", "ttft_s": D, "ttft_error": D, "tbt_s": D, "hit_rate",
     "preempted", "evicted_blocks", "moved_bytes", "busy": {instance: share}, "events",
     "load": [{"at_s", "prefill_requests", "prefill_tokens", "decode_requests", "decode_kv_tokens"}, …],
     "per_request": [{"index", "arrived_s", "prompt_tokens", "output_tokens", "attempts", "rejected",
                      "ttft_s", "predicted_ttft_s", "tbt_s", "done_at_s", "prefill", "decode",
                      "cached_tokens"}, …]}

`D` is {"mean", "p50", "p90", "p99", "max"}, null where there is nothing to count. TTFT and TBT are those of
`simulator.results`, `ttft_error` is how far predicted TTFTs were off, in shares of the actual ones; goodput
counts requests that met both targets. `busy` is the share of the duration in which an engine computed.
`per_request` is there with `--per-request`; its `rejected` is null for a request that was served, and what
only those have is null for the others.
"""

import argparse
import json
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from moonpool.arguments import Command, positive, seconds, whole_number
from moonpool.errors import EXIT_OK, CommandError, UsageError
from moonpool.simulations.progress import TerminalProgress
from moonpool.table import format_table
from policy.choice import AdmissionMode, PlacementLimits, Strategy
from policy.evict import EvictionOrder
from simulator.cluster import SimulatedRun, simulate_cluster
from simulator.reference_hardware import POOL_TOKENS, reference_cost
from simulator.results import Distribution, RequestResult, Summary, summary
from simulator.setup import INSTANCES_MAX, SPEEDUP_MAX, ClusterSetup, NodeShape, SetupError
from simulator.trace import (
    LINES_MAX,
    TRACE_BLOCK_TOKENS,
    TraceError,
    read_trace,
    without_reuse,
)

MODEL = "llama2-70b-a800"
DEFAULTS = ClusterSetup(coupled=1)
NODE = DEFAULTS.node
TARGET_S_MAX = 3600.0
TOKENS_MAX = 1_000_000_000_000
STEP_TOKENS_MAX = 1_000_000
SEED_MAX = 2**63 - 1
THRESHOLD_MAX = 1e9


def add_arguments(parser: argparse.ArgumentParser) -> None:
    instances = whole_number(0, INSTANCES_MAX)
    tokens = whole_number(1, TOKENS_MAX)
    step_tokens = whole_number(NODE.batch_requests_max + 1, STEP_TOKENS_MAX)
    target = seconds(TARGET_S_MAX)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument("--per-request", action="store_true", help="with --json: every request's own result")
    parser.add_argument("--trace", type=Path, required=True, metavar="FILE", help="one JSON request a line")
    parser.add_argument("--prefill", type=instances, default=0, metavar="P", help="instances that prefill")
    parser.add_argument("--decode", type=instances, default=0, metavar="D", help="instances that decode")
    parser.add_argument("--coupled", type=instances, default=0, metavar="N", help="instances that do both")
    parser.add_argument("--policy", choices=[*Strategy], default=Strategy.JOINT.value, help="placement")
    parser.add_argument(
        "--admission",
        choices=[*AdmissionMode],
        default=AdmissionMode.PREDICTIVE.value,
        help="early rejection",
    )
    parser.add_argument(
        "--speedup",
        type=positive(SPEEDUP_MAX),
        default=1.0,
        metavar="X",
        help="arrivals, so many times as fast",
    )
    parser.add_argument("--model", choices=(MODEL,), default=MODEL, help="model and hardware of an instance")
    parser.add_argument(
        "--efficiency",
        type=positive(1.0),
        default=1.0,
        help="share of the data sheet's rates that is reached",
    )
    parser.add_argument("--requests", type=whole_number(1, LINES_MAX), metavar="N", help="only the first N")
    parser.add_argument(
        "--no-reuse", action="store_true", help="no block comes twice: as if every prompt were new"
    )
    parser.add_argument("--seed", type=whole_number(0, SEED_MAX), default=0, metavar="S")
    parser.add_argument(
        "--pool-tokens",
        type=tokens,
        default=POOL_TOKENS,
        metavar="N",
        help=f"cached prefixes of an instance, in DRAM (default {POOL_TOKENS})",
    )
    parser.add_argument(
        "--eviction",
        choices=[*EvictionOrder],
        default=EvictionOrder.LRU.value,
        help="which of them goes first",
    )
    parser.add_argument(
        "--step-tokens",
        type=step_tokens,
        default=NODE.coupled_step_tokens_max,
        metavar="N",
        help=f"of a coupled instance, in one step (default {NODE.coupled_step_tokens_max})",
    )
    parser.add_argument("--ttft-s", type=target, default=DEFAULTS.ttft_s_max, metavar="S", help="target")
    parser.add_argument("--tbt-s", type=target, default=DEFAULTS.tbt_s_max, metavar="S", help="target")
    parser.add_argument(
        "--balancing-threshold",
        type=positive(THRESHOLD_MAX),
        default=DEFAULTS.placement.kvcache_balancing_threshold,
        metavar="X",
        help="of kvcache_centric: how much longer another's prefix must be to be read",
    )


def run(options: argparse.Namespace) -> int:
    if not options.coupled and not (options.prefill and options.decode):
        raise UsageError("--prefill and --decode must both be at least 1, or --coupled must be")
    try:
        setup = setup_of(options)
        requests = read_trace(options.trace)[: options.requests]
    except (SetupError, TraceError) as error:
        raise CommandError(str(error)) from None
    if options.no_reuse:
        requests = without_reuse(requests)
    with TerminalProgress(len(requests), "requests", sys.stderr) as progress:
        simulated = simulate_cluster(requests, setup, progress.show)
    told = summary(simulated.results, setup.ttft_s_max, setup.tbt_s_max)
    if options.json:
        print(json.dumps(as_object(options, simulated, told)))
    else:
        print(as_table(simulated, told))
    return EXIT_OK


def setup_of(options: argparse.Namespace) -> ClusterSetup:
    """SetupError where these cannot be simulated together."""
    return ClusterSetup(
        prefill=options.prefill,
        decode=options.decode,
        coupled=options.coupled,
        node=NodeShape(
            cost=reference_cost(options.efficiency),
            pool_blocks=max(1, options.pool_tokens // TRACE_BLOCK_TOKENS),
            eviction=EvictionOrder(options.eviction),
            coupled_step_tokens_max=options.step_tokens,
        ),
        placement=PlacementLimits(
            strategy=Strategy(options.policy),
            admission=AdmissionMode(options.admission),
            kvcache_balancing_threshold=options.balancing_threshold,
        ),
        speedup=options.speedup,
        ttft_s_max=options.ttft_s,
        tbt_s_max=options.tbt_s,
        seed=options.seed,
    )


def as_object(options: argparse.Namespace, run: SimulatedRun, told: Summary) -> dict[str, object]:
    """What `--json` prints; its keys are told at the top of this module."""
    printed: dict[str, object] = {
        "trace": str(options.trace),
        "prefill": options.prefill,
        "decode": options.decode,
        "coupled": options.coupled,
        "policy": options.policy,
        "admission": options.admission,
        "speedup": options.speedup,
        "model": options.model,
        "efficiency": options.efficiency,
        "reuse": not options.no_reuse,
        "seed": options.seed,
        "pool_tokens": options.pool_tokens,
        "ttft_s_max": options.ttft_s,
        "tbt_s_max": options.tbt_s,
        **asdict(told),
        "preempted": run.preempted,
        "evicted_blocks": run.evicted_blocks,
        "moved_bytes": run.moved_bytes,
        "busy": _busy(run, told),
        "events": run.events,
        "load": [asdict(sample) for sample in run.load],
    }
    if options.per_request:
        printed["per_request"] = [_result(result) for result in run.results]
    return printed


def as_table(run: SimulatedRun, told: Summary) -> str:
    rejected = ", ".join(f"{count} {reason}" for reason, count in told.rejected.items())
    busy = _busy(run, told)
    facts = [
        ("requests", f"{told.requests}, {told.served} served, {told.requests - told.served} rejected"),
        ("rejected", rejected or "none"),
        ("in both targets", f"{told.in_targets} ({told.in_targets / told.requests:.1%})"),
        ("in TTFT, in TBT", f"{told.ttft_in_target}, {told.tbt_in_target}"),
        ("goodput", f"{told.goodput_per_s:.3f} requests/s over {told.duration_s:.0f} s"),
        ("hit rate", f"{told.hit_rate:.1%} of prompt tokens"),
        ("TTFT s", _distribution(told.ttft_s)),
        ("TTFT predicted", f"{_distribution(told.ttft_error)} off"),
        ("TBT s", _distribution(told.tbt_s)),
        ("busy", f"{min(busy.values()):.1%} to {max(busy.values()):.1%} of an instance's time"),
        ("moved", f"{run.moved_bytes / 1e12:.2f} TB between instances"),
    ]
    return format_table(("measure", "value"), facts)


def _distribution(found: Distribution | None) -> str:
    if found is None:
        return "-"
    return ", ".join(f"{name} {value:.3f}" for name, value in asdict(found).items())


def _busy(run: SimulatedRun, told: Summary) -> Mapping[str, float]:
    """By instance; a simulation in which no time passes keeps nobody busy."""
    return {name: busy_s / told.duration_s if told.duration_s else 0.0 for name, busy_s in run.busy_s.items()}


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
    }


COMMAND = Command("cluster", "a trace through a simulated cluster with its policies", add_arguments, run)
