"""Long series made short enough to draw: thinning that keeps the spikes, averaging that keeps the trend.

A series is a list of (x, y) points in rising x.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import accumulate

Point = tuple[float, float]


def thin(points: Sequence[Point], limit: int) -> list[Point]:
    """At most about `limit` of the points: the lowest and the highest of each bucket, so no spike is lost.

    The first and the last point always stay.
    """
    if len(points) <= limit:
        return list(points)
    kept = [points[0]]
    for bucket in _buckets(points[1:-1], max(1, (limit - 2) // 2)):
        low, high = min(bucket, key=_y), max(bucket, key=_y)
        kept += [low] if low is high else sorted((low, high))
    kept.append(points[-1])
    return kept


def average(points: Sequence[Point], limit: int) -> list[Point]:
    """At most `limit` points: the mean x and the mean y of each bucket."""
    if len(points) <= limit:
        return list(points)
    return [(_mean(x for x, _ in bucket), _mean(y for _, y in bucket)) for bucket in _buckets(points, limit)]


def mean_over(series: Iterable[Sequence[Point]]) -> list[Point]:
    """The mean of several series at every x that any of them has, over those that have it."""
    sums: dict[float, list[float]] = {}
    for points in series:
        for x, y in points:
            entry = sums.setdefault(x, [0.0, 0.0])
            entry[0] += y
            entry[1] += 1
    return [(x, total / count) for x, (total, count) in sorted(sums.items())]


def latest_of(series: Iterable[Sequence[Point]]) -> list[Point]:
    """The largest of several series at every x that any of them has."""
    found: dict[float, float] = {}
    for points in series:
        for x, y in points:
            found[x] = max(y, found.get(x, y))
    return sorted(found.items())


def rising(points: Sequence[Point]) -> list[Point]:
    """Each y the largest until there: of a mean of meters, which falls only where somebody joins or leaves."""
    tops = accumulate((y for _, y in points), max)
    return [(x, top) for (x, _), top in zip(points, tops, strict=True)]


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


def _y(point: Point) -> float:
    return point[1]


def _mean(values: Iterable[float]) -> float:
    listed = list(values)
    return math.fsum(listed) / len(listed)
