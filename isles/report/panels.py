"""What the pictures of a report show, before anybody draws it: `draw.svg` draws it into the page, `draw.png` beside it.

`charts` makes panels from a run; colours are names of `draw.style`.

A series is a list of (x, y) points in rising x; long ones are made short enough to draw, by thinning that preserves the
spikes, or averaging that preserves the trend.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from statistics import fmean

from isles.report.draw.style import SERIES

Point = tuple[float, float]


def thin(points: Sequence[Point], limit: int) -> list[Point]:
    """At most about `limit` of the points: the lowest and the highest of each bucket, so no spike is lost.

    The first and the last point always stay.
    """
    if len(points) <= limit:
        return list(points)
    thinned = [points[0]]
    for bucket in _buckets(points[1:-1], max(1, (limit - 2) // 2)):
        low, high = min(bucket, key=itemgetter(1)), max(bucket, key=itemgetter(1))
        thinned += [low] if low is high else sorted((low, high))
    thinned.append(points[-1])
    return thinned


def average(points: Sequence[Point], limit: int) -> list[Point]:
    """At most `limit` points: the mean x and the mean y of each bucket."""
    if len(points) <= limit:
        return list(points)
    return [(fmean(x for x, _ in bucket), fmean(y for _, y in bucket)) for bucket in _buckets(points, limit)]


def mean_over(series: Iterable[Sequence[Point]]) -> list[Point]:
    """The mean of several series at every x that any of them has, over those that have it."""
    sums: dict[float, list[float]] = {}
    for points in series:
        for x, y in points:
            entry = sums.setdefault(x, [0.0, 0.0])
            entry[0] += y
            entry[1] += 1
    return [(x, total / count) for x, (total, count) in sorted(sums.items())]


def mean_of_totals(series: Collection[Sequence[Point]]) -> list[Point]:
    """The mean of several running totals, each as at its last point, at every x that any of them has."""
    means, total, newest = dict[float, float](), 0.0, [0.0] * len(series)
    for x, y, one in sorted((x, y, one) for one, points in enumerate(series) for x, y in points):
        total, newest[one] = total + y - newest[one], y
        means[x] = total / len(series)
    return [*means.items()]


def latest_of(series: Iterable[Sequence[Point]]) -> list[Point]:
    """The largest of several series at every x that any of them has."""
    found: dict[float, float] = {}
    for points in series:
        for x, y in points:
            found[x] = max(y, found.get(x, y))
    return sorted(found.items())


def quantile(values: Sequence[float], fraction: float) -> float:
    """The value below which `fraction` of `values` lies (nearest rank)."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, math.floor(fraction * len(ordered)))]


def _buckets(points: Sequence[Point], count: int) -> Iterable[Sequence[Point]]:
    size = len(points) / count
    for i in range(count):
        bucket = points[round(i * size) : round((i + 1) * size)]
        if bucket:
            yield bucket


@dataclass(frozen=True, kw_only=True, slots=True)
class Polyline:
    """A polyline: `css` picks its look, `name` shows when the pointer rests on it, `label` stands at its end."""

    points: Sequence[Point]
    css: str
    name: str = ""
    label: str = ""


def plain(value: float) -> str:
    """A tick that is just a number."""
    return f"{value:,.0f}" if value == round(value) else f"{value:,.4g}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Chart:
    """Lines over common axes. `dots` are drawn above the lines; `top` cuts the y axis off there.

    log_x, log_y: logarithmic axes, without the points that they cannot hold (zero). whole_x: the x axis counts
    something, so no tick stands between two whole numbers; whole_y: so does the y axis, with room above. right: room
    for labels at the ends of lines, pixels.
    """

    title: str
    x_label: str
    lines: Sequence[Polyline]
    y_format: Callable[[float], str] = plain
    x_format: Callable[[float], str] = plain
    dots: Sequence[Point] = field(default=())
    top: float | None = None
    log_x: bool = False
    log_y: bool = False
    whole_x: bool = False
    whole_y: bool = False
    right: int = 16

    def usable(self, points: Sequence[Point]) -> list[Point]:
        """The points that these axes can hold."""
        return [(x, y) for x, y in points if (x > 0 or not self.log_x) and (y > 0 or not self.log_y)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Bar:
    """One worker's seconds, part by part: (css, seconds)."""

    label: str
    parts: Sequence[tuple[str, float]]
    text: str
    """Stands behind the bar."""
    hint: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bars:
    """Horizontal bars on one scale."""

    title: str
    bars: Sequence[Bar]


@dataclass(frozen=True, kw_only=True, slots=True)
class LaneSegment:
    """Something that went on from `start` to `end` seconds; `row` 0 is the lane's upper row, 1 the one below. mark:
    what stands in it, where there is room.
    """

    start: float
    end: float
    css: str
    row: int
    hint: str = ""
    mark: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Lane:
    """One worker's stretches."""

    label: str
    segments: Sequence[LaneSegment]


@dataclass(frozen=True, kw_only=True, slots=True)
class Lanes:
    """Lanes over one clock, which shows `start` to `end` seconds."""

    title: str
    x_label: str
    start: float
    end: float
    lanes: Sequence[Lane]


@dataclass(frozen=True, kw_only=True, slots=True)
class Grid:
    """Cells [row][column] between as many things: shade 0 to 1, None for none; marks: (row, column) that stand out."""

    title: str
    labels: Sequence[str]
    shades: Sequence[Sequence[float | None]]
    hints: Sequence[Sequence[str]]
    marks: Collection[tuple[int, int]] = ()


Picture = Chart | Bars | Lanes | Grid


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """Cells as they are shown; the first `names` columns are words and stand to the left."""

    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    names: int = 1


Titled = tuple[str, str, Table]
"""Heading, what the table holds, the table."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Panel:
    """A picture with its heading, its legend (css, text) and the sentences below it; without a picture only those."""

    heading: str
    picture: Picture | None
    keys: Sequence[tuple[str, str]] = ()
    notes: Sequence[str] = ()


def coloured(lines: Mapping[str, Sequence[Point]]) -> list[Polyline]:
    """Lines by name, each in the next colour of a series; without those for which there is none."""
    return [
        Polyline(points=points, css=css, name=name) for css, (name, points) in zip(SERIES, lines.items(), strict=False)
    ]


def chart_panel(chart: Chart, *notes: str, keys: Sequence[tuple[str, str]] | None = None) -> Panel:
    """A chart under its own title. keys: its legend; by default each line under its name."""
    named = [(line.css, line.name) for line in chart.lines] if keys is None else keys
    return Panel(heading=chart.title, picture=chart, keys=named, notes=notes)
