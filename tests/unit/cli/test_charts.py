"""Charts as inline SVG: marks are where their values are, and nothing that is given breaks the page."""

import math
import re
import xml.etree.ElementTree as ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonpool.charts import (
    HEIGHT,
    SERIES_MAX,
    WIDTH,
    Axis,
    Series,
    bar_chart,
    histogram,
    line_chart,
    lines_chart,
    page,
    table,
)

pytestmark = pytest.mark.unit

positive = st.floats(1e-3, 1e9)


def parsed(svg: str) -> ElementTree.Element:
    return ElementTree.fromstring(svg)


def of_class(svg: str, name: str) -> list[ElementTree.Element]:
    return [element for element in parsed(svg).iter() if element.get("class") == name]


@given(st.lists(positive, min_size=1, max_size=50), st.none() | positive)
def test_a_histogram_shows_every_value_once_and_inside(values, target) -> None:
    svg = histogram(values, x="ms", y="requests", target=target)
    bars = of_class(svg, "bar")
    counts = [int((bar[0].text or "").rpartition(": ")[2]) for bar in bars]
    assert sum(counts) == len(values)
    for bar in bars:
        x, y, width, height = (float(bar.get(name) or "nan") for name in ("x", "y", "width", "height"))
        assert 0 <= x <= x + width <= WIDTH
        assert 0 <= y <= y + height <= HEIGHT
    assert len(of_class(svg, "target")) == (target is not None)


@given(st.lists(st.tuples(st.floats(0, 1e6), st.none() | st.floats(0, 1e6)), max_size=50))
def test_a_line_has_a_dot_for_every_value_that_is_known(points) -> None:
    svg = line_chart(sorted(points, key=lambda point: point[0]), x="s", y="requests")
    known = [value for _, value in points if value is not None]
    if known:
        assert len(of_class(svg, "dot")) == len(known)
    else:
        assert svg == "<p>Nothing was measured.</p>"


def test_a_line_is_broken_where_nothing_is_known() -> None:
    (line,) = of_class(line_chart([(0, 1), (1, 2), (2, None), (3, 4), (4, 0)], x="s", y="n"), "line")
    assert re.sub(r"[\d. ]", "", line.get("d") or "") == "MhLMhL"


def test_more_is_higher_and_later_is_further_right() -> None:
    first, second = of_class(line_chart([(0, 1), (10, 2)], x="s", y="n"), "dot")
    assert float(first.get("cx") or 0) < float(second.get("cx") or 0)
    assert float(first.get("cy") or 0) > float(second.get("cy") or 0)


@pytest.mark.parametrize(
    ("axis", "ticks"),
    [
        (Axis("", 0, 10), [0, 2, 4, 6, 8, 10]),
        (Axis("", 0, 1), [0, 0.2, 0.4, 0.6, 0.8, 1]),
        (Axis("", 0, 47), [0, 10, 20, 30, 40]),
        (Axis("", 3, 30, logarithmic=True), [5, 10, 20]),
        (Axis("", 0.5, 50_000, logarithmic=True), [1, 10, 100, 1000, 10_000]),
    ],
)
def test_ticks_are_round(axis, ticks) -> None:
    assert axis.ticks() == pytest.approx(ticks)


@given(st.floats(0, 1e6), st.floats(1e-6, 1e6), st.booleans())
def test_an_axis_has_few_ticks_and_all_inside(low, length, logarithmic) -> None:
    axis = Axis("", low + 1e-3, low + 1e-3 + length, logarithmic)
    if axis.low < axis.high:
        ticks = axis.ticks()
        assert len(ticks) <= 16
        assert all(axis.low <= tick <= axis.high and math.isfinite(tick) for tick in ticks)


def test_all_text_is_escaped() -> None:
    hostile = '<script>"&'
    text = page(hostile, [(hostile, table((hostile,), [(hostile,)]))])
    text += histogram([1.0], x=hostile, y=hostile) + line_chart([(0, 1)], x=hostile, y=hostile)
    assert "<script" not in text
    assert text.count("&lt;script&gt;") >= 9


def test_several_lines_have_names_and_the_same_axes() -> None:
    series = [Series("one <1>", [(0.0, 1.0), (2.0, None)]), Series("two", [(1.0, 4.0), (2.0, 2.0)])]
    svg = f"<div>{lines_chart(series, x='s', y='requests')}</div>"
    assert [element.text for element in of_class(svg, "legend")[0]] == ["\u25ac one <1>", "\u25ac two"]
    heights = {dot[0].text: float(dot.get("cy") or "nan") for dot in of_class(svg, "dot")}
    assert list(heights) == ["one <1>, s 0: 1", "two, s 1: 4", "two, s 2: 2"]
    assert heights["two, s 1: 4"] < heights["two, s 2: 2"] < heights["one <1>, s 0: 1"]


def test_more_lines_than_can_be_told_apart_are_refused() -> None:
    with pytest.raises(ValueError, match=str(SERIES_MAX)):
        lines_chart([Series(str(number), []) for number in range(SERIES_MAX + 1)], x="s", y="requests")


def test_bars_are_as_high_as_their_values() -> None:
    svg = bar_chart([("a", 0.5), ("b", 1.0), ("c", 0.0)], y="share", y_max=1.0)
    bars = of_class(svg, "bar")
    assert [bar[0].text for bar in bars] == ["a: 0.5", "b: 1", "c: 0"]
    low, high, none = (float(bar.get("height") or "nan") for bar in bars)
    assert (high, none) == (pytest.approx(2 * low), 0.0)
    assert "Nothing was measured" in bar_chart([], y="share")
