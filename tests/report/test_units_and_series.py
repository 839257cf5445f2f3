"""Golden values of the small functions below the report."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isles.report.comparison import _deviation
from isles.report.draw.svg import ChartAxis, linear, logarithmic
from isles.report.panels import average, mean_of_totals, mean_over, quantile, thin
from isles.report.units import (
    compare,
    format_bytes,
    format_number,
    format_percent,
    format_seconds,
    format_short,
    time_unit,
)


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.00 kB"),
        (12_402_112, "12.4 MB"),
        (999_600, "1.00 MB"),
        (2_962_960_800, "2.96 GB"),
        (123e15, "123 PB"),
    ],
)
def test_bytes(count: float, text: str) -> None:
    assert format_bytes(count) == text


def test_trimmed_bytes() -> None:
    assert [format_bytes(n, trim=True) for n in (0, 1e7, 2.5e6, 1e8, 100)] == [
        "0 B",
        "10 MB",
        "2.5 MB",
        "100 MB",
        "100 B",
    ]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (0.042, "42.0 ms"),
        (0.9999, "1.00 s"),
        (8.314, "8.31 s"),
        (252.2, "4 min 12 s"),
        (3599.6, "1 h 0 min"),
        (7380, "2 h 3 min"),
        (3 * 86400 + 4 * 3600, "3 d 4 h"),
        (math.inf, "inf"),
    ],
)
def test_seconds(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


def test_other_forms() -> None:
    assert format_short(1_234_567) == "1.23 million"
    assert format_short(999_900) == "1.00 million"
    assert format_short(2048) == "2,048"
    assert format_number(1.65123) == "1.6512"
    assert format_number(0.00012345) == "1.234e-04"
    assert format_percent(0.9312) == "93.1 %"
    assert compare(1, 37.5) == "37.5 times less than"
    assert compare(3, 2) == "1.50 times more than"
    assert compare(1000, 1001) == "as much as"


def test_thinning_keeps_ends_and_spikes() -> None:
    points = [(float(x), math.sin(x / 50)) for x in range(10_000)]
    points[1234] = (1234.0, 50.0)
    points[4321] = (4321.0, -50.0)
    kept = thin(points, 200)
    assert len(kept) <= 200
    assert kept[0] == points[0]
    assert kept[-1] == points[-1]
    assert points[1234] in kept
    assert points[4321] in kept
    assert kept == sorted(kept)
    assert thin(points[:200], 200) == points[:200]


def test_averaging_keeps_the_mean() -> None:
    points = [(float(x), float(x % 7)) for x in range(1000)]
    small = average(points, 100)
    assert len(small) == 100
    assert sum(y for _, y in small) / 100 == pytest.approx(sum(y for _, y in points) / 1000)


def test_mean_over_workers_that_have_the_step() -> None:
    assert mean_over([[(1.0, 2.0), (2.0, 4.0)], [(2.0, 8.0), (3.0, 1.0)]]) == [(1.0, 2.0), (2.0, 6.0), (3.0, 1.0)]
    assert mean_over([]) == []


def test_a_mean_of_totals_never_goes_back() -> None:
    """One is lost after the second step, another one joins at the third."""
    series = [[(1.0, 4.0), (2.0, 8.0)], [(3.0, 2.0), (4.0, 6.0)]]
    assert mean_of_totals(series) == [(1.0, 2.0), (2.0, 4.0), (3.0, 5.0), (4.0, 7.0)] and mean_of_totals([]) == []


def test_quantile() -> None:
    assert quantile([3.0, 1.0, 2.0], 0.0) == 1.0
    assert quantile([3.0, 1.0, 2.0], 1.0) == 3.0


ranges = st.tuples(st.floats(-1e6, 1e6), st.floats(1e-3, 1e6)).map(lambda r: (r[0], r[0] + r[1]))


@given(ranges)
def test_linear_axis_holds_the_data_with_few_round_ticks(span: tuple[float, float]) -> None:
    low, high = span
    axis = linear(low, high, 6)
    slack = 1e-6 * (high - low)
    assert axis.low <= low + slack
    assert high - slack <= axis.high
    assert 2 <= len(axis.ticks) <= 9
    assert axis.at(axis.low) == 0 and axis.at(axis.high) == 1


def test_axes_of_special_data() -> None:
    assert linear(0.0, 20.0, 6).ticks[0] == 0.0  # no tick below zero when the data start at zero
    assert (linear(0.0, 0.0, 6).low, linear(0.0, 0.0, 6).high) == (0, 1)
    assert linear(5.0, 5.0, 6).low < 5.0 < linear(5.0, 5.0, 6).high
    assert linear(0.0, 3.0, 8, tight=True, whole=True) == ChartAxis([0, 1, 2, 3], 0.0, 3.0)
    assert linear(0.0, 0.7, 8, tight=True).ticks == [0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7]
    assert linear(0.0, 1.0, 8, tight=True, whole=True).ticks == [0, 1]
    assert logarithmic(9.9e6, 2.9e9) == ChartAxis([1e6, 1e7, 1e8, 1e9, 1e10], 1e6, 1e10, log=True)
    assert logarithmic(100.0, 100.0) == ChartAxis([100.0, 1000.0], 100.0, 1000.0, log=True)
    assert logarithmic(3e5, 8e7, tight=True) == ChartAxis([1e6, 1e7], 3e5, 8e7, log=True)
    assert logarithmic(1.5, 9.0, tight=True).ticks == [2.0, 5.0]  # no power of ten in it
    assert logarithmic(10.0, 1000.0).at(100.0) == 0.5


@pytest.mark.parametrize(
    ("seconds", "unit"),
    [
        (0.0, "milliseconds"),
        (0.2, "milliseconds"),
        (8.0, "seconds"),
        (179.0, "seconds"),
        (181.0, "minutes"),
        (1e6, "hours"),
    ],
)
def test_time_unit(seconds: float, unit: str) -> None:
    assert time_unit(seconds)[1] == unit


def test_the_deviation_of_seeds_is_that_of_a_sample() -> None:
    """Of 1, 2 and 3 it is 1: two degrees of freedom."""
    assert _deviation([1.0, 2.0, 3.0]) == 1.0
