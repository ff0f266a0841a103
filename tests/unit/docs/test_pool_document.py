"""What docs/pool.md names is in the code as it says: metrics, settings, bounds, log lines, keys of /pool."""

import ast
import importlib
import re
from collections.abc import Iterator
from dataclasses import MISSING, fields
from pathlib import Path

import pytest
from tests.support.documents import ROOT, code_spans, prose

from conductor.config import ConductorConfig
from kvindex.core import Tier
from kvmeta.config import KvmetaConfig
from kvpool import BlockPool, MoverCounters, TierCounters
from worker.config import WorkerConfig
from worker.pool_metrics import pool_report

pytestmark = pytest.mark.unit

DOCUMENT = "docs/pool.md"
SOURCES = tuple(path for folder in ("libs", "services") for path in (ROOT / folder).rglob("*.py"))
CONFIGS = {"worker": WorkerConfig, "kvmeta": KvmetaConfig, "conductor": ConductorConfig}
UNITS = {"": 1, "s": 1, "ms": 1, "MB": 10**6, "GB": 10**9, "MiB": 1 << 20, "GiB": 1 << 30}
"""Of values in tables. Milliseconds count as such in what ends in _ms, else as seconds."""
METRIC = re.compile(r"`(moonpool_\w+)(?:\{([\w,]+)\})?`")


def rows(first_heading: str) -> list[list[str]]:
    """The cells of the tables whose first column has that heading."""
    found: list[list[str]] = []
    inside = False
    for line in prose(DOCUMENT).splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if not line.startswith("|"):
            inside = False
        elif cells[0] == first_heading:
            inside = True
        elif inside and not set(line) <= set("|- "):
            found.append(cells)
    assert found, f"{DOCUMENT} has no table of {first_heading}"
    return found


def value(text: str, name: str) -> object:
    """What a cell says in the unit of the setting or constant `name`."""
    number = re.fullmatch(r"([\d.]+) ?(\w*)", text)
    if number is None:
        return {"none": "", "true": True, "false": False}.get(text, text)
    if number[2] == "ms" and not name.endswith("_ms"):
        return float(number[1]) / 1e3
    return float(number[1]) * UNITS[number[2]]


def declared_metrics() -> Iterator[tuple[str, frozenset[str]]]:
    """(name as Prometheus sees it, its labels) of every metric that the code declares."""
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match node:
                case ast.Call(
                    func=ast.Name(id=kind), args=[ast.Constant(value=str(name)), *rest], keywords=keywords
                ) if name.startswith("moonpool_"):
                    given = [*rest, *(keyword.value for keyword in keywords if keyword.arg == "labels")]
                    labels = [ast.literal_eval(one) for one in given if isinstance(one, ast.List)]
                    suffix = "_total" if kind.startswith("Counter") else ""
                    yield name + suffix, frozenset(*labels)


def logged_messages() -> set[str]:
    return {
        node.args[0].value
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and node.args and isinstance(node.func, ast.Attribute)
        if node.func.attr in ("info", "warning", "error", "exception")
        if isinstance(node.args[0], ast.Constant) and isinstance(node.args[0].value, str)
    }


def test_every_metric_is_declared_with_these_labels() -> None:
    declared = dict(declared_metrics())
    named = METRIC.findall(prose(DOCUMENT))
    assert len(named) > 20
    for name, labels in named:
        assert declared.get(name) == frozenset(filter(None, labels.split(","))), name


@pytest.mark.parametrize("role", CONFIGS)
def test_every_setting_has_this_default(role: str) -> None:
    defaults = {one.name: one.default for one in fields(CONFIGS[role])}
    for cell, default, _ in rows(role):
        (name,) = code_spans(cell)
        assert defaults.get(name, MISSING) == value(default, name), name


def test_every_bound_has_this_value() -> None:
    for cell, said, _ in rows("bound"):
        path, name = code_spans(cell)[0].split("::")
        module = importlib.import_module(".".join(Path(path).with_suffix("").parts[1:]))
        assert vars(module)[name] == value(said, name), name


def test_every_log_line_is_written_somewhere() -> None:
    written = logged_messages()
    for cell, _, _ in rows("message"):
        assert set(code_spans(cell)) <= written, cell


def test_the_keys_of_a_pool_are_all_told() -> None:
    pool = BlockPool(4, lower=[(Tier.SSD, 4)])
    told = pool_report(pool, MoverCounters({Tier.SSD: TierCounters()}), block_bytes=64, read_pins=0)
    keys = {key for cell, _ in rows("key") for key in code_spans(cell)}
    assert keys == told.keys()
    (tier,) = told["tiers"]
    (text,) = (what for cell, what in rows("key") if code_spans(cell) == ["tiers"])
    assert set(code_spans(text)) == tier.keys()


def test_the_first_words_of_a_value_are_read() -> None:
    assert value("2 GiB", "pool_bytes") == 1 << 31
    assert value("1 ms", "transfer_fixed_s") == 0.001
    assert value("100 ms", "match_timeout_ms") == 100
    assert value("none", "ssd_folder") == ""
    assert value("true", "replication") is True
