"""When random groups pull replicas together faster than momentum throws them apart.

Disagreement of anchors under NoLoCo's outer step with no inner progress, independent random groups, many workers. For
the state (E phi^2, E phi delta, E delta^2), alpha the momentum, gamma the pull, c = (n-1)/n for groups of n, one round
multiplies by (`isles.replicas.parts.quadratic.disagreement`)

    M = [ 1 - 2 gamma c + gamma^2 c    2 alpha - 2 alpha gamma c    alpha^2 ]
        [ -gamma c + gamma^2 c         alpha - 2 alpha gamma c      alpha^2 ]
        [ gamma^2 c                    -2 alpha gamma c             alpha^2 ]

Replicas stay together exactly if the spectral radius of M is below 1; for pairs that is 0 < gamma < 2 (1 - alpha^2).
The interval printed in the paper (eq. 74) is another one and not the true one. Small worlds forgive more.
"""

from __future__ import annotations

import warnings

import numpy as np

from isles.replicas.parts import quadratic


def matrix(alpha: float, gamma: float, group_size: int = 2) -> np.ndarray:
    """M, (3, 3)."""
    return quadratic.disagreement(alpha, gamma, 1 / group_size)


def radius(alpha: float, gamma: float, group_size: int = 2) -> float:
    """Spectral radius of M: the factor by which the replicas' variance changes per round in the long run."""
    return quadratic.radius(matrix(alpha, gamma, group_size))


def largest_gamma(alpha: float, group_size: int = 2) -> float:
    """The upper end of the stable interval of gamma, by bisection to 1e-9."""
    low, high = 1e-6, 4.0 * group_size
    while high - low > 1e-9:
        middle = (low + high) / 2
        low, high = (middle, high) if radius(alpha, middle, group_size) < 1 else (low, middle)
    return low


def warn_unless_stable(alpha: float, gamma: float, group_size: int) -> None:
    """Warn where replicas drift apart in large worlds."""
    if radius(alpha, gamma, group_size) > 1 - 1e-9:
        warnings.warn(
            f"gamma = {gamma:g} with outer_momentum = {alpha:g} lets replicas drift apart in large worlds: "
            f"choose 0 < gamma < {largest_gamma(alpha, group_size):.3g}",
            stacklevel=3,
        )
