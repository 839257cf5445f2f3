"""What DeMo makes of the decoded momentum U before the inner optimizer applies it.

sign   sign(U)
muon   U (U^T U)^(-1/2) of every matrix, by Newton-Schulz iteration; sign(U) of vectors, which have no directions
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

# Coefficients and number of iterations of Jordan et al. (2024, Muon): singular values go to between 0.7 and 1.2, those
# below a thousandth of the norm to less.
_SCHULZ, _ITERATIONS = (3.4445, -4.7750, 2.0315), 5


def snapped(u_NE: Tensor, tolerance: float) -> Tensor:
    """Blocks (N, e), in place, entries below `tolerance` times their block's largest set to zero: what rounding leaves
    of zeros would make full steps under a sign.
    """
    if tolerance:
        sizes = u_NE.abs()
        u_NE.masked_fill_(sizes < tolerance * sizes.amax(dim=1, keepdim=True), 0.0)
    return u_NE


def orthogonalised(updates: Sequence[Tensor]) -> None:
    """Tensors of any shapes, in place: matrices (the last two dimensions of those that have more) to their nearest
    orthogonal ones, vectors to their signs. Equal shapes are worked on together.
    """
    by_shape: dict[torch.Size, list[Tensor]] = {}
    for update in updates:
        by_shape.setdefault(update.shape, []).append(update)
    for shape, same in by_shape.items():
        if len(shape) < 2:
            torch._foreach_sign_(same)
        else:
            torch._foreach_copy_(same, list(_newton_schulz(torch.stack(same).float())))


def _newton_schulz(x: Tensor) -> Tensor:
    """(..., m, n) -> about U V^T of its singular value decomposition."""
    if x.shape[-2] > x.shape[-1]:
        return _newton_schulz(x.mT).mT
    a, b, c = _SCHULZ
    if not x.numel():
        return x
    tiny = torch.finfo(x.dtype).tiny
    # The largest entry first: what rounding leaves of a momentum that got no gradients is so small that its squares are
    # zero, and so would be the norm.
    x = x / x.abs().amax(dim=(-2, -1), keepdim=True).clamp_min(tiny)
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp_min(tiny)
    for _ in range(_ITERATIONS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x
