"""Flags that say how every instance of a simulated cluster is and how it is placed; each default is the
simulator's own."""

import argparse
from collections.abc import Mapping

from moonpool.arguments import positive, seconds, whole_number, words
from policy.choice import AdmissionMode, PlacementLimits, Strategy
from policy.evict import EvictionOrder
from simulator.reference_hardware import POOL_TOKENS, reference_cost
from simulator.results import TbtMeasure
from simulator.setup import CONDUCTORS_MAX, ClusterSetup, NodeShape
from simulator.trace import TRACE_BLOCK_TOKENS

MODEL = "llama2-70b-a800"
DEFAULTS = ClusterSetup(coupled=1)
NODE = DEFAULTS.node
TARGET_S_MAX = 3600.0
TOKENS_MAX = 1_000_000_000_000
STEP_TOKENS_MAX = 1_000_000
THRESHOLD_MAX = 1e9


def add_cluster_arguments(parser: argparse.ArgumentParser, admission: AdmissionMode) -> None:
    """`admission` is the mode where none is named."""
    tokens = whole_number(1, TOKENS_MAX)
    step_tokens = whole_number(NODE.batch_requests_max + 1, STEP_TOKENS_MAX)
    target = seconds(TARGET_S_MAX)
    parser.add_argument(
        "--policy",
        choices=words(Strategy),
        default=Strategy.JOINT.value,
        help=f"placement (default {Strategy.JOINT})",
    )
    parser.add_argument(
        "--admission",
        choices=words(AdmissionMode),
        default=admission.value,
        help=f"early rejection (default {admission})",
    )
    parser.add_argument("--model", choices=(MODEL,), default=MODEL, help="model and hardware of an instance")
    parser.add_argument(
        "--efficiency",
        type=positive(1.0),
        default=1.0,
        help="share of the data sheet's rates that is reached (default 1)",
    )
    parser.add_argument(
        "--pool-tokens",
        type=tokens,
        default=POOL_TOKENS,
        metavar="N",
        help=f"cached prefixes of an instance, in DRAM (default {POOL_TOKENS})",
    )
    parser.add_argument(
        "--ssd-tokens",
        type=whole_number(0, TOKENS_MAX),
        default=0,
        metavar="N",
        help="cached prefixes of an instance, on SSD (default none)",
    )
    parser.add_argument(
        "--eviction",
        choices=words(EvictionOrder),
        default=EvictionOrder.LRU.value,
        help=f"which of them goes first (default {EvictionOrder.LRU})",
    )
    parser.add_argument(
        "--step-tokens",
        type=step_tokens,
        default=NODE.coupled_step_tokens_max,
        metavar="N",
        help=f"of a coupled instance, in one step (default {NODE.coupled_step_tokens_max})",
    )
    parser.add_argument(
        "--ttft-s",
        type=target,
        default=DEFAULTS.ttft_s_max,
        metavar="S",
        help=f"target of the time to first token (default {DEFAULTS.ttft_s_max:g})",
    )
    parser.add_argument(
        "--tbt-s",
        type=target,
        default=DEFAULTS.tbt_s_max,
        metavar="S",
        help=f"target of the time between tokens (default {DEFAULTS.tbt_s_max:g})",
    )
    parser.add_argument(
        "--tbt-measure",
        choices=words(TbtMeasure),
        default=DEFAULTS.tbt_measure.value,
        help="of a request's gaps between tokens: the mean of the longest tenth, as FAST'25 has it, the one "
        f"that a tenth are longer than, or the mean of all (default {DEFAULTS.tbt_measure})",
    )
    parser.add_argument(
        "--conductors",
        type=whole_number(1, CONDUCTORS_MAX),
        default=DEFAULTS.conductors,
        metavar="N",
        help=f"that share the requests by their names (default {DEFAULTS.conductors})",
    )
    parser.add_argument(
        "--replication", action="store_true", help="hot prefixes are copied to where they are not yet"
    )
    parser.add_argument(
        "--balancing-threshold",
        type=positive(THRESHOLD_MAX),
        default=DEFAULTS.placement.kvcache_balancing_threshold,
        metavar="X",
        help="of kvcache_centric: how many times as long another's prefix must be to be read "
        f"(default {DEFAULTS.placement.kvcache_balancing_threshold:g})",
    )
    parser.add_argument(
        "--target-share",
        type=positive(1.0),
        default=DEFAULTS.placement.target_share,
        metavar="SHARE",
        help=f"of the targets, that predictions are held to (default {DEFAULTS.placement.target_share:g}; "
        "a live conductor's is 0.95)",
    )
    parser.add_argument(
        "--adaptive",
        action="store_true",
        help="thresholds, margins and weights tune themselves, as a live conductor's do by default",
    )


def node_shape(options: argparse.Namespace) -> NodeShape:
    """SetupError where it cannot be simulated."""
    return NodeShape(
        cost=reference_cost(options.efficiency),
        pool_blocks=max(1, options.pool_tokens // TRACE_BLOCK_TOKENS),
        ssd_blocks=options.ssd_tokens // TRACE_BLOCK_TOKENS,
        eviction=EvictionOrder(options.eviction),
        coupled_step_tokens_max=options.step_tokens,
    )


def placement_limits(options: argparse.Namespace) -> PlacementLimits:
    return PlacementLimits(
        strategy=Strategy(options.policy),
        admission=AdmissionMode(options.admission),
        kvcache_balancing_threshold=options.balancing_threshold,
        target_share=options.target_share,
        adaptive=options.adaptive,
    )


def cluster_object(options: argparse.Namespace) -> Mapping[str, object]:
    """What `--json` prints of instances, conductors and how limits are held."""
    return {
        "model": options.model,
        "efficiency": options.efficiency,
        "pool_tokens": options.pool_tokens,
        "ssd_tokens": options.ssd_tokens,
        "eviction": options.eviction,
        "step_tokens": options.step_tokens,
        "conductors": options.conductors,
        "replication": options.replication,
        "balancing_threshold": options.balancing_threshold,
        "adaptive": options.adaptive,
        "target_share": options.target_share,
    }
