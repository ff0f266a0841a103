"""What the tiers of a pool hold and what moved between them: as Prometheus metrics, and as one object.

Reads when it is asked; keeps nothing.
"""

from collections.abc import Iterable, Iterator
from dataclasses import asdict

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvpool import BlockPool
from kvpool.mover_limits import MoverCounters, TierCounters


class PoolCollector(Collector):
    """Lower tiers by name; the tier that is computed on has `moonpool_blocks`."""

    def __init__(self, pool: BlockPool, counters: MoverCounters) -> None:
        self._pool = pool
        self._counters = counters

    def collect(self) -> Iterator[Metric]:
        stats = self._pool.stats()
        blocks = GaugeMetricFamily(
            "moonpool_tier_blocks", "Slots of the lower tiers by state", labels=["tier", "state"]
        )
        moves = CounterMetricFamily(
            "moonpool_tier_moves",
            "Copies of blocks that came to a lower tier or left it",
            labels=["tier", "move"],
        )
        lost = CounterMetricFamily(
            "moonpool_lost_blocks", "Blocks that the pool holds no more", labels=["reason"]
        )
        for tier in stats.tiers:
            for state, count in (("free", tier.free), ("used", tier.copies), ("moving", tier.moving)):
                blocks.add_metric([tier.tier, state], count)
            for move, count in (
                ("sunk", tier.sunk_total),
                ("discarded", tier.discarded_total),
                ("risen", tier.risen_total),
                ("evicted", tier.evicted_total),
                ("lost", tier.lost_total),
            ):
                moves.add_metric([tier.tier, move], count)
        lost.add_metric(["dropped"], stats.dropped_total)
        lost.add_metric(["gone"], stats.gone_total)
        yield from (blocks, moves, lost, *self._moved())

    def _moved(self) -> Iterator[Metric]:
        moved_bytes = CounterMetricFamily(
            "moonpool_tier_bytes", "Bytes written to and read from a lower tier", labels=["tier", "direction"]
        )
        failures = CounterMetricFamily(
            "moonpool_tier_failures",
            "Blocks that could not be written, read, verified or erased",
            labels=["tier", "what"],
        )
        backing_off = GaugeMetricFamily(
            "moonpool_tier_backing_off",
            "1 while a lower tier takes no writes and is left alone for a while",
            labels=["tier"],
        )
        for tier, counted in self._counters.tiers.items():
            moved_bytes.add_metric([tier, "write"], counted.sunk_bytes)
            moved_bytes.add_metric([tier, "read"], counted.risen_bytes)
            failures.add_metric([tier, "write"], counted.write_failed_blocks)
            failures.add_metric([tier, "read"], counted.unreadable_blocks)
            failures.add_metric([tier, "corrupt"], counted.corrupt_blocks)
            failures.add_metric([tier, "erase"], counted.erase_failures)
            backing_off.add_metric([tier], counted.backing_off)
        late = CounterMetricFamily(
            "moonpool_late_rises", "Times that blocks were not brought up in time", labels=["reason"]
        )
        late.add_metric(["deadline"], self._counters.late_rises)
        late.add_metric(["stalled"], self._counters.stalled_rises)
        yield from (moved_bytes, failures, backing_off, late)


def check_asked(query: Iterable[tuple[str, str]]) -> bool:
    """Whether the keys and values of a question for the pool's state ask for its check too, with `check=1`.
    ValueError where they say anything else."""
    asked = False
    for key, value in query:
        if key != "check":
            raise ValueError(f"{key}: unknown, only check=1 is known")
        if value != "1":
            raise ValueError(f"check: {value!r}, must be 1 or left out")
        asked = True
    return asked


def pool_report(
    pool: BlockPool, counters: MoverCounters, block_bytes: int, read_pins: int
) -> dict[str, object]:
    """JSON of the pool's state; `blocks` and the like are of the tier that is computed on."""
    stats = pool.stats()
    tiers = [{**asdict(tier), **_failures(counters.tiers[tier.tier])} for tier in stats.tiers]
    return {"block_bytes": block_bytes, **asdict(stats), "tiers": tiers, "read_pins": read_pins}


def _failures(counted: TierCounters) -> dict[str, object]:
    return {
        "write_failed_total": counted.write_failed_blocks,
        "unreadable_total": counted.unreadable_blocks,
        "corrupt_total": counted.corrupt_blocks,
        "erase_failed_total": counted.erase_failures,
        "backing_off": counted.backing_off,
    }
