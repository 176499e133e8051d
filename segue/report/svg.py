"""Draws a chart as SVG text that a page can hold: axes with labels, curves, and under each step a zone that tells its figures.

No colours stand here: curves have the classes s0, s1, …, and the page says how they look, by day and by night.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from segue.report.curves import SMOOTHING, Chart, Point, Series, smoothed

WIDTH, HEIGHT = 560, 278
LEFT, RIGHT, TOP, BOTTOM = 64, 14, 20, 44
TICKS = 5


@dataclass(frozen=True)
class Axis:
    """A linear or logarithmic scale from `low` to `high` onto pixels from `start` to `end`, and where its ticks are."""

    low: float
    high: float
    start: float
    end: float
    ticks: tuple[float, ...]
    log: bool = False

    def at(self, value: float) -> float:
        """The pixel of a value."""
        low, high, value = (math.log10(v) for v in (self.low, self.high, value)) if self.log else (self.low, self.high, value)
        return self.start + (value - low) / (high - low) * (self.end - self.start)


def svg(chart: Chart, last: float = 1.0) -> str:
    """The chart as an `<svg>` element, over the steps 1 to `last` at least: so charts of one run have one axis."""
    drawn = _stacked(chart.series) if chart.stack else chart.series
    across, up = _x_axis(drawn, last), _y_axis(chart, drawn)
    parts = [*_grid(chart, across, up)]
    order = [*enumerate(drawn)]
    for i, series in reversed(order) if chart.stack else order:  # of areas the highest is behind the others
        parts += _curve(i, series, across, up, area=chart.stack)
    if chart.level is not None:
        name, value = chart.level
        y = up.at(value)
        parts.append(f"<line class='level' x1='{LEFT}' x2='{WIDTH - RIGHT}' y1='{y:.1f}' y2='{y:.1f}'/>")
        parts.append(f"<text class='tick' x='{WIDTH - RIGHT}' y='{y - 4:.1f}' text-anchor='end'>{_text(name)} {value:g}</text>")
    parts += _zones(chart, across)
    label = _text(f"{chart.title}, {chart.unit}, over steps")
    return f"<svg viewBox='0 0 {WIDTH} {HEIGHT}' role='img' aria-label='{label}'>{''.join(parts)}</svg>"


def _stacked(series: Sequence[Series]) -> tuple[Series, ...]:
    """Each curve raised by those before it. All have the same steps."""
    base = dict.fromkeys((x for one in series for x, _ in one.points), 0.0)
    raised = []
    for one in series:
        for x, y in one.points:
            base[x] += y
        raised.append(Series(one.name, tuple((x, base[x]) for x, _ in one.points)))
    return tuple(raised)


# --- axes -----------------------------------------------------------------------------------------------------------------------


def _x_axis(series: Sequence[Series], last: float) -> Axis:
    xs = [1.0, last, *(x for one in series for x, _ in one.points)]
    low, high = min(xs), max(xs)
    if low == high:
        low, high = low - 1.0, high + 1.0
    ticks = tuple(tick for tick in nice(low, high, TICKS + 1) if tick == int(tick))
    return Axis(low, high, LEFT, WIDTH - RIGHT, ticks)


def _y_axis(chart: Chart, series: Sequence[Series]) -> Axis:
    ys = [y for one in series for _, y in one.points] + ([chart.level[1]] if chart.level else [])
    if chart.log:
        return _log_axis(ys)
    if chart.share:
        return Axis(0.0, 1.0, HEIGHT - BOTTOM, TOP, (0.0, 0.25, 0.5, 0.75, 1.0))
    low, high = min(0.0, *ys), max(0.0, *ys)
    if low == high:
        high = low + 1.0
    ticks = nice(low, high, TICKS)
    step = ticks[1] - ticks[0]
    low, high = math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step
    return Axis(low, high, HEIGHT - BOTTOM, TOP, tuple(nice(low, high, TICKS)))


def _log_axis(ys: Sequence[float]) -> Axis:
    """From one power of ten to another."""
    low = math.floor(math.log10(min(ys)))
    high = max(low + 1, math.ceil(math.log10(max(ys))))
    every = max(1, -(-(high - low) // TICKS))
    return Axis(10.0**low, 10.0**high, HEIGHT - BOTTOM, TOP, tuple(10.0**e for e in range(low, high + 1, every)), log=True)


def nice(low: float, high: float, most: int) -> list[float]:
    """Ticks inside [low, high], at least two, at round distances (1, 2 or 5 times a power of ten), about `most` of them."""
    raw = (high - low) / most
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1.0, 2.0, 5.0, 10.0) if power * factor >= raw * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    ticks = [round(i * step, 12) for i in range(first, math.floor(high / step + 1e-9) + 1)]
    return ticks if len(ticks) > 1 else [low, high]


def _grid(chart: Chart, across: Axis, up: Axis) -> Iterator[str]:
    for tick in up.ticks:
        y = up.at(tick)
        yield f"<line class='grid' x1='{LEFT}' x2='{WIDTH - RIGHT}' y1='{y:.1f}' y2='{y:.1f}'/>"
        text = f"{tick:.0%}" if chart.share else f"1e{math.log10(tick):.0f}" if chart.log else number(tick)
        yield f"<text class='tick' x='{LEFT - 6}' y='{y + 4:.1f}' text-anchor='end'>{text}</text>"
    bottom = HEIGHT - BOTTOM
    yield f"<line class='axis' x1='{LEFT}' x2='{WIDTH - RIGHT}' y1='{bottom}' y2='{bottom}'/>"
    for tick in across.ticks:
        yield f"<text class='tick' x='{across.at(tick):.1f}' y='{bottom + 16}' text-anchor='middle'>{number(tick)}</text>"
    middle = (TOP + bottom) / 2
    yield f"<text class='label' x='{(LEFT + WIDTH - RIGHT) / 2}' y='{HEIGHT - 8}' text-anchor='middle'>step</text>"
    turned = f"transform='rotate(-90 14 {middle})'"
    yield f"<text class='label' x='14' y='{middle}' text-anchor='middle' {turned}>{_text(chart.unit)}</text>"


def number(value: float) -> str:
    """A figure for people: 12,000, 0.25, 3e-07."""
    if value == 0.0:
        return "0"
    if 1e-3 <= abs(value) < 1e7:
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return f"{value:.3g}"


# --- curves ---------------------------------------------------------------------------------------------------------------------


def _curve(i: int, series: Series, across: Axis, up: Axis, area: bool) -> Iterator[str]:
    spots = [(across.at(x), up.at(y)) for x, y in series.points]
    path = _path(series.points, across, up)
    if area:
        floor = up.at(up.low)
        yield f"<polygon class='area s{i}' points='{spots[0][0]:.1f},{floor:.1f} {path} {spots[-1][0]:.1f},{floor:.1f}'/>"
        return
    if series.style != "mark" and len(spots) > 1:
        smooth, of = (series.points, 1) if series.style == "high" else smoothed(series.points)
        style = "" if series.style == "line" else " dashed"
        if of > 1:
            yield f"<polyline class='curve thin s{i}' points='{path}'/>"
        yield f"<polyline class='curve s{i}{style}' points='{_path(smooth, across, up)}'/>"
    if series.style == "mark" or len(spots) < SMOOTHING:
        radius = 5 if series.style == "mark" else 2.4
        yield "".join(f"<circle class='dot s{i}' cx='{x:.1f}' cy='{y:.1f}' r='{radius}'/>" for x, y in spots)


def _path(points: Sequence[Point], across: Axis, up: Axis) -> str:
    return " ".join(f"{across.at(x):.1f},{up.at(y):.1f}" for x, y in points)


def _zones(chart: Chart, across: Axis) -> Iterator[str]:
    """For each step an invisible column: whoever points at it sees a line and reads the figures."""
    xs = sorted({x for series in chart.series for x, _ in series.points})
    told = [dict(series.points) for series in chart.series]
    edges = [LEFT, *((across.at(a) + across.at(b)) / 2 for a, b in pairwise(xs)), WIDTH - RIGHT]
    for k, x in enumerate(xs):
        rows = [f"{s.name} {_figure(chart, own[x])}" for s, own in zip(chart.series, told, strict=True) if x in own]
        title = _text("\n".join((f"step {number(x)}", *rows)))
        at, height = across.at(x), HEIGHT - BOTTOM - TOP
        yield (
            f"<g class='zone'><title>{title}</title>"
            f"<rect x='{edges[k]:.1f}' y='{TOP}' width='{edges[k + 1] - edges[k]:.1f}' height='{height}'/>"
            f"<line x1='{at:.1f}' x2='{at:.1f}' y1='{TOP}' y2='{TOP + height}'/></g>"
        )


def _figure(chart: Chart, value: float) -> str:
    return f"{value:.1%}" if chart.share else f"{value:.4g}"


def _text(text: str) -> str:
    return html.escape(text, quote=True)
