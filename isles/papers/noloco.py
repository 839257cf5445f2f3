"""NoLoCo's two models of time (arXiv 2506.10911, section 5.3).

Barrier model: what waiting costs when steps take random times and messages none.

A step takes exp(mu + s z), z standard normal (log-normal). Every m steps a worker waits, and then goes on:

    all:   clock of everybody <- max over all of (clock + own m steps)             DiLoCo, any mean over all
    pair:  clock of i, j      <- max of the two (clock + own m steps)              NoLoCo, random pairs, new each round

A worker's m steps are drawn at once, from the law of their sum: the law of one step, on a grid, convolved m times by
Fourier transform. Steps are rounded to points of the grid: a sum is off by about a grid spacing times sqrt(m / 12),
less than 1e-3 of its mean for the paper's law. With an odd number of workers one has no partner in a round.

Latency model: an all-reduce over a tree against an exchange in pairs, when a message takes a random time.

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
from functools import lru_cache

import numpy as np

_POINTS = 1 << 18
_TAIL = 7.0  # standard normal deviations to which the law of one step is kept
_KNOTS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLaw:
    """The law of `count` steps in a row, each exp(mu + s z) seconds; variance: s^2."""

    count: int
    mu: float = 1.0
    variance: float = 0.5

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ValueError(f"{self.count} inner steps: choose 1 or more")
        if not 0 <= self.variance <= 2:  # beyond it one step's tail would need a finer grid
            raise ValueError(f"variance = {self.variance} of the logarithm of a step's time: choose 0 to 2")
        if not -100 < self.mu < 100:
            raise ValueError(f"mu = {self.mu}, mean of the logarithm of a step's time: choose -100 to 100")

    @property
    def mean(self) -> float:
        """Seconds."""
        return self.count * math.exp(self.mu + self.variance / 2)

    def quantiles(self) -> tuple[np.ndarray, np.ndarray]:
        """(z, seconds): for each standard normal z the seconds that as large a share of all sums stays below."""
        return _quantiles(self)

    def sampler(self, random: np.random.Generator) -> Sampler:
        return Sampler(random, *self.quantiles())


@lru_cache(maxsize=8)
def _quantiles(steps: StepLaw) -> tuple[np.ndarray, np.ndarray]:
    z = np.linspace(-_TAIL, _TAIL, _KNOTS)
    s = math.sqrt(steps.variance)
    if steps.count == 1:
        return z, np.exp(steps.mu + s * z)
    if s == 0:
        return z, np.full_like(z, steps.mean)
    from scipy.special import log_ndtr, ndtri_exp

    # The longest sum worth keeping: all steps usual but one, plus what many usual ones add up to at the most.
    spread = steps.mean * math.sqrt(math.expm1(steps.variance) / steps.count)
    longest = steps.mean + math.exp(steps.mu + s * _TAIL) + 10 * spread
    spacing = longest / _POINTS
    edges = np.log(np.arange(0.5, _POINTS) * spacing)
    below = np.concatenate([[0.0], np.exp(log_ndtr((edges - steps.mu) / s))])
    law = np.diff(below, append=1.0)
    total = np.fft.irfft(np.fft.rfft(law, 2 * _POINTS) ** steps.count, 2 * _POINTS).clip(min=0.0)
    above = total[::-1].cumsum()[::-1]  # chance of at least so many cells, exact in the upper tail
    at = -ndtri_exp(np.log(np.clip(above / above[0], 1e-300, 1 - 1e-16)))
    retained = np.concatenate([[True], np.diff(at) > 0])
    return z, np.interp(z, at[retained], (np.arange(2 * _POINTS) - 0.5)[retained] * spacing)


class Sampler:
    """Random numbers from a table of quantiles over evenly spaced standard normal deviations."""

    def __init__(self, random: np.random.Generator, z: np.ndarray, values: np.ndarray) -> None:
        self.random, self.first, self.per_z = random, float(z[0]), (len(z) - 1) / float(z[-1] - z[0])
        self.values, self.slopes = values, np.diff(values, append=values[-1])

    def draw(self, count: int) -> np.ndarray:
        position = (self.random.standard_normal(count) - self.first) * self.per_z
        position = np.clip(position, 0, len(self.values) - 1)
        spacing = position.astype(np.intp)
        return self.values[spacing] + self.slopes[spacing] * (position - spacing)


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """Seconds that `rounds` rounds take, from the same step times: waiting for all, and for a partner (until the last
    worker is through; mean over the workers).
    """

    workers: int
    inner_steps: int
    rounds: int
    everybody_seconds: float
    partner_last_seconds: float
    partner_mean_seconds: float

    @property
    def ratio(self) -> float:
        """How many times longer waiting for all takes than waiting for a partner, the last worker counted."""
        return self.everybody_seconds / self.partner_last_seconds


def waiting(workers: int, steps: StepLaw, *, rounds: int = 100, seed: int = 0) -> Waiting:
    """Both ways of waiting for the same random step times."""
    if workers < 1 or rounds < 1:
        raise ValueError(f"workers = {workers}, rounds = {rounds}: choose 1 or more of each")
    random = np.random.default_rng(seed)
    sampler = steps.sampler(random)
    everybody, clock = 0.0, np.zeros(workers)
    pairs = workers // 2
    for _ in range(rounds):
        taken = sampler.draw(workers)
        everybody += float(taken.max())
        # Clocks carry no names, so shuffling them is drawing new pairs: neighbours are partners.
        clock += taken
        random.shuffle(clock)
        clock[: 2 * pairs] = np.repeat(np.maximum(clock[0 : 2 * pairs : 2], clock[1 : 2 * pairs : 2]), 2)
    return Waiting(
        workers=workers,
        inner_steps=steps.count,
        rounds=rounds,
        everybody_seconds=everybody,
        partner_last_seconds=float(clock.max()),
        partner_mean_seconds=float(clock.mean()),
    )


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


def two_shot_seconds(workers: int, cv: float, rounds: int) -> np.ndarray:
    """Times of `rounds` independent two-shot means of `workers`, (rounds,)."""
    from scipy.special import ndtri_exp

    _check(workers, rounds)
    if workers == 1:
        return np.zeros(rounds)
    random, sigma = np.random.default_rng(0), sigma_of(cv)
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
