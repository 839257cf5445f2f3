"""Who is ahead of whom, from runs of the same seeds: paired differences, their intervals, Holm's correction.

A seed gives all rows the same weights to begin with and the same data in the same order, so losses are subtracted seed
by seed. d: the n differences of two rows.

    interval   mean d -+ t_{0.975, n-1} s / sqrt(n)          s: standard deviation of d
    p          two-sided, of t = mean d / (s / sqrt(n))
    Holm       the k-th smallest of m claims' p, times m - k + 1, and no smaller than the one before
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any, NamedTuple

from isles.report.panels import Table

CLAIMS = (
    "Validation loss of the second less the first's, seed by seed (never talk: the workers' own losses): above 0, the "
    "first is ahead. 95 % intervals (Student's t); p after Holm's correction over all lines, ahead below 0.05."
)
_LEVEL = 0.05
Summaries = Mapping[str, Sequence[Mapping[str, Any]]]


class Paired(NamedTuple):
    """Differences of two rows: their mean, half the width of its 95 % interval, p of no difference."""

    mean: float
    half: float
    p: float


def paired(differences: Sequence[float]) -> Paired:
    """Of two differences or more."""
    from scipy.special import stdtr, stdtrit

    n = len(differences)
    mean = math.fsum(differences) / n
    error = math.sqrt(math.fsum((one - mean) ** 2 for one in differences) / (n - 1) / n)
    if error == 0:
        return Paired(mean, 0.0, 0.0 if mean else 1.0)
    return Paired(mean, float(stdtrit(n - 1, 0.975)) * error, float(2 * stdtr(n - 1, -abs(mean) / error)))


def holm(ps: Sequence[float]) -> list[float]:
    """The p values, corrected for there being several, in their order."""
    found, largest = [0.0] * len(ps), 0.0
    for place, index in enumerate(sorted(range(len(ps)), key=lambda index: ps[index])):
        largest = max(largest, min(1.0, ps[index] * (len(ps) - place)))
        found[index] = largest
    return found


def never_talks(summary: Mapping[str, Any]) -> bool:
    """Whether the run is of workers that never exchange anything: the mean of their weights is no model of use."""
    return summary.get("method") == "none" and summary.get("workers", 1) > 1


def judged(summary: Mapping[str, Any]) -> float | None:
    """The validation loss that a run is judged by."""
    return summary.get("val_loss_replicas" if never_talks(summary) else "val_loss")


def claims_table(summaries: Summaries) -> Table:
    """Every two rows that have two seeds or more in common; none where no two have."""
    losses = {
        label: {one["seed"]: loss for one in group if (loss := judged(one)) is not None}
        for label, group in summaries.items()
    }
    seeds = {(a, b): sorted(losses[a].keys() & losses[b].keys()) for a, b in combinations(losses, 2)}
    pairs = [pair for pair, common in seeds.items() if len(common) > 1]
    found = [paired([losses[b][seed] - losses[a][seed] for seed in seeds[a, b]]) for a, b in pairs]
    rows = []
    for (first, second), one, p in zip(pairs, found, holm([one.p for one in found]), strict=True):
        verdict = "open" if p >= _LEVEL else first if one.mean > 0 else second
        interval = f"{one.mean - one.half:+.4f} to {one.mean + one.half:+.4f}"
        rows.append([first, second, f"{one.mean:+.4f}", interval, f"{p:.3g}", verdict])
    return Table(heads=["first", "second", "difference", "interval", "p", "ahead"], rows=rows, names=2)
