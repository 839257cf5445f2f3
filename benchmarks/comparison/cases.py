"""What is run: two regimes with every row, and a ladder of sizes, each with a configuration for every seed.

    long     1,200 steps, 150 rounds of 8                       0.03M parameters
    ladder   20 tokens a parameter, five rows                   0.03M, 0.12M
    short    400 steps, 20 rounds of 20                         0.12M

Every row but for its settings is the embedded run: 4 workers, equal tokens. Settings are those of SETTINGS, which
`tuning` finds on other seeds and other text. Losses do not depend on links: clocks are those of a model of 1B, priced
over each of TOPOLOGIES afterwards.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from isles.base.errors import unknown_name
from isles.base.tables import changed
from isles.cli.several import at_equal, one_worker
from isles.models.sizes import parameters
from isles.replicas import METHODS
from isles.report.comparison import ALONE, NEVER, run_folder
from isles.training.config.reading import read_config, tokens_a_step
from isles.training.config.sections import Config

Settings = Mapping[str, Any]
"""{"section.key": value}"""
Key = tuple[str, ...]
"""(part, row), or (part, row, size)."""
HERE = Path(__file__).parent
PARTS, FIRST = ("long", "ladder", "short"), ("long", "ladder")
"""FIRST: those of a first pass, about three hours on two idle cores."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """A method with settings of its own. note: what to know about the row, in words. searched: whether the search has
    the method's own settings, too, or the inner optimizer's and the batch alone.
    """

    method: str
    settings: Settings = field(default_factory=dict)
    note: str = ""
    searched: bool = True


ROWS: dict[str, Row] = {name: Row(method=name) for name in METHODS if name not in ("fsdp", "custom")} | {
    "sparta": Row(
        method="sparta", settings={"replicas.sync_every": 1}, note="a small part at every step, as it is meant"
    ),
    "diloco-islands": Row(
        method="diloco",
        settings={"world.inner": 2},
        note="two islands of two workers, `ddp` inside an island over a LAN of 1 Gbit/s, `diloco` across them",
    ),
    "diloco-100": Row(
        method="diloco",
        settings={"replicas.sync_every": 100, "replicas.outer_lr": 0.7, "replicas.outer_momentum": 0.3},
        note="as NoLoCo's paper (arXiv 2506.10911) runs DiLoCo: H = 100, outer 0.7/0.3, not searched",
        searched=False,
    ),
    "noloco-50": Row(
        method="noloco",
        settings={"replicas.sync_every": 50, "replicas.outer_lr": 0.7, "replicas.outer_momentum": 0.5},
        note="as NoLoCo's paper runs it: H = 50, outer 0.7/0.5, not searched",
        searched=False,
    ),
    ALONE: Row(method=NEVER, note="reads the tokens of all, in as many more steps of its own batch"),
}
"""By label. `custom` is no method but a box of parts (docs/composing.md); `fsdp` is the mathematics of `ddp`."""

TOPOLOGIES = {
    "datacentres": "two data centres",
    "home-fibre": "home fibre",
    "worldwide": "volunteers worldwide",
}
"""Preset of `world.virtual.links`, in words."""
AS, AS_TOKENS = "1B", 131_072
"""What runs are priced as: a size, and tokens of a worker's step before the batch is tuned."""
SMALL: Settings = {"model.d_model": 32, "model.ffn": 96}
REGIMES: dict[str, Settings] = {
    "long": {
        "run.steps": 1200,
        "inner.warmup_steps": 80,
        "replicas.sync_every": 8,
        "data.batch_size": 4,
        "model.context": 64,
        **SMALL,
    },
    "short": {"run.steps": 400, "inner.warmup_steps": 40},
}
LADDER_ROWS = ("ddp", "diloco", "noloco", "streaming-diloco", ALONE)
SIZES: dict[str, Settings] = {"0.03M": SMALL, "0.12M": {}}
TOKENS_A_PARAMETER = 20
SHOWN = 15  # points of a loss curve

QUICK: Settings = {
    "model.d_model": 16,
    "model.ffn": 24,
    "model.layers": 1,
    "model.context": 32,
    "data.batch_size": 2,
    "data.validation_sequences": 8,
    "inner.warmup_steps": 2,
    "replicas.sync_every": 4,
    "replicas.every_step_until": 2,
    "world.workers": 2,
}
"""Over all others: for a look at the machinery, in seconds."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One run. base: with the settings that are not tuned."""

    key: Key
    seed: int
    base: Config
    config: Config

    @property
    def folder(self) -> Path:
        """Inside the folder of all runs."""
        return Path(self.key[0], run_folder("-".join(self.key[1:]), self.seed))

    @property
    def name(self) -> str:
        """For people."""
        return f"{' '.join(self.key)}, seed {self.seed}"

    @property
    def priced_as(self) -> str:
        """For `priced`: a step is paid for by its tokens, so at equal tokens a batch costs nothing."""
        own, base = (config.world.virtual.step_seconds for config in (self.config, self.base))
        return f"{AS}, H100, {round(AS_TOKENS * own / base)}"


def tuned_settings(file: Path) -> dict[Key, Settings]:
    """Of a file of `tuning`."""
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    return {tuple(one["key"]): one["settings"] for one in map(json.loads, lines)}


def cases_of(
    parts: Sequence[str],
    labels: Sequence[str] | None,
    seeds: Sequence[int],
    over: Settings,
    words: Sequence[str] = (),
    tuned: Mapping[Key, Settings] | None = None,
) -> list[Case]:
    """Every row of every part, seed by seed. labels: those alone. over: settings over those of the rows; words: more of
    them, as of --set. ValueError for an unknown label, or for settings that are refused.
    """
    for label in labels or ():
        if label not in ROWS:
            raise ValueError(unknown_name("row", label, ROWS))
    regimes: dict[str, list[Key]] = {part: [(part, label) for label in ROWS] for part in REGIMES}
    regimes["ladder"] = [("ladder", label, size) for size in SIZES for label in LADDER_ROWS]
    keys = [key for part in parts for key in regimes[part]]
    keys = [key for key in keys if labels is None or key[1] in labels]
    return [_case(key, seed, over, words, (tuned or {}).get(key, {})) for seed in seeds for key in keys]


def _case(key: Key, seed: int, over: Settings, words: Sequence[str], tuned: Settings) -> Case:
    row, own = ROWS[key[1]], SIZES[key[2]] if key[0] == "ladder" else REGIMES[key[0]]
    flags = {"replicas.method": row.method, "run.seed": seed, "world.backend": "virtual", "model.device": "cpu"}
    base = read_config(None, {**flags, **own, **row.settings, **over}, words, shared=True)
    if key[0] == "ladder" and "run.steps" not in over:
        each = tokens_a_step(base, base.replicas_in_all)
        steps = round(TOKENS_A_PARAMETER * parameters(base.model.shape()) / each)
        base = changed(base, {"run.steps": steps, "inner.warmup_steps": steps // 10})
    base = one_worker(base) if key[1] == ALONE else base
    config = at_equal("tokens", changed(base, tuned), base)
    shown = {"run.validate_every": max(config.run.steps // SHOWN, 1), "run.log_every": max(config.run.steps // 40, 1)}
    return Case(key=key, seed=seed, base=base, config=changed(config, shown))
