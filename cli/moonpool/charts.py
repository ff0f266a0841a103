"""A page of HTML with charts as inline SVG, which needs nothing else: no script, no font, no other file.

Pure. All text is escaped here, so callers give it as it is. Every mark tells its value to a pointer that
rests on it; where there is no pointer, the page's tables have the figures.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 720, 240
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 24, 40
PLOT_WIDTH, PLOT_HEIGHT = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
TICKS = 5
HISTOGRAM_BINS = 40
SERIES_MAX = 6
"""Lines of one chart that can still be told apart."""
STYLE = """
:root { color-scheme: light dark; --page: #fcfcfb; --ink: #0b0b0b; --soft: #52514e; --grid: #e1e0d9;
  --mark: #2a78d6; --target: #c4351c; }
@media (prefers-color-scheme: dark) { :root { --page: #1a1a19; --ink: #fff; --soft: #c3c2b7; --grid: #33332f;
  --mark: #3987e5; --target: #f0705a; } }
body { background: var(--page); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; margin: 2em auto;
  max-width: 760px; padding: 0 1em; }
h1 { font-size: 1.5em; } h2 { font-size: 1.1em; margin: 2em 0 .4em; } p { color: var(--soft); }
svg { width: 100%; height: auto; } svg text { fill: var(--soft); font-size: 12px; }
.grid { stroke: var(--grid); } .bar { fill: var(--mark); } .dot { fill: currentColor; fill-opacity: 0; }
.dot:hover { fill-opacity: 1; }
.line { fill: none; stroke: currentColor; stroke-width: 2; stroke-linecap: round; }
.series0 { color: var(--mark); } .series1 { color: #d97a00; } .series2 { color: #1f9d6b; }
.series3 { color: #a24fc4; } .series4 { color: #c4351c; } .series5 { color: #7d7c74; }
.legend { margin: 0; } .legend span { margin-right: 1.2em; }
.target { stroke: var(--target); stroke-width: 2; stroke-dasharray: 6 4; }
table { border-collapse: collapse; } .wide { overflow-x: auto; }
th, td { border-bottom: 1px solid var(--grid); padding: .25em .8em; text-align: right; }
th:first-child, td:first-child { padding-left: 0; text-align: left; }
td { font-variant-numeric: tabular-nums; }
"""


@dataclass(frozen=True, slots=True)
class Axis:
    """`low` < `high`; a logarithmic one begins above 0."""

    label: str
    low: float
    high: float
    logarithmic: bool = False

    def share(self, value: float) -> float:
        """Where a value is on the axis, from 0 to 1; what is outside is at its end."""
        low, high = self._place(self.low), self._place(self.high)
        return min(1.0, max(0.0, (self._place(max(value, self.low)) - low) / (high - low)))

    def ticks(self) -> list[float]:
        if self.logarithmic:
            decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            steps = (1, 2, 5) if len(decades) <= TICKS else (1,)
            ticks = [step * 10.0**decade for decade in decades for step in steps]
        else:
            step = _round_step((self.high - self.low) / TICKS)
            first = math.ceil(self.low / step)
            ticks = [step * number for number in range(first, math.floor(self.high / step) + 1)]
        return [tick for tick in ticks if self.low <= tick <= self.high]

    def _place(self, value: float) -> float:
        return math.log10(value) if self.logarithmic else value


@dataclass(frozen=True, slots=True)
class Series:
    """Points in the order of their first number; a gap where there is no second."""

    name: str
    points: Sequence[tuple[float, float | None]]


def line_chart(
    points: Sequence[tuple[float, float | None]], *, x: str, y: str, y_max: float | None = None
) -> str:
    """A line through `points`, which are in the order of their first number; a gap where there is no
    second. The y axis begins at 0 and ends at `y_max`, or where the line does."""
    return lines_chart([Series("", points)], x=x, y=y, y_max=y_max)


def lines_chart(series: Sequence[Series], *, x: str, y: str, y_max: float | None = None) -> str:
    """Several lines on the same axes, at most SERIES_MAX, with their names above where there is more than
    one."""
    if len(series) > SERIES_MAX:
        raise ValueError(f"series: {len(series)}, at most {SERIES_MAX}")
    known = [value for one in series for _, value in one.points if value is not None]
    if not known:
        return paragraph("Nothing was measured.")
    last = max(one.points[-1][0] for one in series if one.points)
    x_axis = Axis(x, 0.0, max(last, 1e-9))
    y_axis = Axis(y, 0.0, y_max or max(*known, 1e-9))
    lines = "".join(_line(one, number, x_axis, y_axis) for number, one in enumerate(series))
    return (_legend(series) if len(series) > 1 else "") + _svg(x_axis, y_axis, lines)


def bar_chart(values: Sequence[tuple[str, float]], *, y: str, y_max: float | None = None) -> str:
    """One bar a name, in the given order. The y axis begins at 0 and ends at `y_max`, or at the highest."""
    if not values:
        return paragraph("Nothing was measured.")
    x_axis = Axis("", 0.0, float(len(values)))
    y_axis = Axis(y, 0.0, y_max or max(*(value for _, value in values), 1e-9))
    bars = "".join(
        _bar(x_axis, y_axis, float(number), number + 1.0, value, f"{name}: {short(value)}")
        for number, (name, value) in enumerate(values)
    )
    return _svg(x_axis, y_axis, bars, x_ticks=False)


def histogram(values: Sequence[float], *, x: str, y: str, target: float | None = None) -> str:
    """How many of `values`, which are above 0, lie where; bins are as wide as they are far out (the x axis is
    logarithmic). `target` is a dashed line."""
    if not values:
        return paragraph("Nothing was measured.")
    low, high = min(values) / 1.05, max(values) * 1.05
    counts = [0] * HISTOGRAM_BINS
    bins = Axis(x, low, high, logarithmic=True)
    for value in values:
        counts[min(HISTOGRAM_BINS - 1, int(bins.share(value) * HISTOGRAM_BINS))] += 1
    x_axis = bins if target is None else Axis(x, min(low, target / 1.05), max(high, target * 1.05), True)
    y_axis = Axis(y, 0.0, float(max(counts)))
    edges = [low * (high / low) ** (number / HISTOGRAM_BINS) for number in range(HISTOGRAM_BINS + 1)]
    bars = "".join(
        _bar(x_axis, y_axis, edges[number], edges[number + 1], count, _bin_tip(edges, number, count))
        for number, count in enumerate(counts)
        if count
    )
    return _svg(x_axis, y_axis, bars + ("" if target is None else _target(x_axis, target)))


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def paragraph(text: str) -> str:
    return f"<p>{escape(text)}</p>"


def page(title: str, sections: Sequence[tuple[str, str]]) -> str:
    """A whole document; of each section the heading, as text, and what is below it, as HTML."""
    body = "".join(f"<h2>{escape(heading)}</h2>{content}" for heading, content in sections)
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{STYLE}</style></head>'
        f"<body><h1>{escape(title)}</h1>{body}</body></html>\n"
    )


def short(value: float) -> str:
    """Three significant digits, but never an exponent for what is large."""
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _line(series: Series, number: int, x_axis: Axis, y_axis: Axis) -> str:
    path, dots = [], []
    drawing = False
    for at, value in series.points:
        if value is None:
            drawing = False
            continue
        left, top = _x(x_axis, at), _y(y_axis, value)
        # A line of no length, whose round ends are a dot, lets one value between gaps be seen.
        path.append(f"L{left:.1f} {top:.1f}" if drawing else f"M{left:.1f} {top:.1f}h0")
        drawing = True
        named = f"{series.name}, " if series.name else ""
        tip = escape(f"{named}{x_axis.label} {short(at)}: {short(value)}")
        dots.append(f'<circle class="dot" cx="{left:.1f}" cy="{top:.1f}" r="5"><title>{tip}</title></circle>')
    marks = f'<path class="line" d="{" ".join(path)}"/>' + "".join(dots)
    return f'<g class="series{number}">{marks}</g>'


def _legend(series: Sequence[Series]) -> str:
    names = "".join(
        f'<span class="series{number}">&#9644; {escape(one.name)}</span>' for number, one in enumerate(series)
    )
    return f'<p class="legend">{names}</p>'


def _svg(x_axis: Axis, y_axis: Axis, marks: str, x_ticks: bool = True) -> str:
    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">']
    parts.append(f'<text x="{LEFT}" y="14">{escape(y_axis.label)}</text>')
    for tick in y_axis.ticks():
        top = _y(y_axis, tick)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{top:.1f}" y2="{top:.1f}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{top + 4:.1f}" text-anchor="end">{short(tick)}</text>')
    for tick in x_axis.ticks() if x_ticks else []:
        left = _x(x_axis, tick)
        parts.append(
            f'<text x="{left:.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{short(tick)}</text>'
        )
    middle = LEFT + PLOT_WIDTH // 2
    parts.append(f'<text x="{middle}" y="{HEIGHT - 6}" text-anchor="middle">{escape(x_axis.label)}</text>')
    return "".join([*parts, marks, "</svg>"])


def _bin_tip(edges: Sequence[float], number: int, count: int) -> str:
    return f"{short(edges[number])} to {short(edges[number + 1])}: {count}"


def _bar(x_axis: Axis, y_axis: Axis, low: float, high: float, value: float, tip: str) -> str:
    left, right, top = _x(x_axis, low), _x(x_axis, high), _y(y_axis, value)
    # Two units stay free between bars, so that they can be told apart.
    width = max(1.0, right - left - 2)
    return (
        f'<rect class="bar" x="{left + 1:.1f}" y="{top:.1f}" width="{width:.1f}" '
        f'height="{HEIGHT - BOTTOM - top:.1f}"><title>{escape(tip)}</title></rect>'
    )


def _target(x_axis: Axis, target: float) -> str:
    left = _x(x_axis, target)
    anchor, gap = ("end", -6) if x_axis.share(target) > 0.5 else ("start", 6)
    return (
        f'<line class="target" x1="{left:.1f}" x2="{left:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>'
        f'<text x="{left + gap:.1f}" y="{TOP - 8}" text-anchor="{anchor}">target {short(target)}</text>'
    )


def _x(axis: Axis, value: float) -> float:
    return LEFT + axis.share(value) * PLOT_WIDTH


def _y(axis: Axis, value: float) -> float:
    return HEIGHT - BOTTOM - axis.share(value) * PLOT_HEIGHT


def _round_step(about: float) -> float:
    """The smallest of 1, 2, 5, 10, 20, … (and their parts) that is not below `about`."""
    decade = 10.0 ** math.floor(math.log10(about))
    return next(step * decade for step in (1, 2, 5, 10) if step * decade >= about * 0.999)
