"""NoLoCo's latency model (arXiv 2506.10911, section 5.3): an all-reduce over a tree against an exchange in pairs, when
a message takes a random time.

t ~ log-normal with mean 1 and coefficient of variation cv = std / mean, so sigma^2 = ln(1 + cv^2); times are in means
of a message. Bandwidth does not matter here, nor what the messages hold.

    tree: up and down a binary tree with N leaves. T_0 = 0, T_k = max(T_(k-1) + t, T'_(k-1) + t'), k = log2 N levels;
          the way down takes as long as another way up in distribution. Constant t: 2 log2 N.
    pair: one message each way, twice: 2 E max(t, t') = 2 (1 + erf(sigma / 2)). Constant t: 2.

That is what the paper compares. What Isles moves, with the same random message times:

    two-shot: everybody waits for N - 1 messages, then sends to all again; over when the last of those has arrived:
              max over j of (longest of N - 1 times into j + longest of N - 1 times out of j).
    swap:     both partners send at once and are done when the other's message is there: E max(t, t'), half of `pair`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

_AT_ONCE = 1 << 22  # random numbers in memory, 32 MB


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """How many times longer a tree takes than a pair, on average."""

    workers: int
    ratio: float
    standard_error: float


def sigma_of(cv: float) -> float:
    """Sigma of the log-normal with this coefficient of variation."""
    if not 0 <= cv < math.inf:
        raise ValueError(f"cv = {cv}: choose 0 or more, the standard deviation of a message's time by its mean")
    return math.sqrt(math.log1p(cv * cv))


def pair_seconds(cv: float) -> float:
    """Mean time of a pair's exchange."""
    return 2 * (1 + math.erf(sigma_of(cv) / 2))


def swap_seconds(cv: float) -> float:
    """Mean time of a pair's exchange in Isles."""
    return pair_seconds(cv) / 2


def two_shot_seconds(workers: int, cv: float, rounds: int, seed: int = 0) -> np.ndarray:
    """Times of `rounds` independent two-shot means of `workers`, (rounds,)."""
    from scipy.special import ndtri_exp

    _check(workers, rounds)
    if workers == 1:
        return np.zeros(rounds)
    random, sigma = np.random.default_rng(seed), sigma_of(cv)
    at_once = max(1, _AT_ONCE // workers)
    parts = []
    for first in range(0, rounds, at_once):
        # The longest of n times is below x with the chance of one to the power n, so one draw stands for n messages.
        draws = random.exponential(size=(2, min(at_once, rounds - first), workers)) / -(workers - 1)
        longest = np.exp(sigma * ndtri_exp(draws) - sigma * sigma / 2)
        parts.append(longest.sum(axis=0).max(axis=1))
    return np.concatenate(parts)


def ratios(workers: list[int], cv: float, rounds: int, seed: int = 0) -> list[Ratio]:
    """Tree / pair for each number in `workers`, powers of two, from the parts of one forest: a tree of 1024 leaves
    holds 256 trees of 4. rounds: trees of the largest number.
    """
    _check(max(workers), rounds)
    if any(count < 2 or count & (count - 1) for count in workers):
        raise ValueError(f"workers = {workers}: this table takes powers of two from 2 on")
    random, sigma = np.random.default_rng(seed), sigma_of(cv)
    largest = max(workers)
    at_once = max(1, _AT_ONCE // largest)
    times: dict[int, list[np.ndarray]] = {count: [] for count in workers}
    for first in range(0, rounds, at_once):
        levels = _level_maxima(random, sigma, np.zeros((min(at_once, rounds - first), largest)))
        for count in workers:
            times[count].append(levels[count.bit_length() - 2].ravel())
    made = []
    for count in workers:
        way = np.concatenate(times[count])
        scale = 2 / pair_seconds(cv)
        # Trees of one forest are independent, for no message belongs to two of them at the same level or below.
        error = way.std() / math.sqrt(way.size)
        made.append(Ratio(workers=count, ratio=scale * float(way.mean()), standard_error=scale * float(error)))
    return made


def _level_maxima(random: np.random.Generator, sigma: float, ready: np.ndarray) -> list[np.ndarray]:
    """When each node of each level has heard from those below it. ready: (rounds, leaves), when the leaves begin."""
    levels = []
    while ready.shape[1] > 1:
        arrived = ready + np.exp(sigma * random.standard_normal(ready.shape) - sigma * sigma / 2)
        ready = np.maximum(arrived[:, 0::2], arrived[:, 1::2])
        levels.append(ready)
    return levels


def _check(workers: int, rounds: int) -> None:
    if workers < 1:
        raise ValueError(f"workers = {workers}: choose 1 or more")
    if rounds < 1:
        raise ValueError(f"rounds = {rounds}: choose 1 or more")
