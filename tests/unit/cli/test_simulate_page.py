"""The page of a simulated run: it is whole, and every series is on it with the run's own numbers."""

import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence

import pytest
from tests.support.simulated_clusters import round_setup

from moonpool.__main__ import main
from moonpool.charts import SERIES_MAX
from moonpool.simulations.page import MOMENTS_MAX, OTHER_REASONS, TIME_BINS, as_page, over_arrivals
from policy.choice import AdmissionMode, PlacementLimits
from simulator.cluster import SimulatedRun, simulate_cluster
from simulator.results import LoadSample, RequestResult
from simulator.trace import TracedRequest

pytestmark = pytest.mark.unit

SETUP = round_setup(
    ttft_s_max=2.5,
    sample_interval_s=0.25,
    placement=PlacementLimits(admission=AdmissionMode.PREDICTIVE),
)
HEADINGS = [
    "What came out",
    "Time to first token",
    "Time between tokens, mean of a request&#x27;s longest tenth of gaps",
    "Load of prefill and decode, each in shares of its peak",
    "Tokens to prefill",
    "KV tokens being decoded",
    "Requests",
    "Hit rate",
    "Rejections",
    "Busy instances",
]


@pytest.fixture(scope="module")
def run() -> SimulatedRun:
    """Twelve a second apart that take two: some are turned away."""
    requests = [
        TracedRequest(1000 * number, 2048, 20, (0, *range(10 * number + 1, 10 * number + 4)))
        for number in range(12)
    ]
    return simulate_cluster(requests, SETUP)


def sections(document: str) -> dict[str, str]:
    parts = re.split(r"<h2>(.*?)</h2>", document.partition("<body>")[2].partition("</body>")[0])
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def elements(html: str, name: str) -> list[ElementTree.Element]:
    return [one for one in ElementTree.fromstring(f"<div>{html}</div>").iter() if one.get("class") == name]


def tips(html: str, name: str) -> list[float]:
    """What the marks of a class say."""
    return [float((one[0].text or "").rpartition(": ")[2]) for one in elements(html, name)]


def test_every_section_is_there_and_well_formed(run: SimulatedRun) -> None:
    document = as_page("a <title>", [("requests", "12")], run, SETUP)
    assert document.startswith("<!doctype html>")
    assert "<title>a &lt;title&gt;</title>" in document
    assert list(sections(document)) == HEADINGS
    assert "script" not in document
    for html in sections(document).values():
        ElementTree.fromstring(f"<div>{html}</div>")


def test_each_series_shows_the_runs_numbers(run: SimulatedRun) -> None:
    found = sections(as_page("run", [], run, SETUP))
    served = [one.served for one in run.results if one.served is not None]
    rejected = len(run.results) - len(served)
    assert rejected > 0
    for heading in HEADINGS[1:3]:
        assert sum(tips(found[heading], "bar")) == len(served)
        assert len(elements(found[heading], "target")) == 1
    moments = len(run.load)
    assert len(tips(found["Tokens to prefill"], "dot")) == moments
    assert max(tips(found["Tokens to prefill"], "dot")) == max(one.prefill_tokens for one in run.load)
    assert max(tips(found["KV tokens being decoded"], "dot")) == max(one.decode_kv_tokens for one in run.load)
    swing = found["Load of prefill and decode, each in shares of its peak"]
    assert len(tips(swing, "dot")) == 2 * moments
    assert max(tips(swing, "dot")) == 1.0
    assert "KV tokens being decoded" in swing
    assert sum(tips(found["Rejections"], "dot")) == rejected
    assert set(tips(found["Hit rate"], "dot")) == {0.0, 0.25}
    assert len(elements(found["Busy instances"], "bar")) == 2


def test_nothing_rejected_and_nothing_served_are_said(run: SimulatedRun) -> None:
    served = SimulatedRun(tuple(one for one in run.results if one.served), run.load, 0, 0, 0, 0.0, {})
    found = sections(as_page("run", [], served, SETUP))
    assert found["Rejections"] == "<p>None.</p>"
    refused = SimulatedRun(tuple(one for one in run.results if one.rejected), run.load, 0, 0, 0, 0.0, {})
    found = sections(as_page("run", [], refused, SETUP))
    assert "Nothing was measured" in found["Time to first token"]
    assert "Nothing was measured" in found["Hit rate"]


@pytest.mark.parametrize(
    ("measure", "title"), [("p90", "the gap that a tenth of"), ("mean", "mean of all gaps of a request")]
)
def test_the_title_says_how_gaps_are_measured(tmp_path, measure: str, title: str) -> None:
    page = tmp_path / "page.html"
    words = ["simulate", "--dataset", "arxiv", "--rate", "2", "--requests", "2", "--coupled", "1"]
    assert main([*words, "--tbt-measure", measure, "--html", str(page)]) == 0
    (heading,) = [one for one in sections(page.read_text()) if one.startswith("Time between tokens")]
    assert title in heading
    assert "longest tenth" not in heading


def test_many_reasons_and_many_moments_are_bounded() -> None:
    results = [
        RequestResult(number, float(number), 10, 10, 1, None, f"reason-{number % 9}") for number in range(90)
    ]
    load = [LoadSample(float(second), 1, 1, 1, 1) for second in range(5 * MOMENTS_MAX + 1)]
    run = SimulatedRun(tuple(results), tuple(load), 0, 0, 0, 0.0, {})
    found = sections(as_page("run", [], run, SETUP))
    assert sum(tips(found["Rejections"], "dot")) == 90
    assert OTHER_REASONS in found["Rejections"]
    assert found["Rejections"].count("<path") == SERIES_MAX
    assert len(tips(found["Tokens to prefill"], "dot")) <= MOMENTS_MAX


def test_bins_hold_every_request_once() -> None:
    results = [RequestResult(n, n / 7, 10, 10, 1, None, "ttft") for n in range(100)]

    def number(arrived: Sequence[RequestResult]) -> float:
        return float(len(arrived))

    points = over_arrivals(results, number)
    assert len(points) == TIME_BINS
    assert sum(value or 0.0 for _, value in points) == 100
    at_once = [RequestResult(n, 0.0, 10, 10, 1, None, "ttft") for n in range(5)]
    assert over_arrivals(at_once, number)[0][1] == 5


def test_the_command_writes_it(tmp_path, capsys) -> None:
    page = tmp_path / "page.html"
    words = ["simulate", "--dataset", "arxiv", "--rate", "2", "--requests", "5", "--coupled", "1"]
    assert main([*words, "--html", str(page)]) == 0
    assert "in both targets" in capsys.readouterr().out
    assert list(sections(page.read_text())) == HEADINGS
    assert main([*words, "--html", str(tmp_path / "missing" / "page.html")]) == 1
    assert "missing" in capsys.readouterr().err
