"""The sheet of the theory of independent subnets: `isles plan explain ist-quadratic`."""

from __future__ import annotations

import numpy as np

from isles.network.theory.ist_theory import (
    Quadratics,
    all_owners,
    homogeneous,
    neighbourhood,
    one_step,
    paths,
    shared,
    sketches,
    stationary_mean,
)
from isles.report.charts import short
from isles.report.panels import Chart, Panel, Polyline, Table, chart_panel, coloured
from isles.report.sheet import Sheet

_SIZE = 12
_WORKERS = (1, 2, 3, 4, 6, 12)
_COUPLINGS = (0.0, 0.2, 0.5, 0.8)
_COUPLED = 0.5  # of the table and the paths
_RATE = 0.1
_ROUNDS, _COPIES, _BURN_IN = 60, 400, 300
_RATES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.33)
_PAPER = "arXiv 2306.16484"


def quadratic() -> Sheet:
    """Where training with divided parameters settles, by workers, coupling and step size."""
    rows = []
    for workers in _WORKERS:
        problem = _problem(workers, _COUPLED)
        limit = stationary_mean(problem, "masks")
        last = list(paths(problem, "masks", rate=_RATE, rounds=_BURN_IN, copies=_COPIES))[-1]
        rows.append(
            {
                "workers": workers,
                "coordinates_each": _SIZE // workers,
                "rho": shared(workers, _SIZE),
                "off_optimum": _off(problem, limit),
                "off_optimum_simulated": _off(problem, last.mean(axis=0)),
                "above_minimum": float(problem.value(limit) - problem.value(problem.optimum)),
                "above_minimum_with_noise": float(problem.value(last).mean() - problem.value(problem.optimum)),
            }
        )
    heads = ["workers", "coordinates each", "rho", "off the optimum", "simulated", "f above", "f above, with noise"]
    return Sheet(
        name="ist-quadratic",
        title="Independent subnets on a quadratic: where they settle",
        subtitle=f"After {_PAPER}, with exact stationary means: d = {_SIZE}, all workers on the same quadratic, "
        "permuted 0/1 masks, one local step a round",
        what=f"Coupling {_COUPLED:g} between any two coordinates, step size {_RATE:g}; |x - x*| / |x*| in the norm of "
        f"the curvature; simulated: mean of {_COPIES} runs after {_BURN_IN} rounds.",
        table=Table(
            heads=heads,
            rows=[
                [f"{value:.3f}" if isinstance(value, float) else str(value) for value in row.values()] for row in rows
            ],
        ),
        data={"coupling": _COUPLED, "rate": _RATE, "rows": rows},
        panels=[_off_panel(), _path_panel(), _floor_panel()],
        notes=[
            "A subnet does not see the curvature between its coordinates and those of others, so the mean settles off "
            "the optimum: more so with more workers and more coupling. A smaller step does not mend it.",
            "With one coordinate each nothing of the coupling is seen, and the limit is that of its diagonal. Networks "
            "are no quadratics: this says what kind of error to expect, not how large it is.",
        ],
    )


def _problem(workers: int, coupling: float) -> Quadratics:
    """Curvature 1 on the diagonal and `coupling` elsewhere; a slope of both signs."""
    curvature = (1 - coupling) * np.eye(_SIZE) + coupling
    return homogeneous(curvature, np.cos(np.arange(_SIZE)) + 0.5, workers)


def _off(problem: Quadratics, x: np.ndarray) -> float:
    away, whole = x - problem.optimum, problem.optimum
    return float(np.sqrt((away @ problem.curvature @ away) / (whole @ problem.curvature @ whole)))


def _off_panel() -> Panel:
    points = {}
    for coupling in _COUPLINGS:
        problems = [_problem(workers, coupling) for workers in _WORKERS]
        off = [(float(p.workers), _off(p, stationary_mean(p, "masks"))) for p in problems]
        points[f"coupling {coupling:g}"] = off
    title, lines = "Distance of the limit from the optimum", coloured(points)
    chart = Chart(title=title, x_label="workers", y_format=short, lines=lines)
    return chart_panel(chart, "Relative, in the norm of the curvature.")


def _path_panel() -> Panel:
    points = {}
    for workers in (1, 2, 4, 12):
        problem = _problem(workers, _COUPLED)
        means = [x.mean(axis=0) for x in paths(problem, "masks", rate=_RATE, rounds=_ROUNDS, copies=_COPIES)]
        off = [(float(step), _off(problem, x)) for step, x in enumerate([np.zeros(_SIZE), *means])]
        points[f"{workers} worker{'s' if workers > 1 else ''}"] = off
    chart = Chart(title="On the way there", x_label="round", y_format=short, lines=coloured(points), whole_x=True)
    return chart_panel(chart, f"Mean of {_COPIES} runs, coupling {_COUPLED:g}, step size {_RATE:g}.")


def _floor_panel() -> Panel:
    """Whitened sketches, one coordinate each: what is left of the gradient, by step size."""
    wide = np.sqrt([1.0, 2.0, 3.0, 4.0])
    curvature = ((1 - _COUPLED) * np.eye(4) + _COUPLED) * wide[:, None] * wide
    slopes = 2 * np.cos(np.arange(16).reshape(4, 4)) + 0.5  # equal ones would leave no noise
    problem = Quadratics(curvatures=np.tile(curvature, (4, 1, 1)), slopes=slopes)
    settled = stationary_mean(problem, "whitened")
    every = sketches(problem, all_owners(4, 4), "whitened")
    apart = one_step(problem, np.broadcast_to(settled, (len(every), 4)), every, 1.0, "whitened") - settled
    noise = float(np.einsum("pi,ij,pj->p", apart, curvature, apart).mean())
    gradient = problem.gradient(settled)
    floor = float(gradient @ np.linalg.solve(curvature, gradient))
    dots = []
    for rate in _RATES:
        last = list(paths(problem, "whitened", rate=rate, rounds=round(8 / rate), copies=_COPIES))[-1]
        left = problem.gradient(last)
        dots.append((rate, float(np.einsum("pi,ij,pj->p", left, np.linalg.inv(curvature), left).mean())))
    lines = [
        Polyline(
            points=[(rate, neighbourhood(problem, rate, 0.25, noise)) for rate in _RATES],
            css="series0",
            name="theorem 2",
        ),
        Polyline(points=[(rate, floor) for rate in _RATES], css="series3", name="step size to 0"),
    ]
    chart = Chart(
        title="What smaller steps cannot mend",
        x_label="step size",
        x_format=lambda rate: f"{rate:g}",
        y_format=short,
        lines=lines,
        dots=dots,
        log_x=True,
    )
    return chart_panel(
        chart,
        "Mean squared gradient in the long run: 4 coordinates of curvatures 1 to 4, whitened sketches, workers "
        "with slopes of their own: the noise goes with the step size, the rest stays.",
        keys=[("series0", "bound of theorem 2"), ("dot", "simulated"), ("series3", "for steps to 0")],
    )
