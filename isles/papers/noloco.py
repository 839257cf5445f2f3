"""NoLoCo's two models of time (arXiv 2506.10911, section 5.3), and the sheets of `isles plan explain noloco-...`.

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
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache

import numpy as np

from isles.replicas.parts.quadratic import (
    Quadratic,
    group_radius,
    heavy_ball,
    largest_gamma,
    mean_path,
    radius,
    simulate,
    variance,
)
from isles.report.panels import Chart, Panel, Point, Polyline, Table, chart_panel, coloured
from isles.report.sheet import Sheet

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
    """Seconds that `rounds` rounds take, from the same step times: waiting for all, and for a partner, until the last
    worker is through.
    """

    workers: int
    inner_steps: int
    rounds: int
    everybody_seconds: float
    partner_last_seconds: float

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


_CVS = (0.0, 0.5, 1.0, 2.0, 2.5)
_WORKERS = (4, 16, 64, 256, 1024)
_TREES = 16_000
_SHOTS = 2000
_CROWDS = (2, 4, 16, 64, 256, 1024, 10_000, 100_000)
_INNER_STEPS = (1, 10, 50, 100)
_ROUNDS = 100
_MOMENTA = (0.0, 0.3, 0.5, 0.7, 0.9)
_PAPER = "arXiv 2506.10911"


def latency() -> Sheet:
    """How many times longer an all-reduce over a tree takes than an exchange of pairs."""
    table = {cv: ratios(list(_WORKERS), cv, _TREES) for cv in _CVS}
    shots = {
        cv: [float(two_shot_seconds(count, cv, _SHOTS).mean()) / swap_seconds(cv) for count in _WORKERS] for cv in _CVS
    }
    error = max(row.standard_error / row.ratio for rows in table.values() for row in rows)
    lines = {f"cv {cv:g}": [(row.workers, row.ratio) for row in rows] for cv, rows in table.items()}
    own = {f"cv {cv:g}": _points(_WORKERS, row) for cv, row in shots.items()}
    return Sheet(
        name="noloco-latency",
        title="All-reduce over a tree against an exchange in pairs",
        subtitle=f"Section 5.3 of {_PAPER}: log-normal message times, cv = standard deviation / mean",
        what=f"Ratios of mean times; standard errors of those of the tree are at most {error:.1%}.",
        table=Table(
            heads=["compared", "cv", *(f"{count} workers" for count in _WORKERS)],
            rows=[
                *(["tree / pair", f"{cv:g}", *(f"{row.ratio:.2f}" for row in rows)] for cv, rows in table.items()),
                *(["two-shot / swap", f"{cv:g}", *(f"{ratio:.2f}" for ratio in row)] for cv, row in shots.items()),
            ],
            names=2,
        ),
        data={
            "rows": [
                {"cv": cv, **asdict(row), "two_shot_per_swap": shot}
                for cv, rows in table.items()
                for row, shot in zip(rows, shots[cv], strict=True)
            ],
            "pair_mean": {f"{cv:g}": pair_seconds(cv) for cv in _CVS},
        },
        panels=[
            _panel("Tree / pair, as in the paper", "workers", lines, log_x=True),
            _panel("Two-shot mean / swap of a pair, as in Isles", "workers", own, log_x=True),
        ],
        notes=[
            "Only the times of messages count: no bandwidth, no sizes, equal workers, and both partners ready at once. "
            "With slow uplinks the bytes decide, and a pair sends as many as a worker of an all-reduce.",
            "Isles takes means in two shots, not over a tree: two message times in a row for any number of workers, "
            "each the longest of many; and its pairs swap at once, one message time where the paper counts two.",
        ],
    )


def barrier() -> Sheet:
    """Waiting for all against waiting for a partner."""
    runs = {
        count: [waiting(workers, StepLaw(count=count), rounds=_ROUNDS) for workers in _CROWDS] for count in _INNER_STEPS
    }
    by_crowd = {f"H = {count}": [(run.workers, run.ratio) for run in row] for count, row in runs.items()}
    shown = [workers for workers in _CROWDS if workers >= 16]
    by_steps = {
        f"{workers:,} workers": [(count, row[_CROWDS.index(workers)].ratio) for count, row in runs.items()]
        for workers in shown
    }
    return Sheet(
        name="noloco-barrier",
        title="Waiting for all against waiting for a partner",
        subtitle=f"Section 5.3 of {_PAPER}: a step takes exp(1 + sqrt(0.5) z) seconds, messages take none",
        what=f"Time of {_ROUNDS} rounds of H steps if all wait for the slowest / if each waits for a random partner.",
        table=Table(
            heads=["workers", *(f"H = {count}" for count in _INNER_STEPS)],
            rows=[
                [str(workers), *(f"{row[position].ratio:.2f}" for row in runs.values())]
                for position, workers in enumerate(_CROWDS)
            ],
        ),
        data={"rows": [{**asdict(run), "ratio": run.ratio} for row in runs.values() for run in row]},
        panels=[
            _panel("All / partner, by workers", "workers", by_crowd, log_x=True),
            _panel("All / partner, by inner steps", "inner steps", by_steps, [f"{n:,}" for n in shown], log_x=True),
        ],
        notes=[
            "One draw of the step times. A round of pairs ends when the last worker is through; the mean worker is "
            "a little earlier (in the JSON).",
            "Every step of every worker is drawn anew. Workers that are always slow make everybody slow in time, in "
            "pairs too.",
        ],
    )


def quadratic() -> Sheet:
    """The theory: the mean, the variance against the learning rate, the stability region."""
    rows = []
    for alpha in _MOMENTA:
        top = largest_gamma(alpha)
        gammas = np.linspace(0, top, 301)[1:-1]
        found = [group_radius(alpha, float(gamma)) for gamma in gammas]
        best = int(np.argmin(found))
        # Equation 74 of the paper for groups of two.
        rows.append((alpha, top, float(gammas[best]), found[best], alpha, math.sqrt(2 + alpha * alpha)))
    keys = ("alpha", "stable_below", "fastest_gamma", "radius", "paper_from", "paper_to")
    return Sheet(
        name="noloco-quadratic",
        title="NoLoCo on a quadratic: mean, variance, stability",
        subtitle=f"Section 4 of {_PAPER}, with exact moments in place of its bounds",
        what="Pairs, many workers, no inner progress: replicas come together for gamma from 0 to `stable below`.",
        table=Table(
            heads=["alpha", "stable below", "fastest gamma", "factor a round", "paper from", "paper to"],
            rows=[[f"{row[0]:g}", *(f"{value:.2f}" for value in row[1:])] for row in rows],
        ),
        data={"rows": [dict(zip(keys, row, strict=True)) for row in rows]},
        panels=[_mean_panel(), _variance_panel(), _region_panel(), _radius_panel()],
        notes=[
            "The paper's interval for gamma (its equation 74) is not the stable one: at alpha = 0.9 it is unstable "
            "throughout. A small gamma is slow, not unstable.",
            "That the variance goes with the rate squared holds for the replicas about their mean, while inner steps x "
            "rate x curvature is well below 1; the variance of the mean goes with the rate itself.",
        ],
    )


def _mean_panel() -> Panel:
    lines, keys = {}, []
    for rate in (0.001, 0.01, 0.1):
        setting = Quadratic(rate=rate)
        factor = radius(heavy_ball(setting.alpha, setting.beta * setting.progress))
        lines[f"rate {rate:g}"] = _points(range(31), mean_path(setting, 30))
        keys.append(f"rate {rate:g} (x {factor:.3f} a round)")
    heading = "Mean over the workers, from 1"
    return _panel(heading, "outer round", lines, keys, "alpha 0.5, beta 0.7, 50 inner steps, curvature 1.")


def _variance_panel() -> Panel:
    base = Quadratic()
    rates = np.logspace(-4, -0.3, 60).tolist()
    settled = [variance(replace(base, rate=rate)) for rate in rates]
    dots = []
    for rate in (0.003, 0.01, 0.03, 0.1, 0.3):
        phi = simulate(replace(base, rate=rate), rounds=math.ceil(100 / (50 * rate)) + 60)
        dots.append((rate, float(((phi - phi.mean(axis=1, keepdims=True)) ** 2).mean())))
    chart = Chart(
        title="Variance against the inner learning rate",
        x_label="inner learning rate",
        x_format=lambda rate: f"{rate:g}",
        y_format=lambda value: f"{value:.0e}",
        lines=[
            Polyline(
                points=_points(rates, [v.replicas for v in settled]), css="series0", name="spread of the replicas"
            ),
            Polyline(points=_points(rates, [v.mean for v in settled]), css="series2", name="of their mean"),
            Polyline(
                points=[(r, settled[0].replicas * (r / rates[0]) ** 2) for r in rates], css="ddp", name="rate squared"
            ),
        ],
        dots=dots,
        top=max(v.replicas for v in settled) * 3,
        log_x=True,
        log_y=True,
    )
    keys = [
        ("series0", "of a replica about the mean"),
        ("dot", "simulated"),
        ("series2", "of the mean"),
        ("ddp", "rate²"),
    ]
    note = "16 workers, alpha 0.5, beta = gamma = 0.7, 50 inner steps, curvature and noise 1."
    return chart_panel(chart, note, keys=keys)


def _region_panel() -> Panel:
    alphas = np.linspace(0, 0.99, 100)
    lines = [
        Polyline(points=_points(alphas, [largest_gamma(float(a)) for a in alphas]), css="series0", name="stable below"),
        Polyline(points=_points(alphas, np.sqrt(2 + alphas**2)), css="series3", name="paper, upper end"),
        Polyline(points=_points(alphas, alphas), css="series4", name="paper, lower end"),
    ]
    chart = Chart(
        title="Which gamma keeps replicas together",
        x_label="outer momentum alpha",
        lines=lines,
        dots=[(0.5, 0.7)],
    )
    keys = [("series0", "stable below"), ("series3", "paper: below"), ("series4", "paper: above"), ("dot", "default")]
    return chart_panel(chart, "Pairs among many workers, no inner progress.", keys=keys)


def _radius_panel() -> Panel:
    gammas = np.linspace(0.005, 2, 200)
    lines = {f"alpha {alpha:g}": _points(gammas, [group_radius(alpha, float(g)) for g in gammas]) for alpha in _MOMENTA}
    note = "Below 1 they come together; above it they drift apart."
    return _panel("Variance between replicas, factor a round", "gamma", lines, note=note, top=2.0)


def _panel(
    heading: str,
    x_label: str,
    lines: Mapping[str, Sequence[Point]],
    keys: Iterable[str] | None = None,
    note: str = "",
    *,
    log_x: bool = False,
    top: float | None = None,
) -> Panel:
    """keys: of the lines in the legend, where those are not their names."""
    chart = Chart(title=heading, x_label=x_label, lines=coloured(lines), log_x=log_x, top=top)
    named = [(line.css, key) for line, key in zip(chart.lines, keys or lines, strict=True)]
    return chart_panel(chart, *([note] if note else []), keys=named)


def _points(xs: Sequence[float] | np.ndarray | range, ys: Sequence[float] | np.ndarray) -> list[Point]:
    return [(float(x), float(y)) for x, y in zip(xs, ys, strict=True)]
