"""The panels of a report as one PNG, drawn by matplotlib from the same series as the page's SVG.

Uses matplotlib's Agg canvas directly: no window, no global state, and nothing is imported before a picture is asked
for.
"""

from __future__ import annotations

import io
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

from isles.report.draw.style import BOXES, LIGHT, LINES
from isles.report.draw.svg import ChartAxis, axes_of
from isles.report.panels import Bars, Chart, Grid, Lanes, Panel, Table

_DPI = 100
_WIDTH, _ROW = 13.0, 3.4  # inches
_KEYS_A_ROW = 4
_HIGH = 0.92  # of a plot's height: words above a point there would run into the legend
_CHARACTERS = 105  # of the heading's size in that width
_ABREAST = 165  # letters of a table that stand beside each other
_SIZES = {"font.size": 9.0, "axes.titlesize": 10.5, "legend.fontsize": 8.0}


def picture(heading: str, below: str, shown: Sequence[Panel], table: Table | None = None) -> bytes:
    """A PNG: the table if there is one, then the panels, two in a row; timelines have rows of their own."""
    wide = [panel for panel in shown if isinstance(panel.picture, Lanes)]
    narrow = [panel for panel in shown if not isinstance(panel.picture, Lanes)]
    heights = [0.28 * (len(table.rows) + 2)] if table else []
    heights += [_ROW] * ((len(narrow) + 1) // 2)
    heights += [1.2 + 0.4 * len(panel.picture.lanes) for panel in wide if isinstance(panel.picture, Lanes)]
    caption_lines = [heading, *textwrap.wrap(below, _CHARACTERS)]

    def draw(figure: Any) -> None:
        figure.suptitle("\n".join(caption_lines), fontsize=12.0, color=LIGHT["text"])
        grid = figure.add_gridspec(max(len(heights), 1), 2, height_ratios=heights or [1.0])
        row = 0
        if table:
            _table(figure.add_subplot(grid[0, :]), table)
            row = 1
        for index, panel in enumerate(narrow):
            column = slice(None) if len(narrow) == 1 else index % 2
            _draw(figure.add_subplot(grid[row + index // 2, column]), panel)
        row += (len(narrow) + 1) // 2
        for index, panel in enumerate(wide):
            _draw(figure.add_subplot(grid[row + index, :]), panel)

    return drawn(_WIDTH, sum(heights) + 0.6 + 0.2 * len(caption_lines), draw)


def drawn(width: float, height: float, draw: Callable[[Any], None]) -> bytes:
    """The PNG of a figure of `width` x `height` inches that `draw` fills. The same drawing gives the same bytes."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with matplotlib.rc_context({**matplotlib.rcParamsDefault, **_SIZES}):
        figure = Figure(figsize=(width, height), dpi=_DPI, facecolor=LIGHT["back"], layout="constrained")
        FigureCanvasAgg(figure)
        draw(figure)
        out = io.BytesIO()
        figure.savefig(out, format="png", metadata={"Software": None})
    return out.getvalue()


def _draw(axes: Any, panel: Panel) -> None:
    bare(axes, panel.heading, above=16 * -(-len(panel.keys) // _KEYS_A_ROW))
    if isinstance(panel.picture, Chart):
        _chart(axes, panel.picture)
    elif isinstance(panel.picture, Bars):
        _bars(axes, panel.picture)
    elif isinstance(panel.picture, Lanes):
        _lanes(axes, panel.picture)
    elif isinstance(panel.picture, Grid):
        _grid(axes, panel.picture)
    _legend(axes, panel)


def bare(axes: Any, heading: str, *, above: int = 0) -> None:
    """The look of every plot: a heading to the left, a line below, no frame. above: points left for a legend between
    heading and plot.
    """
    axes.set_title(heading, loc="left", color=LIGHT["text"], pad=6 + above)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(LIGHT["edge"])
    axes.tick_params(colors=LIGHT["soft"], length=0, pad=6)
    axes.xaxis.label.set_color(LIGHT["soft"])


def scaled(
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


def _chart(axes: Any, chart: Chart) -> None:
    both = axes_of(chart)
    if both is None:
        return
    scaled(axes, *both, chart.x_format, chart.y_format)
    axes.set_xlabel(chart.x_label)
    for line in chart.lines:
        points = chart.usable(line.points)
        width, dashes = LINES[line.css]
        axes.plot(
            [x for x, _ in points],
            [y for _, y in points],
            color=LIGHT[line.css],
            linewidth=0.75 * width,
            dashes=dashes or (None, None),
            marker="o" if len(points) == 1 else None,
            markersize=3,
        )
        if line.label and points:
            label, (offset, upright) = line.label.replace("\n", ", "), _beside(axes, points[-1])
            look = {"ha": "right", "va": upright, "fontsize": 8, "color": LIGHT["text"]}
            axes.annotate(label, points[-1], xytext=offset, textcoords="offset points", **look)
    dots = chart.usable(chart.dots)
    axes.scatter([x for x, _ in dots], [y for _, y in dots], s=16, color=LIGHT["dot"], zorder=3, clip_on=False)


def _beside(axes: Any, point: tuple[float, float]) -> tuple[tuple[int, int], str]:
    """Where the words of a line stand that ends at `point`: points from there, and which side of theirs. Above it; near
    the top, where the legend is, to the left of a line that rises, or below one that a logarithm has made flat.
    """
    _, height = axes.transAxes.inverted().transform(axes.transData.transform(point))
    if height <= _HIGH:
        return (0, 4), "bottom"
    return ((0, -4), "top") if axes.get_yscale() == "log" else ((-20, 0), "center")


def _bars(axes: Any, picture: Bars) -> None:
    for index, bar in enumerate(picture.bars):
        left = 0.0
        for css, seconds in bar.parts:
            axes.barh(index, seconds, left=left, height=0.7, color=LIGHT[css])
            left += seconds
    few = picture.bars if len(picture.bars) <= 16 else []
    for index, bar in enumerate(few):
        axes.annotate(
            bar.text, (0, index), xytext=(6, 0), textcoords="offset points", va="center", fontsize=8, color="white"
        )
    axes.set_yticks(range(len(few)), [bar.label for bar in few])
    axes.invert_yaxis()
    axes.set_xlabel("seconds")


def _lanes(axes: Any, picture: Lanes) -> None:
    rows = ((0.1, 0.5), (0.65, 0.2))  # each row's offset and thickness in a lane of height 1
    least = (picture.end - picture.start) / 1500  # about half a pixel
    for index, lane in enumerate(picture.lanes):
        for css in BOXES:
            for row, (offset, thick) in enumerate(rows):
                pieces = [
                    (max(s.start, picture.start), max(s.end - max(s.start, picture.start), least))
                    for s in lane.segments
                    if s.css == css and s.row == row
                ]
                if pieces:
                    axes.broken_barh(pieces, (index + offset, thick), facecolors=LIGHT[css])
        for s in lane.segments:
            if s.mark and s.end - s.start > 20 * least * len(s.mark):
                middle, height = (s.start + s.end) / 2, index + rows[s.row][0] + rows[s.row][1] / 2
                axes.text(middle, height, s.mark, color="white", fontsize=7, ha="center", va="center_baseline")
    axes.set_xlim(picture.start, picture.end)
    axes.set_ylim(len(picture.lanes), 0)
    axes.set_yticks([index + 0.45 for index in range(len(picture.lanes))], [lane.label for lane in picture.lanes])
    axes.set_xlabel(picture.x_label)


def _grid(axes: Any, picture: Grid) -> None:
    shades = [[0.0 if shade is None else 0.06 + 0.94 * shade for shade in row] for row in picture.shades]
    axes.imshow(shades, cmap="Blues", vmin=0, vmax=1.3)
    axes.scatter([column for _, column in picture.marks], [row for row, _ in picture.marks], s=9, color=LIGHT["dot"])
    few = picture.labels if len(picture.labels) <= 24 else []
    axes.set_xticks(range(len(few)), [label.split()[0] for label in few], fontsize=7)
    axes.set_yticks(range(len(few)), few, fontsize=7)


def _legend(axes: Any, panel: Panel) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Any] = []
    for css, text in panel.keys:
        if css in BOXES:
            handles.append(Patch(color=LIGHT[css], label=text))
        elif css == "dot":
            handles.append(Line2D([], [], color=LIGHT[css], marker="o", markersize=4, linewidth=0, label=text))
        else:
            width, dashes = LINES[css]
            handles.append(
                Line2D([], [], color=LIGHT[css], linewidth=0.75 * width, dashes=dashes or (None, None), label=text)
            )
    if handles:  # between the heading and the plot, where no line can run through it
        axes.legend(
            handles=handles,
            loc="lower left",
            bbox_to_anchor=(0.0, 1.0),
            ncols=min(len(handles), _KEYS_A_ROW),
            frameon=False,
            labelcolor=LIGHT["soft"],
            borderaxespad=0.2,
            borderpad=0.2,
            columnspacing=1.2,
            handlelength=1.4,
        )


def _table(axes: Any, cells: Table) -> None:
    axes.axis("off")
    columns = zip(cells.heads, *cells.rows, strict=True)
    widths = [max(map(len, column)) + 4 for column in columns]
    shares = [width / sum(widths) for width in widths]
    table = axes.table(cellText=cells.rows, colLabels=cells.heads, colWidths=shares, loc="center", edges="horizontal")
    table.auto_set_font_size(False)
    table.set_fontsize(9.0 * min(1.0, _ABREAST / sum(widths)))
    table.scale(1.0, 1.4)
    for (_, column), cell in table.get_celld().items():
        cell.get_text().set_horizontalalignment("left" if column < cells.names else "right")
        cell.set_edgecolor(LIGHT["grid"])
        cell.get_text().set_color(LIGHT["text"])
