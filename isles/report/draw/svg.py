"""A line chart as inline SVG: axes, ticks, lines, dots. Colours are CSS classes of the page (light and dark).

Round ticks for axes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from isles.report.panels import Chart, Point, Polyline


@dataclass(frozen=True, slots=True)
class ChartAxis:
    """Ticks and the two ends of an axis; `at` gives a value's place on it, 0 to 1."""

    ticks: Sequence[float]
    low: float
    high: float
    log: bool = False

    def at(self, value: float) -> float:
        """0 at `low`, 1 at `high`."""
        low, high = self.low, self.high
        if self.log:
            value, low, high = math.log10(value), math.log10(low), math.log10(high)
        return (value - low) / (high - low)


def linear(low: float, high: float, count: int, *, tight: bool = False, whole: bool = False) -> ChartAxis:
    """About `count` round ticks over [low, high]. tight: the axis ends where the data do, else at the outer ticks;
    whole: no tick between two whole numbers.
    """
    if high <= low:
        low, high = (low, low + 1) if tight or low == 0 else (low - abs(low) * 0.05, low + abs(low) * 0.05)
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = power * next(m for m in (1, 2, 2.5, 5, 10) if m * power >= rough * 0.999)
    if whole:
        step = max(1.0, math.ceil(step))
    # The small shifts keep a rounding error from adding or losing a tick.
    first = math.ceil(low / step - 1e-9) if tight else math.floor(low / step + 1e-9)
    last = math.floor(high / step + 1e-9) if tight else math.ceil(high / step - 1e-9)
    digits = max(0, 3 - math.floor(math.log10(step)))  # 3 * 0.1 is a little more than 0.3
    ticks = [round(k * step, digits) for k in range(first, last + 1)]
    return ChartAxis(ticks, low if tight else ticks[0], high if tight else ticks[-1])


def logarithmic(low: float, high: float, *, tight: bool = False) -> ChartAxis:
    """Powers of ten around [low, high], at most seven of them ticks; tight as in `linear`."""
    bottom, top = math.floor(math.log10(low) + 1e-9), math.ceil(math.log10(high) - 1e-9)
    top = max(top, bottom + 1)
    stride = math.ceil((top - bottom) / 7)
    ticks = [10.0**k for k in range(bottom, top + 1, stride)]
    if not tight or high <= low:
        return ChartAxis(ticks, 10.0**bottom, 10.0**top, log=True)
    inside = [tick for tick in ticks if low <= tick <= high]
    if len(inside) < 2:  # less than two powers of ten: 1, 2 and 5 of each are round enough
        inside = [m * 10.0**k for k in range(bottom, top + 1) for m in (1, 2, 5) if low <= m * 10.0**k <= high]
    return ChartAxis(inside, low, high, log=True)


WIDTH, HEIGHT = 760, 300
LEFT, TOP, BOTTOM = 60, 12, 40


def axes_of(chart: Chart) -> tuple[ChartAxis, ChartAxis] | None:
    """The x and y axis that hold everything; None where there is nothing."""
    everything = [p for line in chart.lines for p in chart.usable(line.points)] + chart.usable(chart.dots)
    if not everything:
        return None
    xs, ys = [x for x, _ in everything], [y for _, y in everything]
    high = max(ys) if chart.top is None else min(max(ys), chart.top)
    x_axis = (
        logarithmic(min(xs), max(xs), tight=True)
        if chart.log_x
        else linear(0.0, max(xs), 8, tight=True, whole=chart.whole_x)
    )
    if chart.log_y:
        return x_axis, logarithmic(min(ys), high)
    return x_axis, linear(min(ys), high + 1 if chart.whole_y else high, 6, whole=chart.whole_y)


def line_chart(chart: Chart) -> str:
    """The `<svg>` element; empty where there is nothing to draw."""
    axes = axes_of(chart)
    if axes is None:
        return ""
    x_axis, y_axis = axes
    plot_width, plot_height = WIDTH - LEFT - chart.right, HEIGHT - TOP - BOTTOM

    def x_at(x: float) -> float:
        return LEFT + x_axis.at(x) * plot_width

    def y_at(y: float) -> float:
        return HEIGHT - BOTTOM - y_axis.at(y) * plot_height

    clip = "clip-" + "".join(c for c in chart.title.lower() if c.isalnum())
    end = WIDTH - chart.right
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(chart.title)}">',
        f'<clipPath id="{clip}"><rect x="{LEFT}" y="{TOP - 4}" '
        f'width="{plot_width + 4}" height="{plot_height + 8}"/></clipPath>',
    ]
    for y in y_axis.ticks:
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{end}" y1="{y_at(y):.1f}" y2="{y_at(y):.1f}"/>')
        parts.append(f'<text class="tick end" x="{LEFT - 8}" y="{y_at(y) + 4:.1f}">{escape(chart.y_format(y))}</text>')
    for x in x_axis.ticks:
        parts.append(
            f'<text class="tick mid" x="{x_at(x):.1f}" y="{HEIGHT - BOTTOM + 18}">{escape(chart.x_format(x))}</text>'
        )
    parts.append(
        f'<line class="axis" x1="{LEFT}" x2="{end}" y1="{HEIGHT - BOTTOM}" y2="{HEIGHT - BOTTOM}"/>'
        f'<text class="tick mid" x="{LEFT + plot_width / 2:.0f}" y="{HEIGHT - 4}">{escape(chart.x_label)}</text>'
        f'<g clip-path="url(#{clip})">'
    )
    drawn = [(line, [(x_at(x), y_at(y)) for x, y in chart.usable(line.points)]) for line in chart.lines]
    parts += [_polyline(line, points) for line, points in drawn]
    for x, y in chart.usable(chart.dots):
        parts.append(
            f'<circle class="dot" cx="{x_at(x):.1f}" cy="{y_at(y):.1f}" r="4">'
            f"<title>{escape(f'{chart.x_format(x)}: {chart.y_format(y)}')}</title></circle>"
        )
    parts.append("</g>")
    parts += _end_labels([(line.label, points[-1][1]) for line, points in drawn if line.label and points], end + 8)
    parts.append("</svg>")
    return "".join(parts)


def _end_labels(labels: list[tuple[str, float]], x: int) -> list[str]:
    """Two-line labels to the right of the plot, moved apart where they would overlap."""
    placed, floor = [], 0.0
    for text, y in sorted(labels, key=lambda label: label[1]):
        y = min(max(y, floor), HEIGHT - BOTTOM - 15)  # the second line stays above the ticks of the x axis
        floor = y + 34
        first, _, second = text.partition("\n")
        placed.append(
            f'<text class="label" x="{x}" y="{y + 4:.1f}">{escape(first)}'
            f'<tspan x="{x}" dy="15">{escape(second)}</tspan></text>'
        )
    return placed


def _polyline(line: Polyline, points: list[Point]) -> str:
    if not points:
        return ""
    title = f"<title>{escape(line.name)}</title>" if line.name else ""
    if len(points) == 1:  # a polyline of one point draws nothing
        x, y = points[0]
        return f'<circle class="{line.css} point" cx="{x:.1f}" cy="{y:.1f}" r="2.5">{title}</circle>'
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline class="{line.css}" points="{path}">{title}</polyline>'
