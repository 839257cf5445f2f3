"""The numbers of the runs, row by row: everything that the page, the pictures and the claims say comes from here."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import mean, stdev

from benchmarks.comparison.cases import TOPOLOGIES, Case
from benchmarks.comparison.runs import Summary, finished
from isles.models.config import ModelConfig
from isles.training.dry_run import dry_run

REFERENCE = ModelConfig(size="eager-35M", device="cpu")
"""What memory is counted on: at the small run's size the fixed parts would hide what grows with the model."""


@dataclass(frozen=True)
class Spread:
    """A number over the seeds. deviation: the standard deviation; None for a single seed."""

    mean: float
    low: float
    high: float
    deviation: float | None

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """Of at least one value."""
        values = list(values)
        return cls(mean(values), min(values), max(values), stdev(values) if len(values) > 1 else None)


@dataclass(frozen=True)
class Figures:
    """The runs of one row that are there, by seed."""

    key: tuple[str, ...]
    cases: dict[int, Case]
    summaries: dict[int, Summary]

    @property
    def label(self) -> str:
        """The row's name."""
        return self.key[0]

    def values(self, name: str) -> dict[int, float]:
        """An entry of summary.json by seed, where it is there."""
        return {seed: one[name] for seed, one in self.summaries.items() if one.get(name) is not None}

    @property
    def loss(self) -> dict[int, float]:
        """By seed, what the row is judged by: the loss of its one model. Workers that never exchange have none worth
        the name (the mean of their weights), so `none` is judged by the mean of the workers' own losses.
        """
        return self.values("val_loss_replicas" if self.label == "none" else "val_loss")

    def spread(self, name: str) -> Spread | None:
        """Over the seeds."""
        found = self.values(name)
        return Spread.of(found.values()) if found else None

    @property
    def seconds(self) -> dict[str, float]:
        """Virtual seconds of the whole run by preset of the links; the mean where several seeds ran on one."""
        times: dict[str, list[float]] = {}
        for seed, value in self.values("virtual_seconds").items():
            times.setdefault(self.cases[seed].config.world.links, []).append(value)
        return {links: mean(times[links]) for links in TOPOLOGIES if links in times}

    @cached_property
    def memory(self) -> float:
        """Bytes a parameter of a worker at its fullest, weights and the inner optimizer's state included, without
        activations; on `REFERENCE`, by the plan of `isles train --dry-run`.
        """
        config = next(iter(self.cases.values())).config
        planned = dry_run(replace(config, model=replace(REFERENCE, dtype=config.model.dtype)))
        return planned.peak / planned.parameters


def collect(cases: Iterable[Case], out: Path) -> dict[tuple[str, ...], Figures]:
    """What is there, by row, in the order of `cases`; rows without a finished run are left out."""
    found: dict[tuple[str, ...], Figures] = {}
    for case in cases:
        summary = finished(case, out)
        if summary is not None:
            row = found.setdefault(case.key, Figures(case.key, {}, {}))
            row.cases[case.seed] = case
            row.summaries[case.seed] = summary
    return found


def differences(worse: Figures, better: Figures) -> dict[int, float]:
    """Loss of `worse` minus that of `better`, by seed, of the seeds that both have."""
    one, other = worse.loss, better.loss
    return {seed: one[seed] - other[seed] for seed in sorted(one.keys() & other.keys())}
