"""Independent subnets on quadratics, exactly: where training with divided parameters settles (Shulgin and Richtarik,
ICML 2024, arXiv 2306.16484; corrected where it prints otherwise, and with moments worked out anew).

n workers, f_i(x) = x' L_i x / 2 - b_i' x; bars are means over them, x* = Lbar^-1 bbar, D = diag(Lbar). Each round gives
every worker a sketch C_i (symmetric, positive semidefinite) and takes one step of size gamma:

    x+ = (1/n) sum_i [C_i x - gamma C_i grad f_i(C_i x)] = x - gamma g   where (1/n) sum_i C_i = I
    g  = B x - (1/n) sum_i C_i b_i,    B = (1/n) sum_i C_i L_i C_i

Sketches, all from a random permutation cut into n chunks of q = d / n coordinates:

    scaled    n on the chunk (Perm-q: E C_i = I)
    masks     1 on the chunk, and pieces copied back, not averaged: IST itself, x+ = x - gamma sum_i P_i grad f_i(P_i x)
    whitened  sqrt(n) (L_i)_pp^(-1/2) on the coordinate p of worker i (n = d): B = I for every permutation. The paper
              prints the entry of L_i^(-1/2), for which that does not hold.

With rho = (q-1) / (d-1) the mean settles at

    scaled    (1/n) (D + rho (Lbar - D))^-1 bbar
    masks           (D + rho (Lbar - D))^-1 bbar

so curvature between coordinates of different subnets is ignored in part: the limit is x* for one worker or diagonal
Lbar, and D^-1 bbar for d workers. No step size removes that, unlike the noise of stochastic gradients. Whitened:
E g = Lbar^-1 grad f(x) + h, h = x* - x_inf, x_inf = (1/(n sqrt n)) sum_i D_i^(-1/2) b_i, and exactly

    E f(x+) = f - gamma (1 - gamma/2) |grad f|^2 - gamma (1 - gamma) <grad f, h> + (gamma^2 / 2) (|h|^2 + spread)

norms of grad f by Lbar^-1, of h by Lbar; spread = E |g - E g|^2 by Lbar.

`isles plan explain ist-quadratic` prints it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import permutations
from typing import Literal

import numpy as np

from isles.report.panels import Chart, Panel, Polyline, Table, chart_panel, coloured
from isles.report.sheet import Sheet

Sketch = Literal["scaled", "masks", "whitened"]


@dataclass(frozen=True, kw_only=True)
class Quadratics:
    """curvatures: L_i, (n, d, d), symmetric and positive definite on average. slopes: b_i, (n, d)."""

    curvatures: np.ndarray
    slopes: np.ndarray

    def __post_init__(self) -> None:
        n, d = self.slopes.shape
        if self.curvatures.shape != (n, d, d):
            raise ValueError(f"curvatures of shape {self.curvatures.shape}: for slopes ({n}, {d}) give ({n}, {d}, {d})")
        if d % n:
            raise ValueError(f"{d} coordinates for {n} workers: choose a number of workers that divides them")
        if np.linalg.eigvalsh(self.curvature).min() <= 0:
            raise ValueError("the mean curvature is not positive definite: there is no minimum to speak of")

    @property
    def workers(self) -> int:
        """n."""
        return len(self.slopes)

    @property
    def size(self) -> int:
        """d."""
        return self.slopes.shape[1]

    @property
    def curvature(self) -> np.ndarray:
        """Lbar, (d, d)."""
        return self.curvatures.mean(axis=0)

    @property
    def optimum(self) -> np.ndarray:
        """x*, (d,)."""
        return np.linalg.solve(self.curvature, self.slopes.mean(axis=0))

    def value(self, x: np.ndarray) -> np.ndarray:
        """f at x, (..., d)."""
        return np.einsum("...i,ij,...j->...", x, self.curvature, x) / 2 - x @ self.slopes.mean(axis=0)

    def gradient(self, x: np.ndarray) -> np.ndarray:
        """grad f at x, (..., d)."""
        return x @ self.curvature - self.slopes.mean(axis=0)


def homogeneous(curvature: np.ndarray, slope: np.ndarray, workers: int) -> Quadratics:
    """All workers have the same function."""
    return Quadratics(curvatures=np.tile(curvature, (workers, 1, 1)), slopes=np.tile(slope, (workers, 1)))


def chunks(order: np.ndarray, workers: int) -> np.ndarray:
    """Which worker holds each coordinate, (..., d), for permutations (..., d): the i-th of n equal chunks is i's."""
    owners, size = np.empty_like(order), order.shape[-1]
    np.put_along_axis(owners, order, np.broadcast_to(np.arange(size) * workers // size, order.shape), -1)
    return owners


def sketches(problem: Quadratics, owners: np.ndarray, kind: Sketch) -> np.ndarray:
    """The diagonals of C_i, (..., n, d), for owners (..., d)."""
    n = problem.workers
    mine = owners[..., None, :] == np.arange(n)[:, None]
    if kind == "masks":
        return mine.astype(float)
    if kind == "scaled":
        return n * mine.astype(float)
    if n != problem.size:
        raise ValueError("whitened sketches hold one coordinate each: they need as many workers as coordinates")
    return mine * np.sqrt(n) / np.sqrt(np.diagonal(problem.curvatures, axis1=1, axis2=2))


def one_step(problem: Quadratics, x: np.ndarray, diagonals: np.ndarray, rate: float, kind: Sketch) -> np.ndarray:
    """x+ for x (..., d) and sketches (..., n, d). Pieces under masks are copied back, all others averaged."""
    at = diagonals * x[..., None, :]
    gradients = np.einsum("...ni,nij->...nj", at, problem.curvatures) - problem.slopes
    moved = diagonals * gradients
    if kind == "masks":
        return x - rate * moved.sum(axis=-2)
    retained = x if kind == "whitened" else at.mean(axis=-2)  # whitened sketches are for the gradient alone
    return retained - rate * moved.mean(axis=-2)


def shared(workers: int, size: int) -> float:
    """The paper's rho, the chance that a worker which holds one coordinate holds a given other one too."""
    return 0.0 if size == 1 else (size // workers - 1) / (size - 1)


def seen_curvature(problem: Quadratics) -> np.ndarray:
    """D + rho (Lbar - D), (d, d): the curvature that masks see on average; E B of scaled sketches is n times it."""
    own = np.diag(np.diag(problem.curvature))
    return own + shared(problem.workers, problem.size) * (problem.curvature - own)


def stationary_mean(problem: Quadratics, kind: Sketch) -> np.ndarray:
    """Where the mean of the iterates settles, (d,)."""
    if kind == "whitened":
        own = np.diagonal(problem.curvatures, axis1=1, axis2=2)
        return (problem.slopes / np.sqrt(own)).sum(axis=0) / (problem.workers * math.sqrt(problem.workers))
    settled = np.linalg.solve(seen_curvature(problem), problem.slopes.mean(axis=0))
    return settled if kind == "masks" else settled / problem.workers


def neighbourhood(problem: Quadratics, rate: float, beta: float, spread: float) -> float:
    """What the mean of |grad f|^2 (by Lbar^-1) is bounded by in the long run with whitened sketches (theorem 2):
    (2 (1 - gamma) / beta + gamma) |h|^2 + gamma spread, for 0 < beta < 1/2 and gamma <= (1/2 - beta) / (1/2 + beta).
    The first term does not vanish with gamma.
    """
    most = (0.5 - beta) / (0.5 + beta)
    if not (0 < beta < 0.5 and 0 < rate <= most):
        raise ValueError(f"rate = {rate}, beta = {beta}: choose 0 < beta < 0.5 and 0 < rate <= {most:g}")
    lost = problem.optimum - stationary_mean(problem, "whitened")
    return float((2 * (1 - rate) / beta + rate) * (lost @ problem.curvature @ lost) + rate * spread)


def all_owners(size: int, workers: int) -> np.ndarray:
    """Every way to give the coordinates to the workers, once for each permutation, (size!, size). For small sizes."""
    return chunks(np.array(list(permutations(range(size)))), workers)


def paths(problem: Quadratics, kind: Sketch, *, rate: float, rounds: int, copies: int) -> Iterator[np.ndarray]:
    """The iterates (copies, d) of independent runs from 0 after each of `rounds` rounds."""
    random = np.random.default_rng(0)
    x = np.zeros((copies, problem.size))
    order = np.broadcast_to(np.arange(problem.size), x.shape)
    for _ in range(rounds):
        owners = chunks(random.permuted(order, axis=1), problem.workers)
        x = one_step(problem, x, sketches(problem, owners, kind), rate, kind)
        yield x


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
    chart = Chart(title=title, x_label="workers", lines=lines)
    return chart_panel(chart, "Relative, in the norm of the curvature.")


def _path_panel() -> Panel:
    points = {}
    for workers in (1, 2, 4, 12):
        problem = _problem(workers, _COUPLED)
        means = [x.mean(axis=0) for x in paths(problem, "masks", rate=_RATE, rounds=_ROUNDS, copies=_COPIES)]
        off = [(float(step), _off(problem, x)) for step, x in enumerate([np.zeros(_SIZE), *means])]
        points[f"{workers} worker{'s' if workers > 1 else ''}"] = off
    chart = Chart(title="On the way there", x_label="round", lines=coloured(points), whole_x=True)
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
