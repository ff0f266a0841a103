import json

import pytest

from moonpool.benchmarks.prefix import Answer, Pair, summarise
from moonpool.measurement import as_json_line, as_table, measurement
from moonpool.table import format_table

pytestmark = pytest.mark.unit


def test_a_line_has_the_keys_of_the_one_form_and_the_median() -> None:
    line = json.loads(
        as_json_line(measurement("copy", "memcpy", "rate", "GB/s", [3.0, 1.0, 2.5], {"mib": 4}))
    )
    assert line == {
        "bench": "copy",
        "case": "memcpy",
        "metric": "rate",
        "value": 2.5,
        "unit": "GB/s",
        "n": 3,
        "min": 1.0,
        "max": 3.0,
        "context": {"mib": 4},
    }


def test_the_table_has_a_row_for_each_result() -> None:
    table = as_table([measurement("copy", "memcpy", "rate", "GB/s", [1234.5678], {})])
    header, row = table.splitlines()
    assert header.split() == ["bench", "case", "metric", "value", "unit", "n", "min", "max"]
    assert row.split() == ["copy", "memcpy", "rate", "1235", "GB/s", "1", "1235", "1235"]


def test_a_large_number_has_no_exponent() -> None:
    table = as_table([measurement("prefix", "fresh", "ttft", "ms", [11_437.2, 185.66, 0.0123], {})])
    assert table.splitlines()[1].split()[3:] == ["185.7", "ms", "3", "0.0123", "11437"]


def test_columns_are_as_wide_as_their_widest_cell() -> None:
    assert format_table(("a", "bb"), [("long", "x")]) == "a     bb\nlong  x"


def test_prefix_pairs_are_summed_up_by_pair() -> None:
    pairs = [
        Pair(Answer(2.0, 1010, 0), Answer(0.5, 1011, 992)),
        Pair(Answer(3.0, 1020, 16), Answer(0.2, 1021, 1008)),
        Pair(Answer(1.0, 1005, 0), Answer(0.4, 1006, 1000)),
    ]
    fresh, shared, ratio = summarise(pairs, "tiny", 1000)
    assert (fresh.value, fresh.min, fresh.max, fresh.unit, fresh.n) == (2000.0, 1000.0, 3000.0, "ms", 3)
    assert (shared.value, shared.min, shared.max) == (400.0, 200.0, 500.0)
    assert ratio.value == pytest.approx(4.0)
    assert (ratio.min, ratio.max) == (pytest.approx(2.5), pytest.approx(15.0))
    assert ratio.context == {
        "model": "tiny",
        "prefix_tokens": 1000,
        "prompt_tokens_min": 1005,
        "cached_tokens_min": 992,
        "cached_tokens_fresh_max": 16,
    }
