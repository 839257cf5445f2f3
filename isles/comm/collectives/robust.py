"""Robust means of shares (`replicas.robust`): what a minority of wrong shares can do to them is bounded.

Of n shares x_i (m,), n > 2; of one or two it is their mean. In `mean` each shard by itself, at its owner.

    median     entry by entry: the middle value, or the mean of the two middle ones
    trimmed    entry by entry: the mean without the f least and the f largest values, f = (n + 1) // 4
    clip       v_0 = median;  v <- v + mean_i (x_i - v) min(1, t / |x_i - v|), three times;
               t: the middle one of the distances |x_i - v|, the lesser of two

`clip` is CenteredClip (Karimireddy, He, Jaggi 2021, arXiv 2012.10333, Algorithm 2), by parts as in Gorbunov et al.
(arXiv 2106.11257). Deviations: v begins at the entry-wise median and not at the last round's mean, and t follows the
shares and is no setting, so nothing is kept between rounds, whoever owns a part next.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from isles.base.modes import torch_threads
from isles.comm.collectives.robust_rules import CLIP, trimmed
from isles.comm.trust import BLOCK

_ITERATIONS = 3


def robust_mean(rule: str, shares: Sequence[Tensor], out: Tensor) -> None:
    """Write the mean of `shares` (m,) by `rule` into `out` (m,), which may be the memory of one of them."""
    if rule == CLIP and len(shares) > 2:
        out.copy_(_clipped(shares))
    else:
        _middle(shares, trimmed(rule, len(shares)), out)


def _middle(shares: Sequence[Tensor], cut: int, out: Tensor) -> None:
    """Entry by entry, the mean without the `cut` least and the `cut` largest values."""
    for *blocks, room in zip(*(share.split(BLOCK) for share in shares), out.split(BLOCK), strict=True):
        for turn in range(len(blocks)):  # odd-even transposition: for few shares faster than torch's sort of columns
            for at in range(turn % 2, len(blocks) - 1, 2):
                pair = blocks[at], blocks[at + 1]
                blocks[at], blocks[at + 1] = torch.minimum(*pair), torch.maximum(*pair)
        middle = blocks[cut : len(blocks) - cut]
        total = middle[0]
        for row in middle[1:]:
            total = total + row
        torch.div(total, len(middle), out=room)


def _clipped(shares: Sequence[Tensor]) -> Tensor:
    center = torch.empty_like(shares[0])
    _middle(shares, trimmed("median", len(shares)), center)
    for _ in range(_ITERATIONS):
        with torch_threads(1):  # the same bits wherever an all-gather computes it
            far = [float(torch.linalg.vector_norm(share - center, dtype=torch.float64)) for share in shares]
        most = sorted(far)[(len(far) - 1) // 2]
        factors = [min(1.0, most / one) / len(shares) if one else 0.0 for one in far]
        center.mul_(1.0 - sum(factors))
        for share, factor in zip(shares, factors, strict=True):
            center.add_(share, alpha=factor)
    return center
