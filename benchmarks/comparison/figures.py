"""The numbers of the runs, row by row: everything that the page, the pictures and the claims say comes from here."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import mean

from benchmarks.comparison.cases import Case, Key
from benchmarks.comparison.runs import RunRow, finished
from isles.models.config import ModelConfig
from isles.plan.run_plan import plan_run
from isles.report.comparison import NEVER, Paired, paired

REFERENCE = ModelConfig(size="eager-35M", device="cpu")
"""What memory is counted on: at the small run's size the fixed parts would hide what grows with the model."""


@dataclass(frozen=True)
class Spread:
    """A number over the seeds. half: half of its 95 % interval (Student's t); None for a single seed."""

    mean: float
    low: float
    high: float
    half: float | None

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """Of at least one value."""
        values = list(values)
        return cls(mean(values), min(values), max(values), paired(values).half if len(values) > 1 else None)


@dataclass(frozen=True)
class Figures:
    """The runs of one row that are there, by seed."""

    key: Key
    cases: dict[int, Case]
    rows: dict[int, RunRow]

    @property
    def label(self) -> str:
        """The row's name."""
        return self.key[1]

    def values(self, name: str) -> dict[int, float]:
        """An entry of summary.json by seed, where it is there."""
        found = {seed: one["summary"].get(name) for seed, one in self.rows.items()}
        return {seed: value for seed, value in found.items() if value is not None}

    @property
    def loss(self) -> dict[int, float]:
        """By seed, what the row is judged by: the loss of its one model. Workers that never exchange have none worth
        the name (the mean of their weights), so `none` is judged by the mean of the workers' own losses.
        """
        return self.values("val_loss_replicas" if self.label == NEVER else "val_loss")

    def spread(self, name: str) -> Spread | None:
        """Over the seeds."""
        found = self.values(name)
        return Spread.of(found.values()) if found else None

    def priced(self, name: str, links: str) -> float | None:
        """Of the whole run, priced over these: "virtual_seconds", "priced_bytes_per_worker"."""
        found = [one["prices"][links][name] for one in self.rows.values() if links in one["prices"]]
        return mean(found) if found else None

    def loss_after(self, share: float) -> list[float]:
        """Of each seed, after a share of its steps; of one that has ended what it ended with."""
        return [_at(one["validation"], share) for one in self.rows.values()]

    @cached_property
    def memory(self) -> float:
        """Bytes a parameter of a worker at its fullest, weights and the inner optimizer's state included, without
        activations; on `REFERENCE`, by the plan of `isles train --dry-run`.
        """
        config = next(iter(self.cases.values())).config
        planned = plan_run(replace(config, model=replace(REFERENCE, dtype=config.model.dtype)))
        return planned.fullest.memory.peak / planned.parameters


def _at(curve: Sequence[Sequence[float]], share: float) -> float:
    """A loss after a share of the steps, between two that were judged."""
    step = share * curve[-1][0]
    place = bisect.bisect_left([at for at, _ in curve], step)
    if place in (0, len(curve)):
        return curve[min(place, len(curve) - 1)][1]
    (left, before), (right, after) = curve[place - 1], curve[place]
    return before + (after - before) * (step - left) / (right - left)


def collect(cases: Iterable[Case], rows: Path) -> dict[Key, Figures]:
    """What is there, by row, in the order of `cases`; rows without a finished run are left out."""
    found: dict[Key, Figures] = {}
    there = finished(rows)
    for case in cases:
        if (one := there.get((case.key, case.seed))) is not None:
            row = found.setdefault(case.key, Figures(case.key, {}, {}))
            row.cases[case.seed], row.rows[case.seed] = case, one
    return found


def differences(worse: Figures, better: Figures) -> dict[int, float]:
    """Loss of `worse` minus that of `better`, by seed, of the seeds that both have."""
    one, other = worse.loss, better.loss
    return {seed: one[seed] - other[seed] for seed in sorted(one.keys() & other.keys())}


def behind(row: Figures, reference: Figures) -> Paired | None:
    """How far a row is behind another; None: fewer than two seeds have both."""
    found = list(differences(row, reference).values())
    return paired(found) if len(found) > 1 else None


def front(rows: Iterable[Figures], links: str) -> list[str]:
    """The rows that no other one beats: none has at most their loss, hours and bytes as priced over `links`, and less
    of one.
    """
    named = ("virtual_seconds", "priced_bytes_per_worker")
    costs = {row.label: (mean(row.loss.values()), *(row.priced(one, links) or 0.0 for one in named)) for row in rows}
    return [
        label
        for label, own in costs.items()
        if not any(other != own and all(x <= y for x, y in zip(other, own, strict=True)) for other in costs.values())
    ]
