"""A simulated run as a page of HTML: what came out, how long requests took, and what went on over time. Pure.

Prefill and decode loads are shown together as well, each as a share of its own peak: what is prefilled now is
decoded later, so that their peaks tend to alternate.
"""

from collections.abc import Callable, Sequence

from moonpool import charts
from moonpool.charts import Series
from simulator.cluster import SimulatedRun
from simulator.results import LoadSample, RequestResult, TbtMeasure
from simulator.setup import ClusterSetup

SHORTEST_S = 1e-6
"""Shorter times are shown as this: the axis is logarithmic."""
TIME_BINS = 60
MOMENTS_MAX = 600
"""Of the load, that are drawn: of more, every second or third, and so on."""
OTHER_REASONS = "other reasons"
TBT_TITLES = {
    TbtMeasure.TAIL: "Time between tokens, mean of a request's longest tenth of gaps",
    TbtMeasure.P90: "Time between tokens, the gap that a tenth of a request's gaps are longer than",
    TbtMeasure.MEAN: "Time between tokens, mean of all gaps of a request",
}


def as_page(title: str, rows: Sequence[tuple[str, str]], run: SimulatedRun, setup: ClusterSetup) -> str:
    """The whole document; `rows` is the table at its top."""
    served = [result.served for result in run.results if result.served is not None]
    ttft_s = [one.ttft_s for one in served]
    tbt_s = [one.tbt_s for one in served if one.tbt_s is not None]
    return charts.page(
        title,
        [
            ("What came out", charts.table(("measure", "value"), rows)),
            ("Time to first token", _times(ttft_s, setup.ttft_s_max, "TTFT, s")),
            (TBT_TITLES[setup.tbt_measure], _times(tbt_s, setup.tbt_s_max, "TBT, s")),
            *_load_sections(run.load),
            ("Hit rate", _hit_rates(run.results)),
            ("Rejections", _rejections(run.results)),
            ("Busy instances", _busy(run)),
        ],
    )


def _times(values_s: Sequence[float], target_s: float, x: str) -> str:
    shown = [max(SHORTEST_S, value) for value in values_s]
    return charts.histogram(shown, x=x, y="requests", target=target_s)


def _load_sections(load: Sequence[LoadSample]) -> list[tuple[str, str]]:
    every = -(-len(load) // MOMENTS_MAX)
    samples = load[::every]
    prefill = [(sample.at_s, float(sample.prefill_tokens)) for sample in samples]
    decode = [(sample.at_s, float(sample.decode_kv_tokens)) for sample in samples]
    requests = [
        Series("prefill", [(sample.at_s, float(sample.prefill_requests)) for sample in samples]),
        Series("decode", [(sample.at_s, float(sample.decode_requests)) for sample in samples]),
    ]
    shares = [
        Series("tokens to prefill", _of_peak(prefill)),
        Series("KV tokens being decoded", _of_peak(decode)),
    ]
    return [
        (
            "Load of prefill and decode, each in shares of its peak",
            charts.lines_chart(shares, x="seconds", y="share of its peak", y_max=1.0),
        ),
        ("Tokens to prefill", charts.line_chart(prefill, x="seconds", y="tokens, queued or in progress")),
        ("KV tokens being decoded", charts.line_chart(decode, x="seconds", y="tokens")),
        ("Requests", charts.lines_chart(requests, x="seconds", y="requests")),
    ]


def _of_peak(points: Sequence[tuple[float, float]]) -> list[tuple[float, float | None]]:
    peak = max((value for _, value in points), default=0.0)
    return [(at_s, value / peak if peak else 0.0) for at_s, value in points]


def _hit_rates(results: Sequence[RequestResult]) -> str:
    """Of those that arrived in a time and were served."""

    def hit_rate(arrived: Sequence[RequestResult]) -> float | None:
        prompt_tokens = sum(result.prompt_tokens for result in arrived if result.served is not None)
        cached_tokens = sum(result.served.cached_tokens for result in arrived if result.served is not None)
        return cached_tokens / prompt_tokens if prompt_tokens else None

    points = over_arrivals(results, hit_rate)
    return charts.line_chart(points, x="seconds", y="of the prompt tokens that arrived then", y_max=1.0)


def _rejections(results: Sequence[RequestResult]) -> str:
    """By reason: how many in all, and of those that arrived in a time."""
    counts: dict[str, int] = {}
    for result in results:
        if result.rejected is not None:
            counts[result.rejected] = counts.get(result.rejected, 0) + 1
    if not counts:
        return charts.paragraph("None.")
    reasons = sorted(counts, key=lambda reason: (-counts[reason], reason))
    named, rest = reasons, set[str]()
    if len(reasons) > charts.SERIES_MAX:
        named = reasons[: charts.SERIES_MAX - 1]
        rest = set(reasons) - set(named)
    groups = [(reason, {reason}) for reason in named] + ([(OTHER_REASONS, rest)] if rest else [])
    series = [Series(name, over_arrivals(results, _counted(reasons))) for name, reasons in groups]
    rows = [(reason, str(counts[reason])) for reason in reasons]
    return charts.table(("reason", "requests"), rows) + charts.lines_chart(
        series, x="seconds", y="rejected, of those that arrived then"
    )


def _counted(reasons: set[str]) -> Callable[[Sequence[RequestResult]], float]:
    return lambda arrived: float(sum(result.rejected in reasons for result in arrived))


def over_arrivals(
    results: Sequence[RequestResult], measure: Callable[[Sequence[RequestResult]], float | None]
) -> list[tuple[float, float | None]]:
    """`measure` of those that arrived in each of TIME_BINS equal times, at the middle of it."""
    width_s = max(result.arrived_s for result in results) / TIME_BINS or 1.0
    bins: list[list[RequestResult]] = [[] for _ in range(TIME_BINS)]
    for result in results:
        bins[min(TIME_BINS - 1, int(result.arrived_s / width_s))].append(result)
    return [((number + 0.5) * width_s, measure(arrived)) for number, arrived in enumerate(bins)]


def _busy(run: SimulatedRun) -> str:
    ends_s = [result.served.done_at_s for result in run.results if result.served is not None]
    duration_s = max([*ends_s, *(result.arrived_s for result in run.results)])
    shares = [(str(name), busy_s / duration_s if duration_s else 0.0) for name, busy_s in run.busy_s.items()]
    rows = [(name, f"{share:.1%}") for name, share in shares]
    chart = charts.bar_chart(shares, y="share of the time in which it computed", y_max=1.0)
    return chart + charts.table(("instance", "busy"), rows)
