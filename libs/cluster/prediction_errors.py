"""How far predicted times were off, as metrics: one form for every service that compares one with what came.

Owns names and buckets; what is predicted, and by whom, is the service's.
"""

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram

ERROR_METRIC = "moonpool_prediction_error_ratio"
PREDICTED_METRIC = "moonpool_predicted_seconds"
ACTUAL_METRIC = "moonpool_actual_seconds"
KIND_LABEL = "kind"
ERROR_BUCKETS = (
    *(0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.125, 0.15, 0.175, 0.2, 0.225, 0.25, 0.3, 0.35, 0.4, 0.5),
    *(0.6, 0.7, 0.8, 0.9, 1.0, 1.5, 2.0, 5.0, 10.0),
)


class PredictionErrors:
    """Registered on the service's own registry, once per process. `kinds`: what it predicts."""

    def __init__(self, registry: CollectorRegistry, kinds: Sequence[str]) -> None:
        errors = Histogram(
            ERROR_METRIC,
            "|predicted / actual - 1| of times, by what was predicted",
            [KIND_LABEL],
            buckets=ERROR_BUCKETS,
            registry=registry,
        )
        predicted_s = Counter(PREDICTED_METRIC, "Predicted times, summed", [KIND_LABEL], registry=registry)
        actual_s = Counter(
            ACTUAL_METRIC, "What they were compared with, summed", [KIND_LABEL], registry=registry
        )
        # Looked up once: steps are many.
        self._kinds = {
            kind: (errors.labels(kind), predicted_s.labels(kind), actual_s.labels(kind)) for kind in kinds
        }

    def observe(self, kind: str, predicted_s: float, actual_s: float) -> None:
        """A prediction and what came of it; a time that our clock cannot tell from none says nothing."""
        if actual_s <= 0:
            return
        error, predicted_sum, actual_sum = self._kinds[kind]
        error.observe(abs(predicted_s / actual_s - 1))
        predicted_sum.inc(predicted_s)
        actual_sum.inc(actual_s)
