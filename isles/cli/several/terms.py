"""Equal terms: a run with other settings for as many tokens, steps or virtual seconds; settings that were tuned."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from isles.parsing import parse_toml
from isles.report.tuning import TUNED, complete, read_tuning
from isles.tables import changed
from isles.training.config.reading import to_toml
from isles.training.config.sections import Config
from isles.training.config.tokens import tokens_a_step


def at_equal(at: str, made: Config, base: Config) -> Config:
    """`made`, which is `base` with other settings, for as many tokens, steps or seconds as `base`. A batch takes time
    by its size; the warm-up is the same share of the run.
    """
    ratio = tokens_a_step(made, made.replicas_in_all) / tokens_a_step(base, base.replicas_in_all)
    made = changed(made, {"world.virtual.step_seconds": base.world.virtual.step_seconds * ratio})
    share = {"tokens": 1 / ratio, "steps": 1.0}.get(at) or pace(base) / pace(made)
    steps = max(round(base.run.steps * share), 1)
    warmup = round(base.inner.warmup_steps * steps / base.run.steps)
    return changed(made, {"inner.warmup_steps": warmup, "run.steps": steps, "run.tokens": 0})


def pace(config: Config) -> float:
    """Virtual seconds of an inner step, waiting included, by the plan of the run."""
    from isles.training.plan.run_plan import plan_run

    plan = plan_run(config)
    found = plan.step_seconds if plan.time is None else plan.time.step
    return found or config.world.virtual.step_seconds


def tuned_in(folder: Path, rows: Mapping[str, Config]) -> dict[str, Mapping[str, Any]]:
    """The best settings of `isles tune --out FOLDER/ROW` for each of `rows` that has such a search; notes on those that
    have none, or one on another model. ValueError: nobody has.
    """
    found: dict[str, Mapping[str, Any]] = {}
    for name, config in rows.items():
        place = folder / name.replace(":", ".")
        study = read_tuning(place) if (place / TUNED).is_file() else {"trials": []}
        if best := complete(study):
            found[name] = best[0]["settings"]
            if parse_toml(study["config"]).get("model") != parse_toml(to_toml(config))["model"]:
                print(f"note: {place} was tuned on another model", file=sys.stderr)
    if not found:
        raise ValueError(f"--tuned {folder}: holds no finished search in {', '.join(rows)}; make one with isles tune")
    if missing := [name for name in rows if name not in found]:
        print(f"note: not tuned, for {folder} holds no search: {', '.join(missing)}", file=sys.stderr)
    return found
