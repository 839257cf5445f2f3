"""Sheets of the Eager and Streaming DiLoCo papers' tables: `isles plan explain eager-...`."""

from __future__ import annotations

import math
from dataclasses import asdict

from isles.papers import eager as tables
from isles.report.panels import Chart, Panel, Table, chart_panel, coloured
from isles.report.sheet import Sheet

_FINITE = (
    "As printed: the papers counted about two rounds that began with an idle link, and left out what was still under "
    "way at the end. In the long run a link must carry everything: see isles plan explain eager-long-run.",
    f"Step times are {tables.STEP_FACTOR} times those stated (0.1, 0.8, 4.9 s): only so are all 120 numbers met.",
    "The H30 rows exchange a fragment after every step, whatever the number of fragments, as the papers' must have.",
    "Between two bandwidths of the grid lie 21 %: finer differences mean nothing. No latency, two equal islands.",
)
_LONG = (
    "The same model in the long run: everything that is sent must arrive, and a fragment leaves every round(H / P) "
    f"steps. Step times as in table 5 ({tables.STEP_FACTOR} times those stated): for those stated, multiply by "
    f"{tables.STEP_FACTOR}.",
)


def table5_sheet() -> Sheet:
    """Bandwidth for a utilisation, as printed, and Figure 3."""
    rows = tables.table5()
    return _needs(
        "eager-table5",
        "Bandwidth that a utilisation needs, as printed",
        "Table 5 and Figure 3 of arXiv 2502.12996, table 4 of arXiv 2501.18512",
        [(row, [tables.as_printed(value) for value in row.gbps]) for row in rows],
        [_figure3(size) for size in tables.JOBS],
        _FINITE,
        digits=".1f",
    )


def long_run_sheet() -> Sheet:
    """The same need in the long run."""
    rows = [(row, [float(f"{value:.4g}") for value in row.gbps]) for row in tables.long_run()]
    return _needs(
        "eager-long-run",
        "Bandwidth that a utilisation needs, in the long run",
        "The methods of arXiv 2502.12996 and arXiv 2501.18512 with the schedules that they describe",
        rows,
        [],
        _LONG,
        digits=".3f",
    )


def table1_sheet() -> Sheet:
    """Hours and terabytes."""
    rows = tables.table1()
    return Sheet(
        name="eager-table1",
        title="Hours and terabytes over 1 Gbit/s, 1B model",
        subtitle="Table 1 of arXiv 2502.12996: H = 100, 4 bits a parameter except data parallel (16)",
        what="Time over an unlimited link, over 1 Gbit/s, and what one of the two workers sends.",
        table=Table(
            heads=["method", "tokens", "hours, unlimited", "hours, 1 Gbit/s", "TB"],
            rows=[
                [row.method, f"{row.tokens / 1e9:.0f}e9"]
                + [f"{value:.2f}" for value in (row.hours_unlimited, row.hours_1gbps, row.terabytes)]
                for row in rows
            ],
        ),
        data={"rows": [{"size": "1B", **asdict(row)} for row in rows]},
        notes=[
            "Steps of 0.1 s as stated, in the long run. The tokens of a step "
            f"({tables.TOKENS_A_STEP / 1e6:.3g} million) follow from the printed hours; the bytes of a token "
            f"({tables.BYTES_A_TOKEN / 1e3:.2f} kB) from the printed volumes.",
            "The two do not fit together: 2 bytes a parameter after every step would be a ninth of these volumes. "
            "Ratios between methods hold either way.",
        ],
    )


def table2_sheet() -> Sheet:
    """Tolerated latency."""
    rows = tables.table2()
    return Sheet(
        name="eager-table2",
        title="Latency that an overlap tolerates",
        subtitle="Table 2 of arXiv 2502.12996: 500M model, steps of 0.08 s, H = 30",
        what="Seconds that an exchange may take from the end of a step before anyone waits: overlapped steps x 0.08 s.",
        table=Table(heads=["overlap", "seconds"], rows=[[name, f"{seconds:.2f}"] for name, seconds in rows]),
        data={"rows": [{"overlap": name, "tolerated_seconds": round(seconds, 9)} for name, seconds in rows]},
    )


def _needs(
    name: str,
    title: str,
    subtitle: str,
    rows: list[tuple[tables.Need, list[float]]],
    panels: list[Panel],
    notes: tuple[str, ...],
    *,
    digits: str,
) -> Sheet:
    percents = [f"{100 * target:.0f}" for target in tables.TARGETS]
    return Sheet(
        name=name,
        title=title,
        subtitle=subtitle,
        what="Gbit/s between two islands for a share of the time spent computing.",
        table=Table(
            heads=["size", "method", *(f"{percent} %" for percent in percents)],
            rows=[
                [row.size, row.method, *("-" if math.isnan(v) else f"{v:{digits}}" for v in values)]
                for row, values in rows
            ],
            names=2,
        ),
        data={
            "rows": [
                {
                    "size": row.size,
                    "method": row.method,
                    "bandwidth_gbps": {
                        percent: None if math.isnan(value) else value
                        for percent, value in zip(percents, values, strict=True)
                    },
                }
                for row, values in rows
            ]
        },
        panels=panels,
        notes=notes,
    )


def _figure3(size: str) -> Panel:
    job = tables.JOBS[size]
    grid, curves = tables.GRID.tolist(), {method.name: tables.curve(method, job).tolist() for method in tables.METHODS}
    chart = Chart(
        title=f"Utilisation of the {size} model",
        x_label="Gbit/s between the islands",
        y_format=lambda share: f"{100 * share:.0f} %",
        lines=coloured({name: list(zip(grid, curve, strict=True)) for name, curve in curves.items()}),
        log_x=True,
    )
    return chart_panel(chart, f"{job.layers} layers, steps of {tables.scaled(job).step_seconds:.3g} s.")
