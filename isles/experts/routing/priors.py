"""What is believed of the experts before a sequence begins: log P(j), (E,).

uniform    1/E
cached     P_1 = pi_1;  P_n = (1 - decay) P_{n-1} + decay pi_n  over sequences of validation text, then frozen
updating   the same rule on the text that is judged: the prior of a sequence comes from those before it

pi_n is the posterior of sequence n, computed with P_{n-1} as its prior (pi_1 with the uniform one). Statistic "end": at
the sequence's end, where it is nearly one-hot; "mean": its mean over the positions, which makes a smoother prior.
Everything stays in log space: an expert that one sequence rules out by 1000 nats is at log 0 as a number, and would
never come back.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from isles.experts.mixture import after, posterior, uniform

Statistic = Literal["end", "mean"]
DECAY = 0.3
CACHED_SEQUENCES = 100


def following(
    believed_E: Tensor, scores_ET: Tensor, *, first: bool, decay: float = DECAY, statistic: Statistic = "end"
) -> Tensor:
    """log P_n from log P_{n-1} and the scores of sequence n. first: it is the first one, so P_{n-1} leaves no trace."""
    one_E1T = scores_ET[:, None]
    if statistic == "end":
        log_pi = after(one_E1T, believed_E)[:, 0]
    else:
        log_pi = posterior(one_E1T, believed_E).logsumexp((1, 2))  # the mean, but for a constant
    log_pi = log_pi.log_softmax(0)
    if not first and decay < 1:
        log_pi = torch.logaddexp(math.log1p(-decay) + believed_E, math.log(decay) + log_pi)
    return log_pi.log_softmax(0)


def running(scores_ENT: Tensor, *, decay: float = DECAY, statistic: Statistic = "end") -> Tensor:
    """log P_n for n = 0..N, (E, N + 1): column n is what is believed before sequence n; the first is uniform.

    ValueError for a decay outside of (0, 1].
    """
    if not 0 < decay <= 1:
        raise ValueError(f"decay = {decay}: choose more than 0 and at most 1, such as {DECAY}")
    believed = [uniform(len(scores_ENT))]
    for n in range(scores_ENT.shape[1]):
        believed.append(following(believed[-1], scores_ENT[:, n], first=n == 0, decay=decay, statistic=statistic))
    return torch.stack(believed, dim=1)


def cached(scores_ENT: Tensor, *, decay: float = DECAY, statistic: Statistic = "end") -> Tensor:
    """The prior (E,) that sequences of validation text leave behind. ValueError where there is none."""
    if not scores_ENT.shape[1]:
        raise ValueError("a cached prior needs at least one sequence of validation text: raise validation_fraction")
    return running(scores_ENT, decay=decay, statistic=statistic)[:, -1]


def updating(scores_ENT: Tensor, *, decay: float = DECAY, statistic: Statistic = "end") -> Tensor:
    """The prior (E, N) of each sequence, from those before it."""
    return running(scores_ENT, decay=decay, statistic=statistic)[:, :-1]


def given(shares: str, experts: int) -> Tensor:
    """log P(j) (E,) from shares as a person writes them, "0.2,0.3,0.5". ValueError unless there are `experts` of them,
    each at least 0, that sum to 1.
    """
    try:
        found = torch.tensor([float(share) for share in shares.split(",")], dtype=torch.float64, device="cpu")
    except ValueError:
        found = torch.zeros(0, dtype=torch.float32, device="cpu")
    if len(found) != experts or not abs(float(found.sum()) - 1) < 1e-3 or float(found.min()) < 0:
        raise ValueError(
            f"shares {shares!r}: give {experts} numbers of at least 0 that sum to 1, with commas between them"
        )
    return (found / found.sum()).log()
