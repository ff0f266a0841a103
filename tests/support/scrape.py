"""What an instance says over HTTP about itself: its metrics, and its pool."""

import json
from collections.abc import Mapping
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

from prometheus_client.parser import text_string_to_metric_families

HTTP_S_MAX = 20.0

Labels = frozenset[tuple[str, str]]


class Metrics:
    """One look at an instance's `/metrics`."""

    def __init__(self, samples: Mapping[tuple[str, Labels], float]) -> None:
        self._samples = samples

    def value(self, name: str, **labels: str) -> float:
        """The sum of all samples of that name that have these labels, among others; 0 where none has."""
        wanted = set(labels.items())
        return sum(value for (found, has), value in self._samples.items() if found == name and wanted <= has)

    def by_label(self, name: str, label: str) -> dict[str, float]:
        """Sums of the samples of that name by one of their labels."""
        found: dict[str, float] = {}
        for (sample, labels), value in self._samples.items():
            if sample == name:
                key = dict(labels).get(label, "")
                found[key] = found.get(key, 0.0) + value
        return found


def metrics(http_url: str) -> Metrics:
    with urlopen(f"{http_url}/metrics", timeout=HTTP_S_MAX) as answer:
        text = answer.read().decode()
    return Metrics(
        {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }
    )


def pool(http_url: str, *, check: bool = False) -> dict[str, Any]:
    """What `/pool` answers; AssertionError with its text where it finds its pool in disorder."""
    try:
        with urlopen(f"{http_url}/pool{'?check=1' if check else ''}", timeout=HTTP_S_MAX) as answer:
            found: dict[str, Any] = json.loads(answer.read())
            return found
    except HTTPError as error:
        raise AssertionError(f"{http_url}/pool: {error.status}: {error.read().decode()}") from error
