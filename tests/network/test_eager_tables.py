"""The papers' tables, number by number, and what the numbers depend on."""

from dataclasses import replace

import numpy as np
import pytest

from isles.papers import eager as tables
from isles.papers.eager import LayeredJob, bandwidth_for, data_parallel, streaming, utilisation

# Gbit/s for 50, 80, 90, 95, 99 %: table 5 of arXiv 2502.12996, table 4 of arXiv 2501.18512.
PRINTED = """
1B | Data-Parallel | 86.8 152.6 184.2 222.3 569.0
1B | DiLoCo H100 | 1.4 6.2 13.3 23.3 86.8
1B | Streaming | 1.4 5.2 9.1 16.0 28.1
1B | Streaming overlapped bf16 | 1.4 4.3 6.2 9.1 11.0
1B | 1-inner FP4 H30 | 2.4 3.6 4.3 4.3 4.3
1B | 1-inner FP4 H100 | 0.4 0.9 1.7 2.0 3.0
1B | 1-outer FP4 H30 | 1.1 2.0 2.0 2.0 2.4
1B | 1-outer FP4 H100 | 0.1 0.2 0.2 0.2 0.2
10B | Data-Parallel | 104.8 222.3 222.3 268.3 471.5
10B | DiLoCo H100 | 1.7 7.5 16.0 33.9 104.8
10B | Streaming | 1.7 5.2 9.1 13.3 19.3
10B | Streaming overlapped bf16 | 1.7 3.6 5.2 6.2 7.5
10B | 1-inner FP4 H30 | 1.4 2.4 2.4 3.0 3.0
10B | 1-inner FP4 H100 | 0.4 0.9 1.4 1.4 1.7
10B | 1-outer FP4 H30 | 0.7 1.1 1.4 1.4 1.4
10B | 1-outer FP4 H100 | 0.1 0.2 0.2 0.3 0.3
100B | Data-Parallel | 184.2 323.8 390.7 390.7 471.5
100B | DiLoCo H100 | 3.0 11.0 23.3 49.4 184.2
100B | Streaming | 2.4 6.2 9.1 11.0 19.3
100B | Streaming overlapped bf16 | 1.7 3.6 4.3 5.2 5.2
100B | 1-inner FP4 H30 | 0.9 1.7 2.0 2.0 2.0
100B | 1-inner FP4 H100 | 0.5 0.9 1.1 1.1 1.4
100B | 1-outer FP4 H30 | 0.5 0.8 0.9 0.9 0.9
100B | 1-outer FP4 H100 | 0.2 0.3 0.3 0.3 0.4
"""
LONG_RUN = """
1B | 1-inner FP4 H30 | .752 1.63 2.07 2.34 2.66
1B | 1-inner FP4 H100 | .310 .918 1.44 1.90 2.47
1B | 1-outer FP4 H30 | .525 .840 .945 .998 1.040
1B | 1-outer FP4 H100 | .175 .280 .315 .333 .347
10B | 1-inner FP4 H30 | .729 1.25 1.44 1.55 1.70
10B | 1-inner FP4 H100 | .345 .847 1.16 1.37 1.61
10B | 1-outer FP4 H30 | .657 1.050 1.182 1.247 1.300
10B | 1-outer FP4 H100 | .219 .350 .394 .416 .433
100B | 1-inner FP4 H30 | .951 1.52 1.71 1.81 1.89
100B | 1-inner FP4 H100 | .413 .808 .982 1.08 1.20
100B | 1-outer FP4 H30 | .953 1.525 1.715 1.811 1.887
100B | 1-outer FP4 H100 | .318 .508 .572 .603 .629
"""


def rows_of(text):
    cut = [line.split(" | ") for line in text.strip().splitlines()]
    return {(size, name): [float(cell) for cell in cells.split()] for size, name, cells in cut}


def cells(made):
    return {(need.size, need.method): [tables.as_printed(value) for value in need.gbps] for need in made}


def test_all_120_cells_of_table_5():
    assert cells(tables.table5()) == rows_of(PRINTED)


def same_cells():
    mine, theirs = cells(tables.table5()), rows_of(PRINTED)
    return sum(a == b for key in theirs for a, b in zip(mine[key], theirs[key], strict=True))


def test_the_factor_on_the_step_time_matters(monkeypatch):
    monkeypatch.setattr(tables, "STEP_FACTOR", 1.0)
    assert same_cells() == 21


def test_the_order_of_the_fragments_matters(monkeypatch):
    def ascending(method):
        def make(job):
            made = method.printed(job)
            return replace(made, fragments=made.fragments[::-1])

        return replace(method, printed=make)

    monkeypatch.setattr(tables, "METHODS", tuple(map(ascending, tables.METHODS)))
    assert same_cells() == 118


def test_spots_of_figure_3():
    by_name = {method.name: method for method in tables.METHODS}
    wanted = {
        "1B": (0.0071, 0.0317, 0.5236, 0.9127),
        "10B": (0.0057, 0.0254, 0.4389, 0.7932),
        "100B": (0.0035, 0.0156, 0.2867, 0.5476),
    }
    for size, spots in wanted.items():
        share = tables.curve(by_name["Data-Parallel"], tables.JOBS[size])
        assert share[[12, 20, 36, 40]] == pytest.approx(spots, abs=6e-5)
        inner = tables.curve(by_name["1-inner FP4 H100"], tables.JOBS[size])
        assert inner[12] == pytest.approx({"1B": 0.8079, "10B": 0.8376, "100B": 0.8873}[size], abs=6e-5)
        assert inner[20] == pytest.approx(1.0, abs=1e-9)


@pytest.mark.long
def test_long_run_needs():
    made = {(need.size, need.method): need.gbps for need in tables.long_run()}
    for key, wanted in rows_of(LONG_RUN).items():
        assert made[key] == pytest.approx(wanted, rel=0.01), key


def test_table_1():
    hours = {
        "Data-Parallel": (109, 438, 1097),
        "1-inner FP4 H100": (0.88, 3.5, 8.75),
        "1-outer FP4 H100": (0.67, 2.7, 6.75),
    }
    made = tables.table1()
    for method, wanted in hours.items():
        rows = [row for row in made if row.method == method]
        volume = (441, 1767, 4418) if method == "Data-Parallel" else (1.10, 4.42, 11.05)
        assert [row.hours_1gbps for row in rows] == pytest.approx(wanted, rel=0.02)
        assert [row.hours_unlimited for row in rows] == pytest.approx((0.67, 2.7, 6.75), rel=0.02)
        assert [row.terabytes for row in rows] == pytest.approx(volume, rel=0.003)


def test_table_2():
    assert [round(seconds, 9) for _, seconds in tables.table2()] == [0, 0.08, 2.4, 4.8]


def on_grid(job, exchanges, target, steps=201):
    share = utilisation(job, exchanges, tables.GRID * 1e9, steps=steps)
    return tables.as_printed(tables.GRID[(share >= target).argmax()])


def test_further_statements_of_the_streaming_paper():
    """More overlap than a few steps brings nothing; strided beats sequential; larger models of others."""
    job = tables.scaled(tables.JOBS["100B"])
    for tau, wanted in {0: [2.0, 5.2], 1: [1.1, 1.4], 2: [0.7, 0.8], 3: [0.7, 0.7], 10: [0.7, 0.7]}.items():
        made = streaming(108, 100, bits=4, overlap=tau)
        assert [on_grid(job, made, target, steps=401) for target in (0.9, 0.99)] == wanted
    sequential = tuple((first + 2, first + 1, first) for first in range(0, 108, 3))  # the first layers first
    made = replace(streaming(108, 100), fragments=sequential)
    assert [on_grid(job, made, target) for target in tables.TARGETS] == [2.4, 7.5, 11.0, 16.0, 33.9]
    deepseek = LayeredJob(parameters=671e9, layers=61, step_seconds=20.1)
    assert on_grid(deepseek, streaming(61, 100, bits=4, overlap=1), 0.99) == 4.3
    assert on_grid(deepseek, data_parallel(61), 0.95) == 828.6
    llama = LayeredJob(parameters=405e9, layers=126, step_seconds=26.9)
    assert on_grid(llama, streaming(126, 100, bits=4, overlap=1), 0.99) == 0.9
    assert on_grid(llama, data_parallel(126), 0.99) == 390.7


def test_printed_needs_of_the_outer_rows_are_below_what_the_link_must_carry():
    """Half of their traffic was still under way when the simulation ended."""
    job = tables.scaled(tables.JOBS["100B"])
    need = bandwidth_for([0.99], job, streaming(108, 100, bits=4, overlap=100))[0] / 1e9
    assert np.isclose(need, 0.629, rtol=0.01) and need > 1.5 * 0.4
