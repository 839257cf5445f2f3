"""Loss against steps of asynchronous stages on a quadratic: the delayed recursion of `isles.pipeline.ravnest` itself,
in numpy, many seeds at once.

    w_s <- w_s - lr (A_s w(k - tau) + noise),   tau_s = min(steps since the last drain, S - 1 - s)
    every `every` steps the mean over the clusters, behind a drain

A: random axes, curvatures from 0.01 to 1. Where the rate goes with sqrt(clusters / steps), the theory of such methods
promises a mean squared gradient that falls with 1 / sqrt(clusters x steps).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

DIMENSIONS, STAGES, EVERY = 32, 4, 20
NOISE, RATE = 1.0, 0.8


@dataclass(frozen=True, kw_only=True)
class Course:
    """What is played. stages: 1 has no delay. seeds: how many, at once."""

    clusters: int
    steps: int
    stages: int = STAGES
    every: int = EVERY
    seeds: int = 16

    @property
    def rate(self) -> float:
        """Of learning."""
        return RATE * (self.clusters / self.steps) ** 0.5


def hessian() -> np.ndarray:
    """A, the same for all."""
    axes, _ = np.linalg.qr(np.random.default_rng(0).normal(size=(DIMENSIONS, DIMENSIONS)))
    return (axes * np.geomspace(0.01, 1.0, DIMENSIONS)) @ axes.T


def played(course: Course) -> float:
    """Mean over steps and seeds of the squared gradient at the mean of the clusters' weights."""
    draws, matrix = np.random.default_rng(1), hessian()
    weights = np.ones((course.seeds, course.clusters, DIMENSIONS))
    parts = np.array_split(np.arange(DIMENSIONS), course.stages)
    kept = [weights.copy()]  # the last S versions, the newest last
    total = 0.0
    for step in range(course.steps):
        if step % course.every == 0:
            weights[:] = weights.mean(axis=1, keepdims=True)
            kept = [weights.copy()]
        total += float((((weights.mean(axis=1)) @ matrix) ** 2).sum(axis=1).mean())
        seen = np.empty_like(weights)
        for stage, part in enumerate(parts):
            seen[..., part] = kept[max(0, len(kept) - course.stages + stage)][..., part]
        weights = weights - course.rate * (seen @ matrix + NOISE * draws.normal(size=weights.shape))
        kept = [*kept, weights.copy()][-course.stages :]
    return total / course.steps


def slope(steps: list[int], values: list[float]) -> float:
    """Of the logarithms, by least squares."""
    return float(np.polyfit(np.log(steps), np.log(values), 1)[0])
