"""A line chart as inline SVG: axes, ticks, lines, dots. Colours are CSS classes of the page (light and dark)."""

from __future__ import annotations

from html import escape

from isles.report.draw.axes import ChartAxis, linear, logarithmic
from isles.report.panels import Chart, Polyline
from isles.report.series import Point

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
