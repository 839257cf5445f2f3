"""What is run: the rows of the comparison and of the sweep over sizes, each with a configuration for every seed.

The rows take the embedded run's tables of settings as they are, so every method gets as much tuning as `isles train
--method NAME` has. Results of the virtual backend do not depend on the links, only clocks do: seed i runs on topology
i, so three seeds give a spread of the losses and times on three topologies at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from isles.errors import unknown_name
from isles.models.sizes import shape_of
from isles.replicas import METHODS
from isles.report.comparison import run_folder
from isles.training.config.reading import read_config
from isles.training.config.sections import Config

Settings = Mapping[str, Any]
"""{"section.key": value}"""


@dataclass(frozen=True, kw_only=True)
class Row:
    """A method with settings of its own. note: what to know about the row, in words."""

    method: str
    settings: Settings = field(default_factory=dict)
    note: str = ""

    @property
    def timed(self) -> bool:
        """Whether it runs on the virtual clock."""
        return "world.backend" not in self.settings


ROWS: dict[str, Row] = {name: Row(method=name) for name in METHODS if name not in ("fsdp", "custom")} | {
    "fsdp": Row(
        method="fsdp",
        settings={"world.backend": "distributed"},
        note="shards the model through torch, which the virtual clock cannot do: four real processes, no virtual time",
    ),
    "diloco-islands": Row(
        method="diloco",
        settings={"world.inner": 2},
        note="two islands of two workers, `ddp` inside an island over a local network, `diloco` across them",
    ),
}
"""By label. `custom` is no method but a box of parts (docs/composing.md)."""

TOPOLOGIES = {
    "datacentres": "two data centres",
    "home-fibre": "home fibre",
    "worldwide": "volunteers worldwide",
}
"""Preset of `world.links`, in words; seed i runs on number i, round and round."""
STEP_SECONDS = 0.1  # virtual

SWEPT = ("ddp", "diloco", "streaming-diloco", "eager")
"""The first is what the others are measured against."""
SIZES = ("0.12M", "0.53M", "2M")
SWEEP: Settings = {
    "world.workers": 2,  # as in the Eager paper's table
    "world.backend": "virtual",
    "world.step_seconds": STEP_SECONDS,
    "model.context": 128,  # of all sizes, so that a step is as many tokens
    "replicas.sync_every": 15,
}
_RATE, _WIDTH = 6e-3, 64  # the embedded run's learning rate, and the width that it was chosen for

QUICK: Settings = {
    "model.context": 32,
    "data.batch_size": 1,
    "data.validation_sequences": 8,
    "inner.warmup_steps": 2,
    "replicas.sync_every": 4,
    "replicas.every_step_until": 2,
}
"""Over all others: for a look at the machinery, in seconds."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One run. key: the row's label; with a size behind it in the sweep."""

    key: tuple[str, ...]
    seed: int
    config: Config

    @property
    def folder(self) -> Path:
        """Inside the folder of all runs."""
        return Path("scaling" if len(self.key) > 1 else "methods", run_folder("-".join(self.key), self.seed))

    @property
    def name(self) -> str:
        """For people."""
        return f"{' '.join(self.key)}, seed {self.seed}"


def method_cases(
    labels: Sequence[str], seeds: Sequence[int], steps: int, over: Settings, words: Sequence[str] = ()
) -> list[Case]:
    """Every row with every seed, seed by seed. over: settings over those of the rows; words: more of them, as of --set.
    ValueError for an unknown label, or for settings that are refused.
    """
    for label in labels:
        if label not in ROWS:
            raise ValueError(unknown_name("row", label, ROWS))
    places = list(TOPOLOGIES)
    cases = []
    for seed in seeds:
        for label in labels:
            row = ROWS[label]
            flags = {"world.backend": "virtual", "world.links": places[seed % len(places)], **row.settings}
            flags = {"world.step_seconds": STEP_SECONDS, **flags, **over}
            config = _config(row.method, seed, steps, flags, words)
            cases.append(Case(key=(label,), seed=seed, config=config))
    return cases


def sweep_cases(
    sizes: Sequence[str], seeds: Sequence[int], steps: int, over: Settings, words: Sequence[str] = ()
) -> list[Case]:
    """Every size with every method and seed; over, words: as in `method_cases`. The learning rate falls as the model
    gets wider: rate x width is that of the embedded run.
    """
    cases = []
    for seed in seeds:
        for size in sizes:
            for name in SWEPT:
                flags = {"model.size": size, **SWEEP}
                width = shape_of(size).d_model
                config = _config(name, seed, steps, {**flags, "inner.lr": _RATE * _WIDTH / width, **over}, words)
                cases.append(Case(key=(name, size), seed=seed, config=config))
    return cases


def _config(method: str, seed: int, steps: int, flags: Settings, words: Sequence[str]) -> Config:
    common = {"replicas.method": method, "run.seed": seed, "run.steps": steps, "run.validate_every": 0}
    return read_config(None, {**common, **flags}, words, shared=True)
