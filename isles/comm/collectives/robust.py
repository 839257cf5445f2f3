"""Robust means of shares (`replicas.robust`): what a minority of wrong shares can do to them is bounded.

Of n shares x_i (m,), n > 2; of one or two it is their mean. In `mean` each shard by itself, at its owner.

    median     entry by entry: the middle value, or the mean of the two middle ones
    trimmed    entry by entry: the mean without the f least and the f largest values, f = (n + 1) // 4
    clip       v_0 = median;  v <- v + mean_i (x_i - v) min(1, t / |x_i - v|), three times;
               t: the middle one of the distances |x_i - v|, the lesser of two
               i: those that go about as far along v as the middle one: <x_i, v> between its half and its double

`clip` is CenteredClip (Karimireddy, He, Jaggi 2021, arXiv 2012.10333, Algorithm 2), by parts as in Gorbunov et al.
(arXiv 2106.11257). Deviations: v begins at the entry-wise median and not at the last round's mean, and t follows the
shares and is no setting, so nothing is kept between rounds, whoever owns a part next. And shares that do not go along
v are left out: clipped alone, a share that points backwards, or nowhere, shortens each step by t / n. Noise is almost
orthogonal to v, so honest shares differ little in <x_i, v>, however far they are from each other.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from isles.base.modes import torch_threads
from isles.comm.collectives.robust_rules import CLIP, trimmed
from isles.comm.trust import BLOCK

_ITERATIONS = 3
_ALIKE = 2.0  # times as far along the centre, or as little, as the middle share


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
    with torch_threads(1):  # the same bits wherever an all-gather computes it
        sizes = [_length(share) ** 2 for share in shares]
        for _ in range(_ITERATIONS):
            far, size = [_length(share - center) for share in shares], _length(center) ** 2
            along = [(own + size - one**2) / 2 for own, one in zip(sizes, far, strict=True)]
            most, usual = _lesser_middle(far), _lesser_middle(along)
            used = [at for at, one in enumerate(along) if usual <= 0 or usual / _ALIKE <= one <= usual * _ALIKE]
            factors = {at: min(1.0, most / far[at]) / len(used) for at in used if far[at]}
            center.mul_(1.0 - sum(factors.values()))
            for at, factor in factors.items():
                center.add_(shares[at], alpha=factor)
    return center


def _length(vector: Tensor) -> float:
    return float(torch.linalg.vector_norm(vector, dtype=torch.float64))


def _lesser_middle(values: Sequence[float]) -> float:
    return sorted(values)[(len(values) - 1) // 2]
