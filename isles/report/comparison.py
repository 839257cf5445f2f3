"""The page of several runs: one table, and their losses on common axes against steps, bytes and time."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from isles.report.charts import MEAN_POINTS, figure
from isles.report.page import document
from isles.report.rundir import Run, read_run
from isles.report.series import Point, average, mean_over
from isles.report.svg import Chart, Line
from isles.report.units import format_bytes, format_number, format_percent, format_seconds

COLOURS = 8  # css classes series0..series7; more runs than that share them

# Key of summary.json, head of the column, form.
COLUMNS: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("val_loss", "validation loss", lambda value: f"{value:.4f}"),
    ("val_loss_replicas", "mean of replicas", lambda value: f"{value:.4f}"),
    ("replica_std", "spread of replicas", format_number),
    ("tokens", "tokens", lambda value: f"{value:,.0f}"),
    ("bytes_sent_per_worker", "sent per worker", format_bytes),
    ("compute_utilisation", "computing", format_percent),
    ("train_seconds", "training", format_seconds),
    ("virtual_seconds", "virtual time", format_seconds),
)


def write_comparison(folder: Path, runs: dict[str, list[Path]]) -> Path:
    """Write `folder`/report.html over the finished runs of each label (one a seed) and return its path."""
    read = {label: [read_run(path) for path in paths] for label, paths in runs.items()}
    page, unfinished = folder / "report.html", folder / f"report.html.{os.getpid()}"
    unfinished.write_text(render_comparison(read), encoding="utf-8")
    os.replace(unfinished, page)
    return page


def comparison_rows(summaries: dict[str, list[dict[str, Any]]]) -> tuple[list[str], list[list[str]]]:
    """Heads and rows of the table: means over each label's runs, losses with their standard deviation over seeds."""
    present = [c for c in COLUMNS if any(s.get(c[0]) is not None for group in summaries.values() for s in group)]
    rows = []
    for label, group in summaries.items():
        cells = [label]
        for key, _, form in present:
            values = [float(summary[key]) for summary in group if summary.get(key) is not None]
            text = form(math.fsum(values) / len(values)) if values else "-"
            if len(values) > 1 and key.startswith("val_loss"):
                text += f" ± {_deviation(values):.4f}"
            cells.append(text)
        rows.append(cells)
    return ["method", *(head for _, head, _ in present)], rows


def render_comparison(runs: dict[str, list[Run]]) -> str:
    """The whole page as text."""
    heads, rows = comparison_rows({label: [run.summary or {} for run in group] for label, group in runs.items()})
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    head = "".join(f"<th>{escape(text)}</th>" for text in heads)
    seeds = max((len(group) for group in runs.values()), default=0)
    what = f"mean of {seeds} seeds, ± the standard deviation over them" if seeds > 1 else "one seed"
    table = (
        f'<section><h2>Summary</h2><p class="sub">{what}</p><table class="wide"><tr>{head}</tr>{body}</table></section>'
    )
    charts = [
        _chart(runs, "Loss against steps", "inner step", lambda run: _losses(run, None)),
        _chart(runs, "Loss against bytes", "MB sent per worker", lambda run: _losses(run, "bytes")),
    ]
    return document(f"{len(runs)} methods compared", ", ".join(runs), table + "".join(charts))


def _chart(runs: dict[str, list[Run]], title: str, x_label: str, points_of: Callable[[Run], list[Point]]) -> str:
    lines, keys = [], []
    for index, (label, group) in enumerate(runs.items()):
        points = average(points_of(group[0]), MEAN_POINTS)
        if points:
            css = f"series{index % COLOURS}"
            lines.append(Line(points=points, css=css, name=f"{label}: {points[-1][1]:.4f} at the end"))
            keys.append((css, label))
    if not lines:
        return ""
    highest = [y for line in lines for _, y in _after_start(line.points)]
    chart = Chart(title=title, x_label=x_label, y_format=lambda y: f"{y:.4g}", lines=lines, top=max(highest))
    return figure(title, chart.svg(), keys, ["Training loss, mean over the workers, of the first seed."])


def _losses(run: Run, against: str | None) -> list[Point]:
    """Mean training loss over the workers by step, or by megabytes sent until then."""
    loss = mean_over([sorted((float(s), v) for s, v in log.loss.items()) for log in run.workers.values()])
    if against is None:
        return loss
    sent = dict(mean_over([sorted((float(s), v) for s, v in log.bytes_sent.items()) for log in run.workers.values()]))
    return [(sent[step] / 1e6, value) for step, value in loss if step in sent]


def _after_start(points: Sequence[Point]) -> Sequence[Point]:
    """Without the first twentieth, whose fall would press the rest onto the floor."""
    return points[len(points) // 20 :] or points


def _deviation(values: Sequence[float]) -> float:
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))
