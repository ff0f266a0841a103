"""A replay as a page of HTML: its tables, how long requests took, and what went on over time. Pure."""

from collections.abc import Sequence

from moonpool import charts
from moonpool.replay.records import Outcome, Record
from moonpool.replay.report import SPREAD_HEADER, ReplayReport, count_rows, failure_lines, spread_rows
from moonpool.replay.statistics import over_time

SHORTEST_MS = 1e-3
"""Shorter times are shown as this: the axis is logarithmic."""


def as_page(report: ReplayReport, records: Sequence[Record]) -> str:
    """The whole document."""
    served = [record for record in records if record.outcome is Outcome.SERVED]
    moments = over_time(records)
    in_flight = [(moment.at_s, moment.in_flight) for moment in moments]
    hit_rate = [(moment.at_s, moment.hit_rate) for moment in moments]
    left_out = "".join(map(charts.paragraph, failure_lines(report)))
    return charts.page(
        f"Replay of {report.trace}",
        [
            ("What was sent, and what came of it", charts.table(("measure", "value"), count_rows(report))),
            ("Times", charts.table(SPREAD_HEADER, spread_rows(report.summary)) + left_out),
            (
                "Time to first token",
                _times([record.ttft_s for record in served], report.targets.ttft_s, "TTFT, ms"),
            ),
            (
                "Time between tokens, a request's longest tenth of gaps",
                _times([record.tbt_s for record in served], report.targets.tbt_s, "TBT, ms"),
            ),
            ("Requests in flight", charts.line_chart(in_flight, x="seconds", y="requests, mean of a bin")),
            (
                "Hit rate",
                charts.line_chart(hit_rate, x="seconds", y="of the prompt tokens that ended then", y_max=1.0),
            ),
        ],
    )


def _times(values_s: Sequence[float | None], target_s: float, x: str) -> str:
    shown = [max(SHORTEST_MS, value * 1e3) for value in values_s if value is not None]
    return charts.histogram(shown, x=x, y="requests", target=target_s * 1e3)
