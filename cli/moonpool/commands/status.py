"""`moonpool status`: every instance of a running stack, with its load and its share of the KV cache.

`--json` prints one object:

    {"instances": [{"instance", "roles": […], "state", "incarnation", "host", "http_url", "model",
                    "requests", "queued", "running", "blocks", "blocks_free", "blocks_cached",
                    "blocks_in_use", "blocks_indexed", "prefill_tokens_total", "cached_tokens_total",
                    "decode_tokens_total", "lower_tiers": [{"tier", "blocks", "blocks_used"}, …]}, …],
     "totals": {"instances", "unreachable", and the sum of each number from "requests" on}}

`state` is `serving`, `draining`, or `unreachable` for a registered instance that did not answer in time;
its numbers are then null and count nowhere. `model` is null for an instance that serves none. `queued`
and `running` are numbers of requests. `lower_tiers` is where blocks are kept below those that are computed
on, and empty where that is nowhere; the table shows it where some instance has any.
"""

import argparse
import asyncio
import json
from collections.abc import Sequence
from dataclasses import asdict

from kvindex.core import InstanceId, Tier
from moonpool.arguments import Command, seconds
from moonpool.cluster_client import ClusterAddresses, DescribedInstance, describe_all
from moonpool.errors import EXIT_OK
from moonpool.find_stack import add_cluster_arguments, cluster_urls
from moonpool.table import format_table
from policy.core import InstanceState, LoadSnapshot, TierUse

UNREACHABLE = "unreachable"
TIMEOUT_S_DEFAULT = 2.0
TIMEOUT_S_MAX = 60.0
NO_LOAD = LoadSnapshot(InstanceId(""), (), InstanceState.SERVING)
"""Only its names count: what an instance would tell."""

HEADINGS = {
    "queued": "queued",
    "running": "running",
    "blocks": "blocks",
    "blocks_free": "free",
    "blocks_cached": "cached",
    "blocks_in_use": "in use",
    "blocks_indexed": "indexed",
    "prefill_tokens_total": "prefilled",
    "cached_tokens_total": "from cache",
    "decode_tokens_total": "decoded",
}
"""The numbers that the table shows, and what it calls them."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument(
        "--timeout",
        type=seconds(TIMEOUT_S_MAX),
        default=TIMEOUT_S_DEFAULT,
        help="what each instance gets to answer, in seconds (default 2)",
    )
    add_cluster_arguments(parser)


def run(options: argparse.Namespace) -> int:
    addresses = ClusterAddresses(*cluster_urls(options))
    instances = asyncio.run(describe_all(addresses, timeout_s=options.timeout))
    print(json.dumps(as_object(instances)) if options.json else as_table(instances))
    return EXIT_OK


def as_object(instances: Sequence[DescribedInstance]) -> dict[str, object]:
    """What `--json` prints; its keys are told at the top of this module."""
    totals: dict[str, int] = {
        "instances": len(instances),
        "unreachable": sum(instance.load is None for instance in instances),
    }
    return {"instances": [_row(instance) for instance in instances], "totals": {**totals, **_sums(instances)}}


def as_table(instances: Sequence[DescribedInstance]) -> str:
    tiers = [tier for tier in Tier if any(tier in _lower_tiers(instance) for instance in instances)]
    header = ("instance", "roles", "state", *HEADINGS.values(), *(f"in {tier}" for tier in tiers))
    rows = [
        (
            instance.record.instance,
            "+".join(instance.record.roles),
            _state(instance),
            *_cells(_numbers(instance.load) if instance.load else None),
            *(_used(_lower_tiers(instance).get(tier)) for tier in tiers),
        )
        for instance in instances
    ]
    sums = (_used(_summed(tier, instances)) for tier in tiers)
    return format_table(header, [*rows, ("total", "", "", *_cells(_sums(instances)), *sums)])


def _row(instance: DescribedInstance) -> dict[str, object]:
    record = instance.record
    return {
        "instance": record.instance,
        "roles": list(record.roles),
        "state": _state(instance),
        "incarnation": record.incarnation,
        "host": record.host,
        "http_url": record.http_url,
        "model": record.model.name if record.model else None,
        **(_numbers(instance.load) if instance.load else dict.fromkeys(_numbers(NO_LOAD))),
        "lower_tiers": [asdict(use) for use in instance.load.lower_tiers] if instance.load else None,
    }


def _state(instance: DescribedInstance) -> str:
    return instance.load.state.value if instance.load else UNREACHABLE


def _numbers(load: LoadSnapshot) -> dict[str, int]:
    return {
        "requests": load.requests,
        "queued": len(load.queued),
        "running": len(load.running),
        "blocks": load.blocks,
        "blocks_free": load.blocks_free,
        "blocks_cached": load.blocks_cached,
        "blocks_in_use": load.blocks_in_use,
        "blocks_indexed": load.blocks_indexed,
        "prefill_tokens_total": load.prefill_tokens_total,
        "cached_tokens_total": load.cached_tokens_total,
        "decode_tokens_total": load.decode_tokens_total,
    }


def _sums(instances: Sequence[DescribedInstance]) -> dict[str, int]:
    loads = [_numbers(instance.load) for instance in instances if instance.load]
    return {name: sum(load[name] for load in loads) for name in _numbers(NO_LOAD)}


def _lower_tiers(instance: DescribedInstance) -> dict[Tier, TierUse]:
    return {use.tier: use for use in instance.load.lower_tiers} if instance.load else {}


def _summed(tier: Tier, instances: Sequence[DescribedInstance]) -> TierUse:
    uses = [tiers[tier] for tiers in map(_lower_tiers, instances) if tier in tiers]
    return TierUse(tier, sum(use.blocks for use in uses), sum(use.blocks_used for use in uses))


def _used(use: TierUse | None) -> str:
    return f"{use.blocks_used}/{use.blocks}" if use else "-"


def _cells(numbers: dict[str, int] | None) -> list[str]:
    return [str(numbers[name]) if numbers else "-" for name in HEADINGS]


COMMAND = Command("status", "show instances, their load and the cached blocks", add_arguments, run)
