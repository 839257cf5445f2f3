"""Robust means of shares (`replicas.robust`): what a minority of wrong shares can do to them is bounded.

Of n shares x_i (m,), n > 2; of one or two it is their mean. In `mean` each shard by itself, at its owner.

    median     entry by entry: the middle value, or the mean of the two middle ones
    trimmed    entry by entry: the mean without the f least and the f largest values, f = (n + 1) // 4
    clip       v_0 = median;  v <- v + mean_i (x_i - v) min(1, t / |x_i - v|), three times;
               t: the middle one of the distances |x_i - v|, the lesser of two
               of the x_i that agree: s_i, the middle one of <x_i, x_j> over the other j (the greater of two), is at
               least half of the middle one of all s_i (the lesser of two)

`clip` is CenteredClip (Karimireddy, He, Jaggi 2021, arXiv 2012.10333, Algorithm 2), by parts as in Gorbunov et al.
(arXiv 2106.11257). Deviations: v begins at the entry-wise median and not at the last round's mean, and t follows the
shares and is no setting, so nothing is kept between rounds, whoever owns a part next. And shares that do not agree are
left out: clipped alone, a share that points backwards, or nowhere, shortens each step by t / n. The noise of two shares
is almost orthogonal, so <x_i, x_j> of honest ones is about the square of what they have in common, however far they are
from each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import torch
from torch import Tensor

from isles.base.modes import torch_threads
from isles.comm.collectives.robust_rules import CLIP, trimmed
from isles.comm.trust import BLOCK

_ITERATIONS = 3
_AGREES = 0.5  # share of the usual inner product with others


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
    with torch_threads(1):  # the same bits wherever an all-gather computes it
        shares = _agreeing(shares)
        center = torch.empty_like(shares[0])
        _middle(shares, trimmed("median", len(shares)), center)
        for _ in range(_ITERATIONS):
            far = [_length(share - center) for share in shares]
            most = sorted(far)[(len(far) - 1) // 2]
            factors = [min(1.0, most / one) / len(shares) if one else 0.0 for one in far]
            center.mul_(1.0 - sum(factors))
            for share, factor in zip(shares, factors, strict=True):
                center.add_(share, alpha=factor)
    return center


def _agreeing(shares: Sequence[Tensor]) -> list[Tensor]:
    squares = [_length(share) ** 2 for share in shares]
    products = [[0.0] * len(shares) for _ in shares]
    for one, other in combinations(range(len(shares)), 2):
        apart = _length(shares[one] - shares[other]) ** 2
        products[one][other] = products[other][one] = (squares[one] + squares[other] - apart) / 2
    agree = []
    for own, row in enumerate(products):
        others = sorted(row[:own] + row[own + 1 :])
        agree.append(others[len(others) // 2])
    usual = sorted(agree)[(len(agree) - 1) // 2]
    return [share for share, one in zip(shares, agree, strict=True) if usual <= 0 or one >= _AGREES * usual]


def _length(vector: Tensor) -> float:
    return float(torch.linalg.vector_norm(vector, dtype=torch.float64))
