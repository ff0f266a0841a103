"""What a replay's records say: goodput, percentiles, hit rate, rejections. Pure."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from moonpool.benchmarks.transfer_plan import percentile
from moonpool.replay.records import Failure, GapHistogram, Outcome, Record, Results

TIME_BINS = 60
"""Into which a replay is cut where something is shown over time."""


@dataclass(frozen=True, slots=True)
class Targets:
    """A served request is good where neither its TTFT nor its TBT is longer."""

    ttft_s: float
    tbt_s: float


@dataclass(frozen=True, slots=True)
class Spread:
    """Of `n` values, at least one; the percentiles are values that were seen (of gaps: within 2 %)."""

    n: int
    p50: float
    p90: float
    p99: float
    max: float


@dataclass(frozen=True, slots=True)
class FailureCount:
    failure: Failure
    requests: int
    example: str
    """What the first of them said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Times in seconds, rates per second of the replay. None where there is nothing to tell it from: no
    request, no usage, no time."""

    sent: int
    served: int
    good: int
    ttft_met: int
    tbt_met: int
    rejected: int
    failed: int
    interrupted: int
    short: int
    """Served with fewer tokens than asked for."""
    span_s: float
    """From the first request that was due until the last one had ended."""
    offered_per_s: float | None
    sent_per_s: float | None
    served_per_s: float | None
    goodput_per_s: float | None
    prompt_tokens: int
    cached_tokens: int | None
    output_tokens: int
    hit_rate: float | None
    """Of the prompt tokens of those served whose cached tokens are known."""
    prompt_tokens_per_s: float | None
    output_tokens_per_s: float | None
    ttft_s: Spread | None
    tbt_s: Spread | None
    gap_s: Spread | None
    e2e_s: Spread | None
    late_s: Spread | None
    rejections: tuple[FailureCount, ...]
    failures: tuple[FailureCount, ...]
    """Both with the commonest first."""


@dataclass(frozen=True, slots=True)
class Moment:
    """One bin of time: the mean of requests in flight, and the hit rate of those that ended in it."""

    at_s: float
    in_flight: float
    hit_rate: float | None


def summarise(results: Results, targets: Targets, offered: int, window_s: float) -> Summary:
    """`offered` requests were due within `window_s`."""
    records = results.records
    served = [record for record in records if record.outcome is Outcome.SERVED]
    ttft_met = [record for record in served if _within(record.ttft_s, targets.ttft_s)]
    good = [record for record in ttft_met if _within(record.tbt_s, targets.tbt_s)]
    outcomes = Counter(record.outcome for record in records)
    span_s = max((record.ended_s for record in records), default=0.0)
    last_sent_s = max((record.sent_s for record in records), default=0.0)
    known = [record for record in served if record.cached_tokens is not None]
    prompt_tokens = sum(record.prompt_tokens for record in served)
    output_tokens = sum(record.output_tokens for record in served)
    return Summary(
        sent=len(records),
        served=len(served),
        good=len(good),
        ttft_met=len(ttft_met),
        tbt_met=sum(_within(record.tbt_s, targets.tbt_s) for record in served),
        rejected=outcomes[Outcome.REJECTED],
        failed=outcomes[Outcome.FAILED],
        interrupted=outcomes[Outcome.INTERRUPTED],
        short=sum(record.short for record in served),
        span_s=span_s,
        offered_per_s=_rate(offered, window_s),
        sent_per_s=_rate(len(records), last_sent_s),
        served_per_s=_rate(len(served), span_s),
        goodput_per_s=_rate(len(good), span_s),
        prompt_tokens=prompt_tokens,
        cached_tokens=sum(record.cached_tokens or 0 for record in known) if known else None,
        output_tokens=output_tokens,
        hit_rate=hit_rate(known),
        prompt_tokens_per_s=_rate(prompt_tokens, span_s),
        output_tokens_per_s=_rate(output_tokens, span_s),
        ttft_s=_spread(served, lambda record: record.ttft_s),
        tbt_s=_spread(served, lambda record: record.tbt_s),
        gap_s=_gap_spread(results.gaps),
        e2e_s=_spread(served, lambda record: record.ended_s - record.sent_s),
        late_s=_spread(records, lambda record: record.late_s),
        rejections=_counted(results, Outcome.REJECTED),
        failures=_counted(results, Outcome.FAILED),
    )


def over_time(records: Sequence[Record]) -> list[Moment]:
    """The replay in TIME_BINS equal bins; empty where it took no time."""
    span_s = max((record.ended_s for record in records), default=0.0)
    if not span_s:
        return []
    bin_s = span_s / TIME_BINS
    busy_s = [0.0] * TIME_BINS
    ended: list[list[Record]] = [[] for _ in range(TIME_BINS)]
    for record in records:
        first, last = _bin(record.sent_s, bin_s), _bin(record.ended_s, bin_s)
        for number in range(first, last + 1):
            begin_s, end_s = number * bin_s, (number + 1) * bin_s
            busy_s[number] += max(0.0, min(end_s, record.ended_s) - max(begin_s, record.sent_s))
        if record.outcome is Outcome.SERVED and record.cached_tokens is not None:
            ended[last].append(record)
    return [
        Moment((number + 0.5) * bin_s, busy_s[number] / bin_s, hit_rate(ended[number]))
        for number in range(TIME_BINS)
    ]


def hit_rate(records: Iterable[Record]) -> float | None:
    """Cached prompt tokens of all prompt tokens; None where there is none."""
    prompt_tokens = cached_tokens = 0
    for record in records:
        prompt_tokens += record.prompt_tokens
        cached_tokens += record.cached_tokens or 0
    return cached_tokens / prompt_tokens if prompt_tokens else None


def spread_of(values: Iterable[float]) -> Spread | None:
    """None of no value."""
    ordered = sorted(values)
    if not ordered:
        return None
    p50, p90, p99 = (percentile(ordered, share) for share in (0.5, 0.9, 0.99))
    return Spread(len(ordered), p50, p90, p99, ordered[-1])


def _within(value_s: float | None, target_s: float) -> bool:
    """An answer of one token has no gap, so none that is too long."""
    return value_s is None or value_s <= target_s


def _rate(count: int, time_s: float) -> float | None:
    return count / time_s if time_s > 0 else None


def _spread(records: Iterable[Record], value: Callable[[Record], float | None]) -> Spread | None:
    return spread_of([found for record in records if (found := value(record)) is not None])


def _gap_spread(gaps: GapHistogram) -> Spread | None:
    if not gaps.count():
        return None
    p50, p90, p99, longest = (gaps.percentile(share) for share in (0.5, 0.9, 0.99, 1.0))
    return Spread(gaps.count(), p50, p90, p99, longest)


def _counted(results: Results, outcome: Outcome) -> tuple[FailureCount, ...]:
    counts = Counter(
        record.failure for record in results.records if record.outcome is outcome and record.failure
    )
    return tuple(
        FailureCount(failure, requests, results.examples.get(failure, ""))
        for failure, requests in counts.most_common()
    )


def _bin(at_s: float, bin_s: float) -> int:
    return min(TIME_BINS - 1, int(at_s / bin_s))
