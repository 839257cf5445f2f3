"""NoLoCo on a quadratic, exactly: what the mean does, how far replicas stay apart, when they stay together
(arXiv 2506.10911, section 4 and appendix; the moments below are worked out anew).

One direction of the loss, curvature lambda. Inner step: theta <- theta - omega lambda (theta - c), c ~ N(0, noise^2),
drawn anew by each worker for each step. After m steps from the anchor phi

    Delta = theta - phi = -h phi + xi,   h = 1 - r^m,   r = 1 - omega lambda,
    var xi = (omega lambda noise)^2 (1 - r^(2m)) / (1 - r^2).

Outer step with random pairs, bars for means over the pair (alpha momentum, beta outer rate, gamma pull):

    delta <- alpha delta + beta Delta_bar - gamma (phi - phi_bar),   phi <- phi + delta

Mean over all workers: heavy ball with roots of x^2 - (1 + alpha - beta h) x + alpha; it shrinks exactly if |alpha| < 1
and 0 < beta h < 2 (1 + alpha). Disagreement: averaging over a group keeps the share p of its square on average (pairs
among N workers: p = (N-2) / (2 (N-1)) for even N, 1/2 for odd N and for many). Then (E phi^2, E phi delta, E delta^2)
is multiplied each round by `disagreement`, and beta^2 p var xi adds to all three.

The paper says that the variance goes with omega^2. Exactly, that of the replicas about their mean does, while
m omega lambda is well below 1: its hold is gamma, which does not depend on omega. Beyond that, and for the mean
everywhere, which is held by h alone, the variance goes with omega.

When random groups pull replicas together faster than momentum throws them apart (`warn_unless_stable`): with no inner
progress, independent random groups of n and many workers, c = (n-1)/n, `disagreement` is

    M = [ 1 - 2 gamma c + gamma^2 c    2 alpha - 2 alpha gamma c    alpha^2 ]
        [ -gamma c + gamma^2 c         alpha - 2 alpha gamma c      alpha^2 ]
        [ gamma^2 c                    -2 alpha gamma c             alpha^2 ]

Replicas stay together exactly if the spectral radius of M is below 1; for pairs that is 0 < gamma < 2 (1 - alpha^2).
The interval printed in the paper (eq. 74) is another one and not the true one. Small worlds forgive more.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class Quadratic:
    """The setting. rate: omega. inner_steps: m. workers: 2 or more."""

    alpha: float = 0.5
    beta: float = 0.7
    gamma: float = 0.7
    rate: float = 0.01
    curvature: float = 1.0
    noise: float = 1.0
    inner_steps: int = 50
    workers: int = 16

    def __post_init__(self) -> None:
        for key in ("rate", "curvature"):
            if not 0 < getattr(self, key) < math.inf:
                raise ValueError(f"{key} = {getattr(self, key)}: choose a number above 0")
        if self.rate * self.curvature >= 2:
            raise ValueError(f"rate x curvature = {self.rate * self.curvature:g}: inner steps need it below 2")
        if self.inner_steps < 1:
            raise ValueError(f"inner_steps = {self.inner_steps}: choose 1 or more")
        if self.workers < 2:
            raise ValueError(f"workers = {self.workers}: choose 2 or more")

    @property
    def progress(self) -> float:
        """h: the share of the way to the optimum that m steps take."""
        return 1 - self._left**self.inner_steps

    @property
    def inner_variance(self) -> float:
        """var xi: what the noise of m steps adds to theta."""
        share = (1 - self._left ** (2 * self.inner_steps)) / (1 - self._left**2)
        return (self.rate * self.curvature * self.noise) ** 2 * share

    @property
    def _left(self) -> float:
        return 1 - self.rate * self.curvature


def retained_share(workers: int) -> float:
    """p: the share of the squared disagreement that averaging in random pairs keeps."""
    return 0.5 if workers % 2 else (workers - 2) / (2 * (workers - 1))


def heavy_ball(alpha: float, pull: float) -> np.ndarray:
    """The matrix by which (phi, delta) is multiplied under delta <- alpha delta - pull phi, phi <- phi + delta."""
    return np.array([[1 - pull, alpha], [-pull, alpha]])


def disagreement(alpha: float, gamma: float, retained: float, drift: float = 0.0) -> np.ndarray:
    """The matrix (3, 3) for (E phi^2, E phi delta, E delta^2) of what deviates from the mean. drift: beta h."""
    first = gamma * (1 - retained) + drift * retained
    # phi' = phi + delta', so the rows of phi'^2 and phi' delta' hold that of delta'^2.
    last = [gamma**2 * (1 - retained) + drift**2 * retained, -2 * alpha * first, alpha**2]
    return np.array([[1 - 2 * first, 2 * alpha, 0.0], [-first, alpha, 0.0], [0.0, 0.0, 0.0]]) + np.array(last)


def radius(matrix: np.ndarray) -> float:
    """Spectral radius: the factor a round in the long run."""
    return float(np.abs(np.linalg.eigvals(matrix)).max())


def mean_path(setting: Quadratic, rounds: int) -> np.ndarray:
    """The expected anchor after 0 to `rounds` rounds from 1, (rounds + 1,)."""
    matrix, state, path = heavy_ball(setting.alpha, setting.beta * setting.progress), np.array([1.0, 0.0]), [1.0]
    for _ in range(rounds):
        state = matrix @ state
        path.append(float(state[0]))
    return np.array(path)


@dataclass(frozen=True, slots=True, kw_only=True)
class Variance:
    """In the long run, of the mean over the workers, and of a worker's anchor about that mean; infinite if unstable."""

    mean: float
    replicas: float


def variance(setting: Quadratic) -> Variance:
    """What the variances settle at, exactly."""
    drift, count = setting.beta * setting.progress, setting.workers
    added = setting.beta**2 * setting.inner_variance
    # Of the mean, the same three moments: nobody to disagree with, so averaging keeps all of it.
    together = disagreement(setting.alpha, 0.0, 1.0, drift)
    apart = disagreement(setting.alpha, setting.gamma, retained_share(count), drift)
    return Variance(
        mean=_settled(together, added / count),
        replicas=_settled(apart, added * retained_share(count) * (1 - 1 / count)),
    )


def simulate(setting: Quadratic, rounds: int, *, copies: int = 256, seed: int = 0) -> np.ndarray:
    """Anchors of `copies` independent runs after `rounds` rounds from 0, (copies, workers)."""
    if rounds < 1 or copies < 1:
        raise ValueError(f"rounds = {rounds}, copies = {copies}: choose 1 or more of each")
    random, shape = np.random.default_rng(seed), (copies, setting.workers)
    phi, delta = np.zeros(shape), np.zeros(shape)
    spread, pairs = math.sqrt(setting.inner_variance), setting.workers // 2 * 2
    for _ in range(rounds):
        # Moving the workers about at random makes neighbours random partners.
        order = random.permuted(np.broadcast_to(np.arange(setting.workers), shape), axis=1)
        phi, delta = (np.take_along_axis(values, order, axis=1) for values in (phi, delta))
        change = -setting.progress * phi + spread * random.standard_normal(shape)
        delta = setting.alpha * delta + setting.beta * _averaged(change, pairs)
        delta -= setting.gamma * (phi - _averaged(phi, pairs))
        phi = phi + delta
    return phi


def _averaged(values: np.ndarray, pairs: int) -> np.ndarray:
    means = (values[:, 0:pairs:2] + values[:, 1:pairs:2]) / 2
    return np.concatenate([np.repeat(means, 2, axis=1), values[:, pairs:]], axis=1)


def _settled(matrix: np.ndarray, added: float) -> float:
    if added == 0:
        return 0.0
    if radius(matrix) >= 1:
        return math.inf
    return float(np.linalg.solve(np.eye(3) - matrix, np.full(3, added))[0])


def group_matrix(alpha: float, gamma: float, group_size: int = 2) -> np.ndarray:
    """M, (3, 3)."""
    return disagreement(alpha, gamma, 1 / group_size)


def group_radius(alpha: float, gamma: float, group_size: int = 2) -> float:
    """Spectral radius of M: the factor by which the replicas' variance changes per round in the long run."""
    return radius(group_matrix(alpha, gamma, group_size))


def largest_gamma(alpha: float, group_size: int = 2) -> float:
    """The upper end of the stable interval of gamma, by bisection to 1e-9."""
    low, high = 1e-6, 4.0 * group_size
    while high - low > 1e-9:
        middle = (low + high) / 2
        low, high = (middle, high) if group_radius(alpha, middle, group_size) < 1 else (low, middle)
    return low


def warn_unless_stable(alpha: float, gamma: float, group_size: int) -> None:
    """Warn where replicas drift apart in large worlds."""
    if group_radius(alpha, gamma, group_size) > 1 - 1e-9:
        warnings.warn(
            f"gamma = {gamma:g} with outer_momentum = {alpha:g} lets replicas drift apart in large worlds: "
            f"choose 0 < gamma < {largest_gamma(alpha, group_size):.3g}",
            stacklevel=3,
        )
