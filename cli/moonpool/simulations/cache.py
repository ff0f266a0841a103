"""`moonpool simulate cache`: hit rates of one pool over a trace, by eviction policy and capacity.

The table has a line for each cache (`plain`: any blocks, each on its own; `closed`: prefixes only, leaves go
first, as in the pool), policy and measure: `hits` is the share of the blocks looked up that were there,
`saved` the share of the prefill time on the reference hardware that the hits save. What is assumed stands in
`simulator.reference_hardware` of that hardware, and in `simulator.cache` of the requests.

`--json` prints one object:

    {"trace": path, "requests", "block_uses", "distinct_blocks", "block_tokens",
     "results": [{"cache": "plain" | "closed", "policy", "capacity_blocks", "hit_blocks", "hit_rate",
                  "evicted_blocks", "saved_rate"}, …]}

`capacity_blocks` is null for a cache without a bound. `saved_rate` is null for the plain cache: where a
prefix has holes, a prefill could not use all that is there.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from moonpool.arguments import Command, whole_number
from moonpool.errors import EXIT_OK, CommandError
from moonpool.table import format_table
from policy.evict import EvictionOrder
from simulator.cache import CacheHits, CacheKind, simulate_cache
from simulator.trace import TRACE_BLOCK_TOKENS, TracedRequest, TraceError, distinct_blocks, read_trace

POLICIES = tuple(order.value for order in EvictionOrder)
CAPACITY_BLOCKS_MAX = 1_000_000_000
UNBOUNDED = "inf"
CAPACITIES_DEFAULT: tuple[int | None, ...] = (None, 100_000, 50_000, 30_000, 10_000, 1_000)


@dataclass(frozen=True, slots=True)
class SimulatedCache:
    kind: CacheKind
    order: EvictionOrder
    capacity_blocks: int | None
    hits: CacheHits


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument("--trace", type=Path, required=True, metavar="FILE", help="one JSON request a line")
    parser.add_argument(
        "--policy",
        nargs="+",
        choices=POLICIES,
        default=POLICIES,
        metavar="NAME",
        help=f"of {', '.join(POLICIES)} (default all)",
    )
    parser.add_argument(
        "--capacity",
        nargs="+",
        type=capacity_blocks,
        default=CAPACITIES_DEFAULT,
        metavar="BLOCKS",
        help=f"blocks of {TRACE_BLOCK_TOKENS} tokens, or {UNBOUNDED} "
        f"(default {' '.join(map(_capacity_name, CAPACITIES_DEFAULT))})",
    )
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--plain", action="store_true", help="only the cache that keeps any blocks")
    kinds.add_argument("--closed", action="store_true", help="only the cache that keeps whole prefixes")


def capacity_blocks(text: str) -> int | None:
    """An argparse type: None for no bound."""
    return None if text == UNBOUNDED else whole_number(1, CAPACITY_BLOCKS_MAX)(text)


def run(options: argparse.Namespace) -> int:
    try:
        requests = read_trace(options.trace)
    except TraceError as error:
        raise CommandError(str(error)) from None
    kinds = [CacheKind.PLAIN] * (not options.closed) + [CacheKind.CLOSED] * (not options.plain)
    orders = [EvictionOrder(name) for name in dict.fromkeys(options.policy)]
    results = simulate_all(requests, kinds, orders, list(dict.fromkeys(options.capacity)))
    print(json.dumps(as_object(options.trace, requests, results)) if options.json else as_table(results))
    return EXIT_OK


def simulate_all(
    requests: Sequence[TracedRequest],
    kinds: Sequence[CacheKind],
    orders: Sequence[EvictionOrder],
    capacities: Sequence[int | None],
) -> list[SimulatedCache]:
    """Every kind with every order and capacity. Where nothing ever has to go the order makes no difference:
    that is simulated once."""
    distinct = distinct_blocks(requests)
    results = []
    for kind in kinds:
        enough: CacheHits | None = None
        for order in orders:
            for capacity in capacities:
                if capacity is None or capacity >= distinct:
                    enough = enough or simulate_cache(requests, kind, EvictionOrder.LRU, distinct)
                    hits = enough
                else:
                    hits = simulate_cache(requests, kind, order, capacity)
                results.append(SimulatedCache(kind, order, capacity, hits))
    return results


def as_object(
    trace: Path, requests: Sequence[TracedRequest], results: Sequence[SimulatedCache]
) -> dict[str, object]:
    """What `--json` prints; its keys are told at the top of this module."""
    return {
        "trace": str(trace),
        "requests": len(requests),
        "block_uses": sum(len(request.block_ids) for request in requests),
        "distinct_blocks": distinct_blocks(requests),
        "block_tokens": TRACE_BLOCK_TOKENS,
        "results": [
            {
                "cache": result.kind,
                "policy": result.order,
                "capacity_blocks": result.capacity_blocks,
                "hit_blocks": result.hits.hit_blocks,
                "hit_rate": result.hits.hit_rate,
                "evicted_blocks": result.hits.evicted_blocks,
                "saved_rate": result.hits.saved_rate,
            }
            for result in results
        ],
    }


def as_table(results: Sequence[SimulatedCache]) -> str:
    capacities = dict.fromkeys(result.capacity_blocks for result in results)
    rows: dict[tuple[str, str, str], list[str]] = {}
    for result in results:
        measures = {"hits": result.hits.hit_rate, "saved": result.hits.saved_rate}
        for measure, rate in measures.items():
            if rate is not None:
                rows.setdefault((result.kind, result.order, measure), []).append(f"{rate:.3f}")
    header = ("cache", "policy", "measure", *map(_capacity_name, capacities))
    return format_table(header, [(*names, *cells) for names, cells in rows.items()])


def _capacity_name(capacity: int | None) -> str:
    return UNBOUNDED if capacity is None else str(capacity)


COMMAND = Command("cache", "hit rates of one pool by eviction policy and capacity", add_arguments, run)
