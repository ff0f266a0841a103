"""What `moonpool plan` found, as objects, a table and a page of HTML. Pure."""

from collections.abc import Sequence
from dataclasses import asdict

from moonpool import charts
from moonpool.charts import Series
from moonpool.table import format_table
from simulator.planning import Planned, best_of
from simulator.results import Distribution

HIGHEST_RATE = "highest rate/s"
FIXED_RATE = "rate/s"
"""Where nothing was searched."""
OTHER_COLUMNS = (
    "attained",
    "goodput/s",
    "goodput/s a GPU",
    "TTFT p90 s",
    "TBT p90 s",
    "hit rate",
    "simulations",
)


def split_object(planned: Planned) -> dict[str, object]:
    """As documented at the top of `moonpool.commands.plan`."""
    split, best = planned.split, planned.best
    return {
        "gpus_per_instance": split.gpus_per_instance,
        "prefill": split.prefill,
        "decode": split.decode,
        "coupled": split.coupled,
        "gpus": split.gpus,
        "speedup": best and best.speedup,
        "offered_per_s": best and best.offered_per_s,
        "attainment": best and best.attainment,
        "goodput_per_s": best and best.goodput_per_s,
        "goodput_per_gpu_s": planned.goodput_per_gpu_s,
        "hit_rate": best and best.told.hit_rate,
        "ttft_s": best and best.told.ttft_s and asdict(best.told.ttft_s),
        "tbt_s": best and best.told.tbt_s and asdict(best.told.tbt_s),
        "simulations": planned.simulations,
        "exact": planned.exact,
    }


def as_table(planned: Sequence[Planned], fixed: bool) -> str:
    """A line a split, and which is best; `fixed`: each at a rate that was named."""
    return f"{format_table(_header(fixed), [_row(one) for one in planned])}\n{best_line(planned)}"


def best_line(planned: Sequence[Planned]) -> str:
    best = best_of(planned)
    if best is None:
        return "best: none, no split serves enough within the targets at any rate"
    split = best.split
    return (
        f"best: {split.name} of {split.gpus_per_instance} GPUs each, "
        f"{best.goodput_per_gpu_s:.4f} requests/s a GPU within both targets"
    )


def found_line(planned: Planned) -> str:
    """What is said of one split as soon as it is done."""
    split, best = planned.split, planned.best
    found = "not at any rate" if best is None else f"{best.goodput_per_s:.3f} requests/s"
    return f"{split.name} of {split.gpus_per_instance} GPUs each, {found} within both targets"


def as_page(title: str, planned: Sequence[Planned], fixed: bool) -> str:
    """The curve over the share of the instances that prefill, a line for each number of GPUs an instance; a
    bar for each split, coupled ones too; and the table."""
    bars = [(f"{one.split.name} of {one.split.gpus_per_instance}", one.goodput_per_gpu_s) for one in planned]
    return charts.page(
        title,
        [
            (
                "Goodput a GPU by the share of instances that prefill",
                charts.paragraph(best_line(planned))
                + charts.lines_chart(
                    curves(planned), x="share of the instances that prefill", y="requests/s a GPU"
                ),
            ),
            ("Goodput a GPU of every split", charts.bar_chart(bars, y="requests/s a GPU")),
            ("Splits", charts.table(_header(fixed), [_row(one) for one in planned])),
        ],
    )


def curves(planned: Sequence[Planned]) -> list[Series]:
    """One for each number of GPUs an instance, as many as can be told apart."""
    points: dict[int, list[tuple[float, float | None]]] = {}
    for one in planned:
        split = one.split
        if not split.coupled:
            share = split.prefill / (split.prefill + split.decode)
            points.setdefault(split.gpus_per_instance, []).append((share, one.goodput_per_gpu_s))
    series = [Series(f"{gpus} GPUs an instance", curve) for gpus, curve in points.items()]
    return series[: charts.SERIES_MAX]


def _header(fixed: bool) -> tuple[str, ...]:
    return ("split", "GPUs each", FIXED_RATE if fixed else HIGHEST_RATE, *OTHER_COLUMNS)


def _row(planned: Planned) -> tuple[str, ...]:
    split, best = planned.split, planned.best
    found = (
        ("-",) * 7
        if best is None
        else (
            f"{best.offered_per_s:.3f}" + ("" if planned.exact else " or more"),
            f"{best.attainment:.1%}",
            f"{best.goodput_per_s:.3f}",
            f"{planned.goodput_per_gpu_s:.4f}",
            _p90(best.told.ttft_s),
            _p90(best.told.tbt_s),
            f"{best.told.hit_rate:.1%}",
        )
    )
    return (split.name, str(split.gpus_per_instance), *found, str(planned.simulations))


def _p90(found: Distribution | None) -> str:
    return "-" if found is None else f"{found.p90:.3f}"
