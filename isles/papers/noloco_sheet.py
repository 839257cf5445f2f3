"""Sheets of NoLoCo's models of waiting and of its theory: `isles plan explain noloco-...`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace

import numpy as np

from isles.papers.noloco import StepLaw, pair_seconds, ratios, swap_seconds, two_shot_seconds, waiting
from isles.replicas.parts.quadratic import Quadratic, heavy_ball, mean_path, simulate, variance
from isles.replicas.parts.quadratic import radius as radius_of
from isles.replicas.parts.stability import largest_gamma, radius
from isles.report.charts import short
from isles.report.panels import Chart, Panel, Point, Polyline, Table, chart_panel, coloured
from isles.report.sheet import Sheet

_CVS = (0.0, 0.5, 1.0, 2.0, 2.5)
_WORKERS = (4, 16, 64, 256, 1024)
_TREES = 16_000
_SHOTS = 2000
_CROWDS = (2, 4, 16, 64, 256, 1024, 10_000, 100_000)
_INNER_STEPS = (1, 10, 50, 100)
_ROUNDS = 100
_MOMENTA = (0.0, 0.3, 0.5, 0.7, 0.9)
_PAPER = "arXiv 2506.10911"


def latency() -> Sheet:
    """How many times longer an all-reduce over a tree takes than an exchange of pairs."""
    table = {cv: ratios(list(_WORKERS), cv, _TREES) for cv in _CVS}
    shots = {
        cv: [float(two_shot_seconds(count, cv, _SHOTS).mean()) / swap_seconds(cv) for count in _WORKERS] for cv in _CVS
    }
    error = max(row.standard_error / row.ratio for rows in table.values() for row in rows)
    lines = {f"cv {cv:g}": [(row.workers, row.ratio) for row in rows] for cv, rows in table.items()}
    own = {f"cv {cv:g}": _points(_WORKERS, row) for cv, row in shots.items()}
    return Sheet(
        name="noloco-latency",
        title="All-reduce over a tree against an exchange in pairs",
        subtitle=f"Section 5.3 of {_PAPER}: log-normal message times, cv = standard deviation / mean",
        what=f"Ratios of mean times; standard errors of those of the tree are at most {error:.1%}.",
        table=Table(
            heads=["compared", "cv", *(f"{count} workers" for count in _WORKERS)],
            rows=[
                *(["tree / pair", f"{cv:g}", *(f"{row.ratio:.2f}" for row in rows)] for cv, rows in table.items()),
                *(["two-shot / swap", f"{cv:g}", *(f"{ratio:.2f}" for ratio in row)] for cv, row in shots.items()),
            ],
            names=2,
        ),
        data={
            "rows": [
                {"cv": cv, **asdict(row), "two_shot_per_swap": shot}
                for cv, rows in table.items()
                for row, shot in zip(rows, shots[cv], strict=True)
            ],
            "pair_mean": {f"{cv:g}": pair_seconds(cv) for cv in _CVS},
        },
        panels=[
            _panel("Tree / pair, as in the paper", "workers", lines, log_x=True),
            _panel("Two-shot mean / swap of a pair, as in Isles", "workers", own, log_x=True),
        ],
        notes=[
            "Only the times of messages count: no bandwidth, no sizes, equal workers, and both partners ready at once. "
            "With slow uplinks the bytes decide, and a pair sends as many as a worker of an all-reduce.",
            "Isles takes means in two shots, not over a tree: two message times in a row for any number of workers, "
            "each the longest of many; and its pairs swap at once, one message time where the paper counts two.",
        ],
    )


def barrier() -> Sheet:
    """Waiting for all against waiting for a partner."""
    runs = {
        count: [waiting(workers, StepLaw(count=count), rounds=_ROUNDS) for workers in _CROWDS] for count in _INNER_STEPS
    }
    by_crowd = {f"H = {count}": [(run.workers, run.ratio) for run in row] for count, row in runs.items()}
    shown = [workers for workers in _CROWDS if workers >= 16]
    by_steps = {
        f"{workers:,} workers": [(count, row[_CROWDS.index(workers)].ratio) for count, row in runs.items()]
        for workers in shown
    }
    return Sheet(
        name="noloco-barrier",
        title="Waiting for all against waiting for a partner",
        subtitle=f"Section 5.3 of {_PAPER}: a step takes exp(1 + sqrt(0.5) z) seconds, messages take none",
        what=f"Time of {_ROUNDS} rounds of H steps if all wait for the slowest / if each waits for a random partner.",
        table=Table(
            heads=["workers", *(f"H = {count}" for count in _INNER_STEPS)],
            rows=[
                [str(workers), *(f"{row[position].ratio:.2f}" for row in runs.values())]
                for position, workers in enumerate(_CROWDS)
            ],
        ),
        data={"rows": [{**asdict(run), "ratio": run.ratio} for row in runs.values() for run in row]},
        panels=[
            _panel("All / partner, by workers", "workers", by_crowd, log_x=True),
            _panel("All / partner, by inner steps", "inner steps", by_steps, [f"{n:,}" for n in shown], log_x=True),
        ],
        notes=[
            "One draw of the step times. A round of pairs ends when the last worker is through; the mean worker is "
            "a little earlier (in the JSON).",
            "Every step of every worker is drawn anew. Workers that are always slow make everybody slow in time, in "
            "pairs too.",
        ],
    )


def quadratic() -> Sheet:
    """The theory: the mean, the variance against the learning rate, the stability region."""
    rows = []
    for alpha in _MOMENTA:
        top = largest_gamma(alpha)
        gammas = np.linspace(0, top, 301)[1:-1]
        found = [radius(alpha, float(gamma)) for gamma in gammas]
        best = int(np.argmin(found))
        # Equation 74 of the paper for groups of two.
        rows.append((alpha, top, float(gammas[best]), found[best], alpha, math.sqrt(2 + alpha * alpha)))
    keys = ("alpha", "stable_below", "fastest_gamma", "radius", "paper_from", "paper_to")
    return Sheet(
        name="noloco-quadratic",
        title="NoLoCo on a quadratic: mean, variance, stability",
        subtitle=f"Section 4 of {_PAPER}, with exact moments in place of its bounds",
        what="Pairs, many workers, no inner progress: replicas come together for gamma from 0 to `stable below`.",
        table=Table(
            heads=["alpha", "stable below", "fastest gamma", "factor a round", "paper from", "paper to"],
            rows=[[f"{row[0]:g}", *(f"{value:.2f}" for value in row[1:])] for row in rows],
        ),
        data={"rows": [dict(zip(keys, row, strict=True)) for row in rows]},
        panels=[_mean_panel(), _variance_panel(), _region_panel(), _radius_panel()],
        notes=[
            "The paper's interval for gamma (its equation 74) is not the stable one: at alpha = 0.9 it is unstable "
            "throughout. A small gamma is slow, not unstable.",
            "That the variance goes with the rate squared holds for the replicas about their mean, while inner steps x "
            "rate x curvature is well below 1; the variance of the mean goes with the rate itself.",
        ],
    )


def _mean_panel() -> Panel:
    lines, keys = {}, []
    for rate in (0.001, 0.01, 0.1):
        setting = Quadratic(rate=rate)
        factor = radius_of(heavy_ball(setting.alpha, setting.beta * setting.progress))
        lines[f"rate {rate:g}"] = _points(range(31), mean_path(setting, 30))
        keys.append(f"rate {rate:g} (x {factor:.3f} a round)")
    heading = "Mean over the workers, from 1"
    return _panel(heading, "outer round", lines, keys, "alpha 0.5, beta 0.7, 50 inner steps, curvature 1.")


def _variance_panel() -> Panel:
    base = Quadratic()
    rates = np.logspace(-4, -0.3, 60).tolist()
    settled = [variance(replace(base, rate=rate)) for rate in rates]
    dots = []
    for rate in (0.003, 0.01, 0.03, 0.1, 0.3):
        phi = simulate(replace(base, rate=rate), rounds=math.ceil(100 / (50 * rate)) + 60)
        dots.append((rate, float(((phi - phi.mean(axis=1, keepdims=True)) ** 2).mean())))
    chart = Chart(
        title="Variance against the inner learning rate",
        x_label="inner learning rate",
        x_format=lambda rate: f"{rate:g}",
        y_format=lambda value: f"{value:.0e}",
        lines=[
            Polyline(
                points=_points(rates, [v.replicas for v in settled]), css="series0", name="spread of the replicas"
            ),
            Polyline(points=_points(rates, [v.mean for v in settled]), css="series2", name="of their mean"),
            Polyline(
                points=[(r, settled[0].replicas * (r / rates[0]) ** 2) for r in rates], css="ddp", name="rate squared"
            ),
        ],
        dots=dots,
        top=max(v.replicas for v in settled) * 3,
        log_x=True,
        log_y=True,
    )
    keys = [
        ("series0", "of a replica about the mean"),
        ("dot", "simulated"),
        ("series2", "of the mean"),
        ("ddp", "rate²"),
    ]
    note = "16 workers, alpha 0.5, beta = gamma = 0.7, 50 inner steps, curvature and noise 1."
    return chart_panel(chart, note, keys=keys)


def _region_panel() -> Panel:
    alphas = np.linspace(0, 0.99, 100)
    lines = [
        Polyline(points=_points(alphas, [largest_gamma(float(a)) for a in alphas]), css="series0", name="stable below"),
        Polyline(points=_points(alphas, np.sqrt(2 + alphas**2)), css="series3", name="paper, upper end"),
        Polyline(points=_points(alphas, alphas), css="series4", name="paper, lower end"),
    ]
    chart = Chart(
        title="Which gamma keeps replicas together",
        x_label="outer momentum alpha",
        y_format=short,
        lines=lines,
        dots=[(0.5, 0.7)],
    )
    keys = [("series0", "stable below"), ("series3", "paper: below"), ("series4", "paper: above"), ("dot", "default")]
    return chart_panel(chart, "Pairs among many workers, no inner progress.", keys=keys)


def _radius_panel() -> Panel:
    gammas = np.linspace(0.005, 2, 200)
    lines = {f"alpha {alpha:g}": _points(gammas, [radius(alpha, float(g)) for g in gammas]) for alpha in _MOMENTA}
    note = "Below 1 they come together; above it they drift apart."
    return _panel("Variance between replicas, factor a round", "gamma", lines, note=note, top=2.0)


def _panel(
    heading: str,
    x_label: str,
    lines: Mapping[str, Sequence[Point]],
    keys: Iterable[str] | None = None,
    note: str = "",
    *,
    log_x: bool = False,
    top: float | None = None,
) -> Panel:
    """keys: of the lines in the legend, where those are not their names."""
    chart = Chart(title=heading, x_label=x_label, y_format=short, lines=coloured(lines), log_x=log_x, top=top)
    named = [(line.css, key) for line, key in zip(chart.lines, keys or lines, strict=True)]
    return chart_panel(chart, *([note] if note else []), keys=named)


def _points(xs: Sequence[float] | np.ndarray | range, ys: Sequence[float] | np.ndarray) -> list[Point]:
    return [(float(x), float(y)) for x, y in zip(xs, ys, strict=True)]
