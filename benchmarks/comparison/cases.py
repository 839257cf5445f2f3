"""What is run: two regimes with every row, and a ladder of sizes, each with a configuration for every seed.

    short    400 steps, 20 rounds of 20                         0.12M parameters
    long     1,500 steps, 150 rounds of 10                      0.03M
    ladder   20 tokens a parameter, five rows                   0.03M, 0.12M

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

from isles.cli.several.rows import one_worker
from isles.cli.several.terms import applied, at_equal
from isles.errors import unknown_name
from isles.models.sizes import parameters
from isles.replicas import METHODS
from isles.report.comparison import ALONE, NEVER, run_folder
from isles.training.config.reading import read_config
from isles.training.config.sections import Config
from isles.training.config.tokens import tokens_a_step

Settings = Mapping[str, Any]
"""{"section.key": value}"""
Key = tuple[str, ...]
"""(part, row), or (part, row, size)."""
HERE = Path(__file__).parent
PARTS = ("short", "long", "ladder")


@dataclass(frozen=True, kw_only=True)
class Row:
    """A method with settings of its own. note: what to know about the row, in words."""

    method: str
    settings: Settings = field(default_factory=dict)
    note: str = ""


ROWS: dict[str, Row] = {name: Row(method=name) for name in METHODS if name not in ("fsdp", "custom")} | {
    "diloco-islands": Row(
        method="diloco",
        settings={"world.inner": 2},
        note="two islands of two workers, `ddp` inside an island over a local network, `diloco` across them",
    ),
    ALONE: Row(method=NEVER, note="reads the tokens of all, in as many more steps of its own batch"),
}
"""By label. `custom` is no method but a box of parts (docs/composing.md); `fsdp` is the mathematics of `ddp`."""

TOPOLOGIES = {
    "datacentres": "two data centres",
    "home-fibre": "home fibre",
    "worldwide": "volunteers worldwide",
}
"""Preset of `world.links`, in words."""
AS = "1B"
SMALL: Settings = {"model.d_model": 32, "model.ffn": 96}
REGIMES: dict[str, Settings] = {
    "short": {"run.steps": 400, "inner.warmup_steps": 40},
    "long": {"run.steps": 1500, "inner.warmup_steps": 100, "replicas.sync_every": 10, **SMALL},
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
    keys = [(part, label) for part in parts if part in REGIMES for label in ROWS]
    keys += [("ladder", label, size) for size in SIZES for label in LADDER_ROWS if "ladder" in parts]
    keys = [key for key in keys if labels is None or key[1] in labels]
    return [_case(key, seed, over, words, (tuned or {}).get(key, {})) for seed in seeds for key in keys]


def _case(key: Key, seed: int, over: Settings, words: Sequence[str], tuned: Settings) -> Case:
    row, own = ROWS[key[1]], SIZES[key[2]] if key[0] == "ladder" else REGIMES[key[0]]
    flags = {"replicas.method": row.method, "run.seed": seed, "world.backend": "virtual", "model.device": "cpu"}
    base = read_config(None, {**flags, **own, **row.settings, **over}, words, shared=True)
    if key[0] == "ladder" and "run.steps" not in over:
        each = tokens_a_step(base, base.replicas_in_all)
        steps = round(TOKENS_A_PARAMETER * parameters(base.model.shape()) / each)
        base = applied(base, {"run.steps": steps, "inner.warmup_steps": steps // 10})
    base = one_worker(base) if key[1] == ALONE else base
    config = at_equal("tokens", applied(base, tuned), base)
    shown = {"run.validate_every": max(config.run.steps // SHOWN, 1), "run.log_every": max(config.run.steps // 40, 1)}
    return Case(key=key, seed=seed, base=base, config=applied(config, shown))
