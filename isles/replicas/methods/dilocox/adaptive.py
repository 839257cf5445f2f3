"""How many ranks, and inner steps, the next low-rank round takes: read off the last one (DiLoCoX, arXiv 2506.21263,
adaptive gradient compression; the formulas are ours, the readable text gives none).

    used_j  smallest r with sum_{l<=r} s_l^2 >= energy sum_l s_l^2
    u_t     = mean_j used_j, weighted by the matrices' sizes: ranks that round t made use of
    r       = ceil(mean of the last `window` u_t), within max(1, r_1 / 8) .. r_1
    H       = round(H_1 r / r_1), within H_1 / 4 .. H_1: fewer bytes take less time to hide

s: singular values of matrix j's Q, which are those of its mean, for Po is orthonormal. Every tenth round takes r_1, or
the rank could never grow. Q is equal on all replicas, so all come to the same numbers without a message. Where several
workers hold parts of a replica, such as stages, j goes over the matrices of all of them, and they add up their parts:
all take the same rank and H.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from isles.modes import torch_threads

PROBE = 10


@dataclass(kw_only=True)
class Adaptive:
    """first_rank: r_1. first_every: H_1. window, energy: see the module."""

    first_rank: int
    first_every: int
    window: int
    energy: float
    last: int
    """Rank of the last round."""
    seen: list[float] = field(default_factory=list)
    """u_t of the last rounds."""

    def observe(self, bases: Sequence[Tensor], sizes: Sequence[int], total: Callable[[Tensor], Tensor]) -> bool:
        """Take in the Q of the last round; sizes: entries of each matrix; total: the sum over the workers of the
        replica, who all call this. False, on all of them, where none has a matrix, or one a Q that is not finite.
        """
        finite = all(bool(basis.isfinite().all()) for basis in bases)
        used = (size * ranks_used(basis, self.energy) for basis, size in zip(bases, sizes, strict=True))
        own = torch.tensor([sum(used) if finite else math.nan, sum(sizes)], dtype=torch.float64, device="cpu")
        ranks, entries = total(own).tolist()
        if math.isnan(ranks) or not entries:
            return False
        self.seen = [*self.seen, ranks / entries][-self.window :]
        return True

    def rank(self, round: int) -> int:
        """Of round 1, 2, ..."""
        if not self.seen or round % PROBE == 0:
            return self.first_rank
        least = max(1, self.first_rank // 8)
        return min(max(math.ceil(sum(self.seen) / len(self.seen)), least), self.first_rank)

    def every(self, rank: int) -> int:
        """Inner steps of a round that is sent with `rank`."""
        wanted = round(self.first_every * rank / self.first_rank)
        return min(max(wanted, math.ceil(self.first_every / 4)), self.first_every)


def ranks_used(basis: Tensor, energy: float) -> int:
    """The smallest number of singular values of basis (n, r) that hold `energy` of their squares' sum; 0 of zeros."""
    with torch_threads(1):  # with more, which others may have, other bits
        squares = torch.linalg.svdvals(basis.double()).square().cumsum(0)
    if not squares[-1] > 0:
        return 0
    return int((squares < energy * squares[-1]).sum()) + 1


def resized(basis: Tensor, rank: int, seed: int) -> Tensor:
    """Q (n, r) with `rank` columns, at most n: its strongest directions, or with random ones beside its own; the same
    on all workers.
    """
    rows, columns = basis.shape
    rank = min(rank, rows)
    if rank <= columns:
        return torch.linalg.svd(basis, full_matrices=False).U[:, :rank].contiguous() if rank < columns else basis
    draw = torch.Generator().manual_seed(seed)
    fresh = (
        torch.randn(rows, rank - columns, generator=draw, dtype=basis.dtype, device="cpu") * basis.norm() / rows**0.5
    )
    return torch.cat((basis, fresh), 1)
