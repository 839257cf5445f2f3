"""A small line chart as inline SVG: axes, ticks, lines, dots. Colours are CSS classes of the page (light and dark)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape

from isles.report.series import Point

WIDTH, HEIGHT = 760, 300
LEFT, RIGHT, TOP, BOTTOM = 60, 16, 12, 40


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """A polyline: `css` picks its look, `name` shows when the pointer rests on it, `label` stands at its end."""

    points: Sequence[Point]
    css: str
    name: str = ""
    label: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Chart:
    """What a chart shows. `dots` are drawn above the lines, `top` cuts the y axis off, `log` makes it logarithmic."""

    title: str
    x_label: str
    y_format: Callable[[float], str]
    lines: Sequence[Line]
    dots: Sequence[Point] = field(default=())
    top: float | None = None
    log: bool = False
    right: int = RIGHT

    def svg(self) -> str:
        """The `<svg>` element. Points that a logarithmic axis cannot hold (zero) are left out."""
        lines = [(line, self._usable(line.points)) for line in self.lines]
        dots = self._usable(self.dots)
        everything = [point for _, points in lines for point in points] + dots
        if not everything:
            return ""
        x_ticks, x_low, x_high = _linear_axis(0.0, max(x for x, _ in everything), 8, tight=True)
        low, high = min(y for _, y in everything), max(y for _, y in everything)
        if self.top is not None:
            high = min(high, self.top)
        y_ticks, y_low, y_high = _log_axis(low, high) if self.log else _linear_axis(low, high, 6)

        def x_at(x: float) -> float:
            return LEFT + (x - x_low) / (x_high - x_low) * (WIDTH - LEFT - self.right)

        def y_at(y: float) -> float:
            y, bottom, top = (math.log10(v) for v in (y, y_low, y_high)) if self.log else (y, y_low, y_high)
            return HEIGHT - BOTTOM - (y - bottom) / (top - bottom) * (HEIGHT - TOP - BOTTOM)

        clip = "clip-" + "".join(c for c in self.title.lower() if c.isalnum())
        plot_width, plot_height = WIDTH - LEFT - self.right, HEIGHT - TOP - BOTTOM
        parts = [
            f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(self.title)}">',
            f'<clipPath id="{clip}"><rect x="{LEFT}" y="{TOP - 4}" '
            f'width="{plot_width + 4}" height="{plot_height + 8}"/></clipPath>',
        ]
        for y in y_ticks:
            parts.append(
                f'<line class="grid" x1="{LEFT}" x2="{WIDTH - self.right}" y1="{y_at(y):.1f}" y2="{y_at(y):.1f}"/>'
            )
            parts.append(
                f'<text class="tick end" x="{LEFT - 8}" y="{y_at(y) + 4:.1f}">{escape(self.y_format(y))}</text>'
            )
        for x in x_ticks:
            parts.append(f'<text class="tick mid" x="{x_at(x):.1f}" y="{HEIGHT - BOTTOM + 18}">{x:,.0f}</text>')
        parts.append(
            f'<line class="axis" x1="{LEFT}" x2="{WIDTH - self.right}" y1="{HEIGHT - BOTTOM}" y2="{HEIGHT - BOTTOM}"/>'
            f'<text class="tick mid" x="{LEFT + plot_width / 2:.0f}" y="{HEIGHT - 4}">{escape(self.x_label)}</text>'
            f'<g clip-path="url(#{clip})">'
        )
        for line, points in lines:
            parts.append(_polyline(line, [(x_at(x), y_at(y)) for x, y in points]))
        for x, y in dots:
            parts.append(
                f'<circle class="dot" cx="{x_at(x):.1f}" cy="{y_at(y):.1f}" r="4">'
                f"<title>{escape(f'step {x:,.0f}: {self.y_format(y)}')}</title></circle>"
            )
        parts.append("</g>")
        parts += self._end_labels(
            [(line.label, y_at(points[-1][1])) for line, points in lines if line.label and points]
        )
        parts.append("</svg>")
        return "".join(parts)

    def _usable(self, points: Sequence[Point]) -> list[Point]:
        return [point for point in points if point[1] > 0 or not self.log]

    def _end_labels(self, labels: list[tuple[str, float]]) -> list[str]:
        """Two-line labels to the right of the plot, moved apart where they would overlap."""
        placed, floor = [], 0.0
        for text, y in sorted(labels, key=lambda label: label[1]):
            y = max(y, floor)
            floor = y + 34
            first, _, second = text.partition("\n")
            x = WIDTH - self.right + 8
            placed.append(
                f'<text class="label" x="{x}" y="{y + 4:.1f}">{escape(first)}'
                f'<tspan x="{x}" dy="15">{escape(second)}</tspan></text>'
            )
        return placed


def _polyline(line: Line, points: list[Point]) -> str:
    if not points:
        return ""
    title = f"<title>{escape(line.name)}</title>" if line.name else ""
    if len(points) == 1:  # a polyline of one point draws nothing
        x, y = points[0]
        return f'<circle class="{line.css} point" cx="{x:.1f}" cy="{y:.1f}" r="2.5">{title}</circle>'
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline class="{line.css}" points="{path}">{title}</polyline>'


def _linear_axis(low: float, high: float, count: int, tight: bool = False) -> tuple[list[float], float, float]:
    """Round ticks over [low, high], and the ends of the axis: the data's own when tight, else the outer ticks."""
    if high <= low:
        low, high = (low, low + 1) if tight or low == 0 else (low - abs(low) * 0.05, low + abs(low) * 0.05)
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = power * next(m for m in (1, 2, 2.5, 5, 10) if m * power >= rough * 0.999)
    if tight:  # the axis of steps: whole numbers only
        step = max(1.0, math.ceil(step))
    # The small shifts keep a rounding error from adding or losing a tick.
    first = math.ceil(low / step - 1e-9) if tight else math.floor(low / step + 1e-9)
    last = math.floor(high / step + 1e-9) if tight else math.ceil(high / step - 1e-9)
    ticks = [k * step for k in range(first, last + 1)]
    return ticks, low if tight else ticks[0], high if tight else ticks[-1]


def _log_axis(low: float, high: float) -> tuple[list[float], float, float]:
    """Powers of ten around [low, high]; at most seven of them are ticks."""
    bottom, top = math.floor(math.log10(low) + 1e-9), math.ceil(math.log10(high) - 1e-9)
    top = max(top, bottom + 1)
    stride = math.ceil((top - bottom) / 7)
    return [10.0**k for k in range(bottom, top + 1, stride)], 10.0**bottom, 10.0**top
