"""What came out: one record a request, and what is said of all of them.

TTFT is from a request's arrival at the gateway to its first token there. TBT is, as in FAST'25, the mean of
its longest tenth of gaps between tokens, where no other measure is asked for; an answer of one token has
none. A request that was turned away met no target, and its TTFT counts nowhere.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import ceil
from statistics import fmean

from kvindex.core import InstanceId

TBT_SHARE = 0.1


class TbtMeasure(StrEnum):
    """What is said of the gaps between the tokens of one request."""

    TAIL = "tail"
    """The mean of the longest tenth: FAST'25."""
    P90 = "p90"
    """The one that a tenth of them are longer than."""
    MEAN = "mean"


@dataclass(frozen=True, slots=True)
class Served:
    ttft_s: float
    predicted_ttft_s: float
    """When it was placed."""
    tbt_s: float | None
    done_at_s: float
    prefill: InstanceId
    decode: InstanceId
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class RequestResult:
    index: int
    """Place in the trace."""
    arrived_s: float
    prompt_tokens: int
    output_tokens: int
    attempts: int
    served: Served | None
    rejected: str | None
    """Why it was turned away; set where it was not served."""
    priority: int = 0
    losses: int = 0
    """Instances that failed under it."""
    resumed: int = 0
    """Placements after its first token, to go on elsewhere."""
    recomputed_tokens: int = 0
    """Of prompt and answer, prefilled after losses."""


@dataclass(frozen=True, slots=True)
class LoadSample:
    """The cluster at one time."""

    at_s: float
    prefill_requests: int
    """Queued or being prefilled."""
    prefill_tokens: int
    """Still to be computed for them."""
    decode_requests: int
    decode_kv_tokens: int


@dataclass(frozen=True, slots=True)
class Distribution:
    mean: float
    p50: float
    p90: float
    p99: float
    max: float


@dataclass(frozen=True, slots=True)
class Summary:
    requests: int
    served: int
    rejected: dict[str, int]
    """How many by reason."""
    in_targets: int
    """Served within both."""
    ttft_in_target: int
    tbt_in_target: int
    duration_s: float
    """From the first arrival to the end of the last request."""
    goodput_per_s: float
    ttft_s: Distribution | None
    ttft_error: Distribution | None
    """How far predictions were off, in shares of what came."""
    tbt_s: Distribution | None
    hit_rate: float
    """Prompt tokens that were cached, of all that were served."""


@dataclass(frozen=True, slots=True)
class Tally:
    requests: int
    served: int
    in_targets: int


def tbt_of(gaps_s: Sequence[float], measure: TbtMeasure) -> float | None:
    """None where there is no gap."""
    if not gaps_s:
        return None
    match measure:
        case TbtMeasure.TAIL:
            return tail_mean_s(gaps_s)
        case TbtMeasure.P90:
            return sorted(gaps_s)[-int(TBT_SHARE * len(gaps_s)) - 1]
        case TbtMeasure.MEAN:
            return fmean(gaps_s)


def tail_mean_s(gaps_s: Sequence[float]) -> float | None:
    if not gaps_s:
        return None
    return fmean(sorted(gaps_s)[-ceil(TBT_SHARE * len(gaps_s)) :])


def distribution(values: Sequence[float]) -> Distribution | None:
    """Percentiles are values that occur: the least one that so many are not above."""
    if not values:
        return None
    ordered = sorted(values)

    def percentile(share: float) -> float:
        return ordered[ceil(share * len(ordered)) - 1]

    return Distribution(fmean(ordered), percentile(0.5), percentile(0.9), percentile(0.99), ordered[-1])


def summary(results: Sequence[RequestResult], ttft_s_max: float, tbt_s_max: float) -> Summary:
    """Of at least one request."""
    served = [result.served for result in results if result.served is not None]
    rejected: dict[str, int] = {}
    for result in results:
        if result.rejected is not None:
            rejected[result.rejected] = rejected.get(result.rejected, 0) + 1
    ttft_met = [one.ttft_s <= ttft_s_max for one in served]
    tbt_met = [one.tbt_s is None or one.tbt_s <= tbt_s_max for one in served]
    in_targets = sum(ttft and tbt for ttft, tbt in zip(ttft_met, tbt_met, strict=True))
    first_s = min(result.arrived_s for result in results)
    last_s = max([result.arrived_s for result in results] + [one.done_at_s for one in served])
    prompt_tokens = sum(result.prompt_tokens for result in results if result.served is not None)
    return Summary(
        requests=len(results),
        served=len(served),
        rejected=dict(sorted(rejected.items())),
        in_targets=in_targets,
        ttft_in_target=sum(ttft_met),
        tbt_in_target=sum(tbt_met),
        duration_s=last_s - first_s,
        goodput_per_s=in_targets / (last_s - first_s) if last_s > first_s else 0.0,
        ttft_s=distribution([one.ttft_s for one in served]),
        ttft_error=distribution(
            [abs(one.predicted_ttft_s / one.ttft_s - 1) for one in served if one.ttft_s > 0.0]
        ),
        tbt_s=distribution([one.tbt_s for one in served if one.tbt_s is not None]),
        hit_rate=sum(one.cached_tokens for one in served) / prompt_tokens if prompt_tokens else 0.0,
    )


def by_priority(results: Sequence[RequestResult], ttft_s_max: float, tbt_s_max: float) -> dict[int, Tally]:
    """The highest first."""
    tallies = {}
    for priority in sorted({result.priority for result in results}, reverse=True):
        served = [result.served for result in results if result.priority == priority]
        good = [
            one.ttft_s <= ttft_s_max and (one.tbt_s is None or one.tbt_s <= tbt_s_max)
            for one in served
            if one is not None
        ]
        tallies[priority] = Tally(len(served), len(good), sum(good))
    return tallies
