"""What came out of a simulated cluster, in rows of a name and a text. Pure."""

from collections.abc import Mapping
from dataclasses import asdict

from moonpool.table import format_table
from simulator.cluster import SimulatedRun
from simulator.results import Distribution, Summary, by_priority
from simulator.setup import ClusterSetup


def as_table(run: SimulatedRun, told: Summary, setup: ClusterSetup) -> str:
    return format_table(("measure", "value"), cluster_rows(run, told, setup))


def cluster_rows(run: SimulatedRun, told: Summary, setup: ClusterSetup) -> list[tuple[str, str]]:
    """What came out, each with its name."""
    rejected = ", ".join(f"{count} {reason}" for reason, count in told.rejected.items())
    busy = busy_shares(run, told)
    return [
        ("requests", f"{told.requests}, {told.served} served, {told.requests - told.served} rejected"),
        ("rejected", rejected or "none"),
        ("in both targets", f"{told.in_targets} ({told.in_targets / told.requests:.1%})"),
        ("in TTFT, in TBT", f"{told.ttft_in_target}, {told.tbt_in_target}"),
        *_priority_rows(run, setup),
        *([("losses", _losses(run))] if setup.failures else []),
        ("goodput", f"{told.goodput_per_s:.3f} requests/s over {told.duration_s:.0f} s"),
        ("hit rate", f"{told.hit_rate:.1%} of prompt tokens"),
        ("TTFT s", _distribution(told.ttft_s)),
        ("TTFT predicted", f"off by, in shares of the actual: {_distribution(told.ttft_error)}"),
        ("TBT s", _distribution(told.tbt_s)),
        ("busy", f"{min(busy.values()):.1%} to {max(busy.values()):.1%} of an instance's time"),
        ("moved", f"{run.moved_bytes / 1e12:.2f} TB between instances"),
    ]


def _priority_rows(run: SimulatedRun, setup: ClusterSetup) -> list[tuple[str, str]]:
    """Where there are several."""
    tallies = by_priority(run.results, setup.ttft_s_max, setup.tbt_s_max)
    if len(tallies) < 2:
        return []
    return [
        (
            f"priority {priority}",
            f"{tally.requests}, {tally.served} served ({tally.served / tally.requests:.1%}), "
            f"{tally.in_targets} in both targets",
        )
        for priority, tally in tallies.items()
    ]


def _losses(run: SimulatedRun) -> str:
    losses, resumed, recomputed_tokens = (
        sum(counts)
        for counts in zip(
            *((one.losses, one.resumed, one.recomputed_tokens) for one in run.results), strict=True
        )
    )
    return (
        f"{losses} of an instance under a request, {resumed} went on elsewhere after a first token, "
        f"{recomputed_tokens} tokens computed again"
    )


def _distribution(found: Distribution | None) -> str:
    if found is None:
        return "-"
    return ", ".join(f"{name} {value:.3f}" for name, value in asdict(found).items())


def busy_shares(run: SimulatedRun, told: Summary) -> Mapping[str, float]:
    """By instance; a simulation in which no time passes keeps nobody busy."""
    return {name: busy_s / told.duration_s if told.duration_s else 0.0 for name, busy_s in run.busy_s.items()}
