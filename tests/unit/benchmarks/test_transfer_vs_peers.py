import pytest
from benchmarks.transfer_vs_peers import COUNTERPARTS, SYSTEMS, Form, Timing, as_comparison_table, summarise

from moonpool.benchmarks.transfer_plan import DEPTH, Direction, Row

pytestmark = pytest.mark.unit

ROW = Row(2, 1 << 20)
FORM = Form(ROW, Direction.WRITE, 1)
DEEP = Form(ROW, Direction.WRITE, DEPTH)
TIMINGS = {
    "moonpool_tcp": [Timing(2.0, (1e-3, 2e-3)), Timing(3.0, (1e-3, 2e-3)), Timing(4.0, (1e-3, 2e-3))],
    "mooncake_tcp": [Timing(1.0, (2e-3, 2e-3)), Timing(3.0, (1e-3, 1e-3)), Timing(1.0, (4e-3, 9e-3))],
    "nixl": [Timing(9.0, (1e-4, 1e-4))] * 3,
}
ABOUTS = {name: {"name": name} for name in TIMINGS}


def test_every_peer_is_held_against_ours_that_goes_the_same_way() -> None:
    assert set(COUNTERPARTS) | set(COUNTERPARTS.values()) == set(SYSTEMS)


def test_ratios_are_taken_within_a_round() -> None:
    lines = {(r.case, r.metric): r for r in summarise(FORM, TIMINGS, ABOUTS, {})}
    ratio = lines["write/2x1MiB/moonpool_tcp:mooncake_tcp", "rate_ratio"]
    assert (ratio.value, ratio.min, ratio.max, ratio.n) == (2.0, 1.0, 4.0, 3)
    latency = lines["write/2x1MiB/moonpool_tcp:mooncake_tcp", "latency_p50_ratio"]
    assert (latency.value, latency.min, latency.max) == (0.5, 0.25, 1.0)
    theirs = lines["write/2x1MiB/mooncake_tcp", "latency_p99"]
    assert (theirs.max, theirs.context["system"]) == (pytest.approx(9000.0), {"name": "mooncake_tcp"})
    assert not any("moonpool_shm" in case for case, _ in lines), "ours over shm was not measured"


def test_calls_under_way_together_have_no_latency() -> None:
    deep = {name: [Timing(one.rate, ()) for one in samples] for name, samples in TIMINGS.items()}
    metrics = {r.metric for r in summarise(DEEP, deep, ABOUTS, {})}
    assert metrics == {"rate", "rate_ratio"}


def test_the_table_has_a_column_for_each_system_and_each_pair() -> None:
    header, row = as_comparison_table(summarise(FORM, TIMINGS, ABOUTS, {})).splitlines()
    assert header.split("  ")[0] == "case"
    assert row.split() == ["write/2x1MiB", "3", "(1000)", "1", "(2000)", "9", "(100)", "2.00", "(1.00–4.00)"]
