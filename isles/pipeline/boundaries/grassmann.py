"""Turning the subspace of a boundary towards what the loss asks for (Protocol Models; off unless asked for).

    M = sum over tokens of g g^T       g (D,): gradient of the stream behind the last boundary, before it is projected
    loss(U) = tr M - tr(U^T M U)       what of those gradients lies outside S
    U <- qr(U + 2 rate / |M|_2 (1 - U U^T) M U)

The minimum is the sum of the D - K smallest eigenvalues of M. What is held in coordinates (weights, moments, anchors,
messages under way) stays as it is and so turns with U, by one and the same rotation.
"""

from __future__ import annotations

import torch
from torch import Tensor

from isles.models.subspace import orthonormal


class Drift:
    """M (D, D) of the gradients since it was last taken, in float64 on the host."""

    def __init__(self, width: int) -> None:
        self.total = torch.zeros(width, width, dtype=torch.float64, device="cpu")

    def add(self, gradient_BTD: Tensor) -> None:
        """Those of a microbatch."""
        rows = gradient_BTD.detach().flatten(0, -2).to(torch.promote_types(gradient_BTD.dtype, torch.float32))
        self.total += (rows.T @ rows).to(device="cpu", dtype=torch.float64)


def turned(basis: Tensor, total: Tensor, rate: float) -> Tensor:
    """The next basis (D, K) of float64, orthonormal; total: M (D, D). Above a rate of 0.5 the loss may rise."""
    size = float(torch.linalg.matrix_norm(total, ord=2))
    if size == 0.0:
        return basis
    product = total @ basis
    return orthonormal(basis + (2 * rate / size) * (product - basis @ (basis.T @ product)))
