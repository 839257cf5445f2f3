"""Charts as inline SVG: lines with axes and round ticks; bars and lanes of time; grids of shaded cells. Colours are CSS
classes of the page (light and dark).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from isles.report.draw.style import STYLE
from isles.report.panels import Bars, Chart, Grid, Lanes, Picture, Point, Polyline
from isles.report.units import format_seconds


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
        _svg(chart.title, HEIGHT),
        f'<clipPath id="{clip}"><rect x="{LEFT}" y="{TOP - 4}" '
        f'width="{plot_width + 4}" height="{plot_height + 8}"/></clipPath>',
    ]
    for y in y_axis.ticks:
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{end}" y1="{y_at(y):.1f}" y2="{y_at(y):.1f}"/>')
        parts.append(text(LEFT - 8, y_at(y) + 4, chart.y_format(y), "tick end"))
    parts += [text(x_at(x), HEIGHT - BOTTOM + 18, chart.x_format(x), "tick mid") for x in x_axis.ticks]
    parts.append(f'<line class="axis" x1="{LEFT}" x2="{end}" y1="{HEIGHT - BOTTOM}" y2="{HEIGHT - BOTTOM}"/>')
    parts.append(text(LEFT + plot_width / 2, HEIGHT - 4, chart.x_label, "tick mid"))
    parts.append(f'<g clip-path="url(#{clip})">')
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
    placed, floor = list[str](), 0.0
    for words, y in sorted(labels, key=lambda label: label[1]):
        y = min(max(y, floor), HEIGHT - BOTTOM - 15)  # the second line stays above the ticks of the x axis
        floor = y + 34
        first, _, second = words.partition("\n")
        placed += [text(x, y + 4, first, "label"), text(x, y + 19, second, "label")]
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


_INDENT = 84
_BAR_TEXT = 190  # pixels behind the longest bar
_LANE, _ROWS = 38, ((0, 20), (22, 8))  # a lane's pitch; each row's offset and thickness, pixels
_RIGHT = 16
_MARK = 7  # pixels of a mark's letter
_TOP, _CELL = 20, 30  # pixels above a grid, and of its largest cells


def draw(picture: Picture) -> str:
    """The `<svg>` of any picture."""
    if isinstance(picture, Chart):
        return line_chart(picture)
    if isinstance(picture, Grid):
        return grid(picture)
    return bars(picture) if isinstance(picture, Bars) else lanes(picture)


def bars(picture: Bars) -> str:
    """Bars on one scale, thinner where there are many."""
    longest = max(sum(seconds for _, seconds in bar.parts) for bar in picture.bars)
    pitch = 26 if len(picture.bars) <= 16 else 14
    scale = (WIDTH - _INDENT - _BAR_TEXT) / longest
    thick = pitch * 0.75
    out = [_svg(picture.title, pitch * len(picture.bars) + 8)]
    for index, bar in enumerate(picture.bars):
        y, x = 4 + index * pitch, float(_INDENT)
        out.append(f"<g><title>{escape(bar.hint)}</title>{_label(bar.label, y + thick / 2)}")
        for css, seconds in bar.parts:
            out.append(f'<rect class="{css}" x="{x:.1f}" y="{y}" width="{seconds * scale:.1f}" height="{thick}"/>')
            x += seconds * scale
        out.append(f"{text(x + 8, y + thick / 2 + 4, bar.text, 'tick')}</g>")
    return "".join([*out, "</svg>"])


def lanes(picture: Lanes) -> str:
    """Lanes of two rows over a common axis of seconds."""
    width, height = WIDTH - _INDENT - _RIGHT, _LANE * len(picture.lanes)

    def x_at(seconds: float) -> float:
        return _INDENT + (seconds - picture.start) / (picture.end - picture.start) * width

    out = [_svg(picture.title, height + 44)]
    for tick in linear(picture.start, picture.end, 8, tight=True).ticks:
        x = x_at(tick)
        out.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{height}"/>')
        out.append(text(x, height + 18, f"{tick:,.6g}", "tick mid"))
    out.append(text(_INDENT + width / 2, height + 38, picture.x_label, "tick mid"))
    for index, lane in enumerate(picture.lanes):
        out.append(_label(lane.label, index * _LANE + 4 + _ROWS[0][1] / 2))
        for piece in lane.segments:
            left, right = x_at(max(piece.start, picture.start)), x_at(min(piece.end, picture.end))
            offset, thick = _ROWS[piece.row]
            # Half a pixel is the least that can be seen; what took less is drawn wider than it was.
            out.append(
                f'<rect class="{piece.css}" x="{left:.1f}" y="{index * _LANE + 4 + offset}" '
                f'width="{max(right - left, 0.5):.1f}" height="{thick}">'
                f"<title>{escape(f'{piece.hint} {format_seconds(piece.end - piece.start)}')}</title></rect>"
            )
            if piece.mark and right - left > _MARK * len(piece.mark) + 3:
                out.append(text((left + right) / 2, index * _LANE + 4 + offset + thick / 2 + 4, piece.mark, "mark"))
    return "".join([*out, "</svg>"])


def _svg(title: str, height: float) -> str:
    size = f'viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
    return f'<svg {size} role="img" aria-label="{escape(title)}">'


def text(x: float, y: float, words: str, css: str = "") -> str:
    """A line of words whose foot is at `y`."""
    return f'<text class="{css}" x="{x:.1f}" y="{y:.1f}">{escape(words)}</text>'


def _label(words: str, middle: float) -> str:
    return text(_INDENT - 8, middle + 4, words, "tick end")


def alone(picture: Picture) -> str:
    """The picture as a file of its own, with the page's colours."""
    drawn = draw(picture).replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)
    return drawn.replace(">", f"><style>{escape(STYLE, quote=False)}</style>", 1) + "\n"


def grid(picture: Grid) -> str:
    """Rows go down, columns to the right; what stands out has a dot."""
    count = len(picture.labels)
    side = min(_CELL, (WIDTH - _INDENT) // max(count, 1))
    out = [_svg(picture.title, _TOP + side * count + 4)]
    for row, label in enumerate(picture.labels):
        middle = (row + 0.5) * side
        out.append(text(_INDENT + middle, _TOP - 6, label.split()[0], "tick mid"))
        out.append(_label(label, _TOP + middle))
        for column, shade in enumerate(picture.shades[row]):
            if shade is None:
                continue
            x, y = _INDENT + column * side, _TOP + row * side
            dot = f'<circle class="dot" cx="{x + side / 2:.1f}" cy="{y + side / 2:.1f}" r="{side / 6:.1f}"/>'
            out.append(
                f'<g><title>{escape(picture.hints[row][column])}</title><rect class="transfer" x="{x}" y="{y}" '
                f'width="{side - 1}" height="{side - 1}" fill-opacity="{0.06 + 0.94 * shade:.2f}"/>'
                f"{dot if (row, column) in picture.marks else ''}</g>"
            )
    return "".join([*out, "</svg>"])
