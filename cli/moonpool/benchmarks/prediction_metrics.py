"""The prediction errors that a cluster's services tell on /metrics, added up, and percentiles of them."""

import asyncio
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, TypeVar

from cluster.prediction_errors import (
    ACTUAL_METRIC,
    ERROR_METRIC,
    KIND_LABEL,
    PREDICTED_METRIC,
)
from moonpool.errors import CommandError

if TYPE_CHECKING:
    import aiohttp

KeyT = TypeVar("KeyT")

_BUCKET, _UP_TO = f"{ERROR_METRIC}_bucket", "le"
_PREDICTED, _ACTUAL = f"{PREDICTED_METRIC}_total", f"{ACTUAL_METRIC}_total"


@dataclass(frozen=True, slots=True)
class PredictionTotals:
    """Counts since the services' start, or in a window. `errors`: (kind, bound) to how many errors were at
    most that; sums of times by kind."""

    errors: Mapping[tuple[str, float], float]
    predicted_s: Mapping[str, float]
    actual_s: Mapping[str, float]

    def since(self, before: "PredictionTotals") -> "PredictionTotals":
        return PredictionTotals(
            _less(self.errors, before.errors),
            _less(self.predicted_s, before.predicted_s),
            _less(self.actual_s, before.actual_s),
        )

    def count(self, kind: str) -> int:
        return round(self.errors.get((kind, inf), 0))

    def error(self, kind: str, share: float) -> float:
        """The error that `share` of them do not exceed; between a bucket's bounds as if spread evenly, the
        last bound where it is beyond. There is at least one."""
        wanted = share * self.count(kind)
        lower, below = 0.0, 0.0
        bounds = sorted(bound for one, bound in self.errors if one == kind)
        for bound in bounds[:-1]:
            upto = self.errors[kind, bound]
            if upto >= wanted:
                return lower + (bound - lower) * (wanted - below) / max(upto - below, 1)
            lower, below = bound, upto
        return lower


async def totals(urls: Sequence[str], *, timeout_s: float) -> PredictionTotals:
    """Of all services at these addresses together; CommandError where one does not tell its metrics."""
    import aiohttp

    try:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=timeout_s)) as session:
            texts = await asyncio.gather(*(_text(session, f"{url}/metrics") for url in urls))
    except (aiohttp.ClientError, TimeoutError) as error:
        raise CommandError(f"a service does not tell its metrics: {error}") from error
    return added_up(texts)


def added_up(texts: Sequence[str]) -> PredictionTotals:
    """What the services say, each in Prometheus' text form."""
    from prometheus_client.parser import text_string_to_metric_families

    errors: dict[tuple[str, float], float] = defaultdict(float)
    predicted_s: dict[str, float] = defaultdict(float)
    actual_s: dict[str, float] = defaultdict(float)
    for text in texts:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                kind = sample.labels.get(KIND_LABEL, "")
                if sample.name == _BUCKET:
                    errors[kind, float(sample.labels[_UP_TO])] += sample.value
                elif sample.name == _PREDICTED:
                    predicted_s[kind] += sample.value
                elif sample.name == _ACTUAL:
                    actual_s[kind] += sample.value
    return PredictionTotals(errors, predicted_s, actual_s)


def _less(now: Mapping[KeyT, float], before: Mapping[KeyT, float]) -> dict[KeyT, float]:
    return {key: value - before.get(key, 0.0) for key, value in now.items()}


async def _text(session: "aiohttp.ClientSession", url: str) -> str:
    async with session.get(url) as answer:
        answer.raise_for_status()
        return await answer.text()
