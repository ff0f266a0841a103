"""What a replay found, as an object for `--json` and as text. `commands.replay` tells the keys. Pure."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from moonpool.charts import short
from moonpool.replay.records import Record
from moonpool.replay.schedule import ScheduledRequest
from moonpool.replay.statistics import FailureCount, Spread, Summary, Targets
from moonpool.table import format_table

NAMED_MAX = 10
"""Requests that do not fit are all counted, and so many of them named."""
SPREAD_HEADER = ("", "n", "p50", "p90", "p99", "max")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayReport:
    """A replay as it was asked for, and what came of it."""

    trace: str
    url: str
    model: str
    context_tokens: int
    scale: float
    speedup: float
    seed: int
    in_flight_max: int
    targets: Targets
    targets_sent: bool
    """With each request; else answers are judged by them, and nobody is told."""
    requests: int
    """Of the trace, before those that do not fit are left out."""
    too_long: tuple[ScheduledRequest, ...]
    reusable_rate: float | None
    """The hit rate of a cache that never gives up a block and is filled at once, over all that fit."""
    complete: bool
    """False where it was interrupted."""
    began_unix_s: float
    summary: Summary


def as_object(report: ReplayReport) -> dict[str, object]:
    summary = report.summary
    return {
        "trace": report.trace,
        "url": report.url,
        "model": report.model,
        "context_tokens": report.context_tokens,
        "scale": report.scale,
        "speedup": report.speedup,
        "seed": report.seed,
        "in_flight_max": report.in_flight_max,
        "ttft_target_ms": report.targets.ttft_s * 1e3,
        "tbt_target_ms": report.targets.tbt_s * 1e3,
        "targets_sent": report.targets_sent,
        "complete": report.complete,
        "began_unix_s": report.began_unix_s,
        "requests": report.requests,
        "too_long": len(report.too_long),
        "too_long_requests": [request.number for request in report.too_long[:NAMED_MAX]],
        "sent": summary.sent,
        "served": summary.served,
        "good": summary.good,
        "ttft_met": summary.ttft_met,
        "tbt_met": summary.tbt_met,
        "short_answers": summary.short,
        "rejected": summary.rejected,
        "failed": summary.failed,
        "interrupted": summary.interrupted,
        "rejections": [_failure_object(count) for count in summary.rejections],
        "failures": [_failure_object(count) for count in summary.failures],
        "span_s": summary.span_s,
        "offered_per_s": summary.offered_per_s,
        "sent_per_s": summary.sent_per_s,
        "served_per_s": summary.served_per_s,
        "goodput_per_s": summary.goodput_per_s,
        "prompt_tokens": summary.prompt_tokens,
        "cached_tokens": summary.cached_tokens,
        "output_tokens": summary.output_tokens,
        "prompt_tokens_per_s": summary.prompt_tokens_per_s,
        "output_tokens_per_s": summary.output_tokens_per_s,
        "hit_rate": summary.hit_rate,
        "reusable_rate": report.reusable_rate,
        "ttft_ms": _milliseconds(summary.ttft_s),
        "tbt_ms": _milliseconds(summary.tbt_s),
        "gap_ms": _milliseconds(summary.gap_s),
        "e2e_ms": _milliseconds(summary.e2e_s),
        "late_ms": _milliseconds(summary.late_s),
    }


def per_request(records: Sequence[Record]) -> list[dict[str, object]]:
    """Of each request that was sent, in the order in which they ended."""
    return [
        {
            "due_s": record.due_s,
            "sent_s": record.sent_s,
            "ended_s": record.ended_s,
            "outcome": record.outcome,
            "prompt_tokens": record.prompt_tokens,
            "output_tokens": record.output_tokens,
            "cached_tokens": record.cached_tokens,
            "ttft_s": record.ttft_s,
            "tbt_s": record.tbt_s,
        }
        for record in records
    ]


def as_text(report: ReplayReport) -> str:
    """Two tables, then a line for each kind of request that was not served."""
    parts = [
        format_table(("measure", "value"), count_rows(report)),
        format_table(SPREAD_HEADER, spread_rows(report.summary)),
        *failure_lines(report),
    ]
    return "\n".join([parts[0], "", *parts[1:]])


def count_rows(report: ReplayReport) -> list[tuple[str, str]]:
    summary = report.summary
    good_share = summary.good / summary.sent if summary.sent else 0.0
    targets = f"TTFT {short(report.targets.ttft_s * 1e3)} ms, TBT {short(report.targets.tbt_s * 1e3)} ms"
    targets += ", which requests carried" if report.targets_sent else ""
    return [
        ("model", f"{report.model}, context {report.context_tokens}"),
        ("trace tokens per token", short(report.scale)),
        ("speedup", f"{report.speedup:g}"),
        ("seed", str(report.seed)),
        ("requests", f"{report.requests}, of which {len(report.too_long)} do not fit into the context"),
        ("sent", f"{summary.sent} in {summary.span_s:.1f} s" + ("" if report.complete else ", interrupted")),
        ("served", str(summary.served)),
        ("rejected", str(summary.rejected)),
        ("failed", str(summary.failed)),
        ("interrupted", str(summary.interrupted)),
        ("shorter than asked", str(summary.short)),
        ("within targets", f"{summary.good}, {good_share:.1%} of those sent ({targets})"),
        ("goodput", _per_s(summary.goodput_per_s, "requests")),
        ("offered", _per_s(summary.offered_per_s, "requests")),
        ("sent at", _per_s(summary.sent_per_s, "requests")),
        ("served at", _per_s(summary.served_per_s, "requests")),
        ("prompt tokens", f"{summary.prompt_tokens}, {_per_s(summary.prompt_tokens_per_s, 'tokens')}"),
        ("output tokens", f"{summary.output_tokens}, {_per_s(summary.output_tokens_per_s, 'tokens')}"),
        (
            "hit rate",
            f"{_rate(summary.hit_rate)} (reusable in the trace as sent: {_rate(report.reusable_rate)})",
        ),
    ]


def spread_rows(summary: Summary) -> list[tuple[str, ...]]:
    spreads = (
        ("TTFT ms", summary.ttft_s),
        ("TBT ms", summary.tbt_s),
        ("gap ms", summary.gap_s),
        ("end to end ms", summary.e2e_s),
        ("sent late ms", summary.late_s),
    )
    return [(name, *_spread_cells(spread)) for name, spread in spreads]


def failure_lines(report: ReplayReport) -> list[str]:
    lines = [
        f"{word}: {count.requests} × {named(count)}"
        for word, counts in (("rejected", report.summary.rejections), ("failed", report.summary.failures))
        for count in counts
    ]
    return [*lines, *_too_long_lines(report.too_long, report.context_tokens)]


def named(count: FailureCount) -> str:
    """Status, reason, and what the first of them said."""
    status = f"{count.failure.status} " if count.failure.status else ""
    return f"{status}{count.failure.reason}" + (f": {count.example}" if count.example else "")


def _too_long_lines(too_long: Sequence[ScheduledRequest], context_tokens: int) -> list[str]:
    if not too_long:
        return []
    some = ", ".join(
        f"{request.number} ({request.prompt_tokens} + {request.output_tokens} tokens)"
        for request in too_long[:NAMED_MAX]
    )
    more = len(too_long) - NAMED_MAX
    rest = f" and {more} more" if more > 0 else ""
    return [f"not sent, over the context of {context_tokens} tokens: requests {some}{rest}"]


def _failure_object(count: FailureCount) -> dict[str, object]:
    return {
        "status": count.failure.status or None,
        "reason": count.failure.reason,
        "requests": count.requests,
        "example": count.example,
    }


def _milliseconds(spread: Spread | None) -> dict[str, float] | None:
    if spread is None:
        return None
    return {name: value if name == "n" else value * 1e3 for name, value in asdict(spread).items()}


def _spread_cells(spread: Spread | None) -> tuple[str, ...]:
    if spread is None:
        return ("0", "-", "-", "-", "-")
    return (
        str(spread.n),
        *(f"{value * 1e3:.1f}" for value in (spread.p50, spread.p90, spread.p99, spread.max)),
    )


def _per_s(rate: float | None, what: str) -> str:
    return "-" if rate is None else f"{short(rate)} {what}/s"


def _rate(rate: float | None) -> str:
    return "unknown" if rate is None else f"{rate:.1%}"
