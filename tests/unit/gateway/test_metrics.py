"""The names of metrics are part of what the gateway promises: the page and the code have the same."""

import re
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from gateway.metrics import GatewayMetrics

pytestmark = pytest.mark.unit

PAGE = Path(__file__).parents[3] / "docs" / "gateway.md"


def test_the_page_names_every_metric_with_its_labels_and_no_other() -> None:
    registry = CollectorRegistry()
    metrics = GatewayMetrics(registry)
    labels = {
        collector._name: set(collector._labelnames)
        for collector in vars(metrics).values()
        if hasattr(collector, "_labelnames")
    }
    kinds = {family.name: family.type for family in registry.collect()}
    made = {name + ("_total" if kinds[name] == "counter" else ""): names for name, names in labels.items()}
    section = PAGE.read_text().split("\n## Metrics\n")[1].split("\n## ")[0]
    told = {
        name: set(names.split(",")) if names else set()
        for name, names in re.findall(
            r"^\| `(moonpool_gateway_\w+)(?:\{([\w,]+)\})?` ", section, re.MULTILINE
        )
    }
    assert told == made
