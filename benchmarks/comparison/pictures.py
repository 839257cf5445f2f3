"""Points with their spread, each with its name beside it: loss against bytes, and the gap against size."""

from __future__ import annotations

import io
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.comparison.cases import LADDER_ROWS, Key
from benchmarks.comparison.figures import Figures, Spread, differences
from isles.report.draw.style import LIGHT, SERIES
from isles.report.draw.svg import ChartAxis, linear, logarithmic
from isles.report.units import format_bytes, format_short

_SIZE = (9.5, 5.6)  # inches
_FONTS = {"font.size": 9.0, "axes.titlesize": 10.5, "legend.fontsize": 8.0}
_REACH = range(6, 90, 7)  # points between a mark and its name: as near as there is room
_TURNS = [math.radians(turn) for turn in (0, 30, -30, 60, -60, 180, 150, -150, 120, -120, 90, -90)]


@dataclass(frozen=True, kw_only=True)
class Marks:
    """Points of one colour: (x, y over the seeds). joined: a line runs through them, named at its end; else every point
    has a name."""

    name: str
    points: Sequence[tuple[float, Spread]]
    css: str
    joined: bool = False


def bytes_picture(rows: Mapping[str, Figures]) -> bytes:
    """Loss against the bytes that a worker sent, a mark for each row."""
    marks = []
    for index, row in enumerate(rows.values()):
        sent = row.spread("bytes_sent_per_worker")
        if sent is None or not sent.mean:  # one worker: a logarithmic axis has no place for it
            continue
        point = (sent.mean, Spread.of(row.loss.values()))
        marks.append(Marks(name=row.label, points=[point], css=SERIES[index % len(SERIES)]))
    heading = "Validation loss against bytes, nats per token: mean and range over the seeds"
    label = "sent by a worker in the whole run (logarithmic)"
    return _picture(marks, heading, label, lambda count: format_bytes(count, trim=True))


def gap_picture(sweep: Mapping[Key, Figures]) -> bytes:
    """Loss behind data parallel against parameters, a line for each method."""
    marks = []
    for name, css in zip(LADDER_ROWS[1:], SERIES, strict=False):
        points = []
        for (method, size), row in sweep.items():
            reference = sweep.get((LADDER_ROWS[0], size))
            if method == name and reference is not None and (found := differences(row, reference)):
                parameters = next(iter(row.rows.values()))["summary"]["parameters"]
                points.append((float(parameters), Spread.of(found.values())))
        if points:
            marks.append(Marks(name=name, points=sorted(points, key=lambda point: point[0]), css=css, joined=True))
    heading = f"Validation loss behind {LADDER_ROWS[0]}, nats per token: mean and range over the seeds"
    return _picture(marks, heading, "parameters (logarithmic)", format_short)


def _picture(marks: Sequence[Marks], heading: str, x_label: str, x_format: Callable[[float], str]) -> bytes:
    """Empty where there is nothing to show."""
    points = [point for mark in marks for point in mark.points]
    if not points:
        return b""
    xs = [x for x, _ in points]
    x_axis = logarithmic(min(xs) / 1.5, max(xs) * 2, tight=True)  # room for names at both sides
    low, high = min(y.low for _, y in points), max(y.high for _, y in points)
    room = 0.04 * (high - low)
    y_axis = linear(low - room, high + room, 6)

    def draw(figure: Any) -> None:
        axes = figure.add_subplot()
        _bare(axes, heading)
        _scaled(axes, x_axis, y_axis, x_format, lambda value: f"{value:.4g}")
        axes.set_xlabel(x_label)
        for mark in marks:
            _mark(axes, mark)
        figure.draw_without_rendering()  # only then places are known
        _name(axes, marks)

    return _drawn(draw)


def _drawn(draw: Callable[[Any], None]) -> bytes:
    """The PNG of a figure that `draw` fills. The same drawing gives the same bytes."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with matplotlib.rc_context({**matplotlib.rcParamsDefault, **_FONTS}):
        figure = Figure(figsize=_SIZE, dpi=100, facecolor=LIGHT["back"], layout="constrained")
        FigureCanvasAgg(figure)
        draw(figure)
        out = io.BytesIO()
        figure.savefig(out, format="png", metadata={"Software": None})
    return out.getvalue()


def _bare(axes: Any, heading: str) -> None:
    """The look of every plot: a heading to the left, a line below, no frame."""
    axes.set_title(heading, loc="left", color=LIGHT["text"], pad=6)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(LIGHT["edge"])
    axes.tick_params(colors=LIGHT["soft"], length=0, pad=6)
    axes.xaxis.label.set_color(LIGHT["soft"])


def _scaled(
    axes: Any, x: ChartAxis, y: ChartAxis, x_format: Callable[[float], str], y_format: Callable[[float], str]
) -> None:
    """Lay the two axes under a plot, with horizontal lines at the ticks of `y`."""
    for axis_side, axis, form, scale, limit in (
        (axes.xaxis, x, x_format, axes.set_xscale, axes.set_xlim),
        (axes.yaxis, y, y_format, axes.set_yscale, axes.set_ylim),
    ):
        if axis.log:
            scale("log")
        axis_side.set_ticks(axis.ticks, [form(tick) for tick in axis.ticks])
        axis_side.set_ticks([], minor=True)
        limit(axis.low, axis.high)
    axes.grid(axis="y", color=LIGHT["grid"], linewidth=0.8)
    axes.set_axisbelow(True)


def _mark(axes: Any, mark: Marks) -> None:
    colour = LIGHT[mark.css]
    for x, y in mark.points:
        axes.plot([x, x], [y.low, y.high], color=colour, linewidth=1.2)
    line = 1.5 if mark.joined else 0.0
    axes.plot([x for x, _ in mark.points], [y.mean for _, y in mark.points], color=colour, linewidth=line, marker="o",
              markersize=5)  # fmt: skip


def _name(axes: Any, marks: Sequence[Marks]) -> None:
    """Put names where they cover neither a mark nor another name, with a thin line to those that stand apart."""
    renderer = axes.figure.canvas.get_renderer()
    pixels = axes.figure.dpi / 72
    taken = [_box(*axes.transData.transform((x, y.mean)), 5 * pixels, 5 * pixels) for m in marks for x, y in m.points]
    frame = axes.get_window_extent(renderer)
    for mark in sorted(marks, key=lambda mark: mark.points[-1][1].mean):
        x, y = mark.points[-1]
        place = axes.transData.transform((x, y.mean))
        text = axes.annotate(
            mark.name, (x, y.mean), xytext=(0, 0), textcoords="offset points", va="center", ha="center", fontsize=8,
            color=LIGHT["text"], arrowprops={"arrowstyle": "-", "color": LIGHT["edge"], "linewidth": 0.6},
        )  # fmt: skip
        size = text.get_window_extent(renderer)
        for reach, turn in itertools.product(_REACH, _TURNS):
            # From the mark's middle to the middle of the name, which is much wider than high.
            right = math.cos(turn) * (reach * pixels + size.width / 2)
            up = math.sin(turn) * (reach * pixels + size.height / 2)
            box = _box(place[0] + right, place[1] + up, size.width / 2, size.height / 2)
            inside = frame.x0 <= box[0] and box[2] <= frame.x1 and frame.y0 <= box[1] and box[3] <= frame.y1
            if inside and not any(_overlap(box, other) for other in taken):
                break
        taken.append(box)
        text.set_position((right / pixels, up / pixels))


def _box(x: float, y: float, right: float, up: float) -> tuple[float, float, float, float]:
    return x - right, y - up, x + right, y + up


def _overlap(one: Sequence[float], other: Sequence[float]) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]
