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


def running(scores_ENT: Tensor, *, decay: float = DECAY, statistic: Statistic = "end") -> Tensor:
    """log P_n for n = 0..N, (E, N + 1): column n is what is believed before sequence n; the first is uniform.

    ValueError for a decay outside of (0, 1].
    """
    if not 0 < decay <= 1:
        raise ValueError(f"decay = {decay}: choose more than 0 and at most 1, such as {DECAY}")
    experts, sequences, _ = scores_ENT.shape
    believed = [uniform(experts)]
    for n in range(sequences):
        one_E1T = scores_ENT[:, n : n + 1]
        if statistic == "end":
            log_pi = after(one_E1T, believed[-1])[:, 0]
        else:
            log_pi = posterior(one_E1T, believed[-1]).logsumexp((1, 2))  # the mean, but for a constant
        log_pi = log_pi.log_softmax(0)
        if n and decay < 1:
            log_pi = torch.logaddexp(math.log1p(-decay) + believed[-1], math.log(decay) + log_pi)
        believed.append(log_pi.log_softmax(0))
    return torch.stack(believed, dim=1)


def cached(scores_ENT: Tensor, *, decay: float = DECAY, statistic: Statistic = "end") -> Tensor:
    """The prior (E,) that sequences of validation text leave behind. ValueError where there is none."""
    if not scores_ENT.shape[1]:
        raise ValueError("a cached prior needs at least one sequence of validation text: raise validation_fraction")
    return running(scores_ENT, decay=decay, statistic=statistic)[:, -1]


def updating(scores_ENT: Tensor, *, decay: float = DECAY, statistic: Statistic = "end") -> Tensor:
    """The prior (E, N) of each sequence, from those before it."""
    return running(scores_ENT, decay=decay, statistic=statistic)[:, :-1]
