"""The one form of a benchmark's result (DESIGN §10): a line of JSON, or a row of a table."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median

from moonpool.table import format_table

HEADER = ("bench", "case", "metric", "value", "unit", "n", "min", "max")


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """`n` samples of one metric: their median in `value`, and their extremes."""

    bench: str
    case: str
    metric: str
    value: float
    unit: str
    n: int
    min: float
    max: float
    context: Mapping[str, object] = field(default_factory=dict)


def measurement(
    bench: str, case: str, metric: str, unit: str, samples: Sequence[float], context: Mapping[str, object]
) -> Measurement:
    """Sum up `samples`, of which there is at least one."""
    return Measurement(
        bench=bench,
        case=case,
        metric=metric,
        value=median(samples),
        unit=unit,
        n=len(samples),
        min=min(samples),
        max=max(samples),
        context=context,
    )


def as_json_line(result: Measurement) -> str:
    return json.dumps(asdict(result))


def as_table(results: Sequence[Measurement]) -> str:
    rows = [
        (r.bench, r.case, r.metric, _short(r.value), r.unit, str(r.n), _short(r.min), _short(r.max))
        for r in results
    ]
    return format_table(HEADER, rows)


def _short(value: float) -> str:
    """Four significant digits, but never an exponent for what is large."""
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"
