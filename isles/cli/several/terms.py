"""Equal terms: a run with other settings for as many tokens, steps or virtual seconds; settings that were tuned."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from isles.parsing import parse_toml
from isles.report.tuning import TUNED, complete, read_tuning
from isles.training.config.reading import to_toml
from isles.training.config.sections import Config
from isles.training.config.tokens import tokens_a_step

TunedSettings = Mapping[str, Mapping[str, Any]]
"""{row: {"section.key": value}}"""
_FREE = ("data.batch_size", "world.step_seconds", "run.steps", "run.seed", "replicas.seed")  # of a search and a row


def applied(config: Config, settings: Mapping[str, Any]) -> Config:
    """`config` with other settings. ValueError where they are refused."""
    sections: dict[str, dict[str, Any]] = {}
    for key, value in settings.items():
        section, _, name = key.partition(".")
        sections.setdefault(section, {})[name] = value
    return replace(config, **{name: replace(getattr(config, name), **own) for name, own in sections.items()})


def at_equal(at: str, made: Config, base: Config) -> Config:
    """`made`, which is `base` with other settings, for as many tokens, steps or seconds as `base`. A batch takes time
    by its size; the warm-up is the same share of the run.
    """
    ratio = tokens_a_step(made, made.replicas_in_all) / tokens_a_step(base, base.replicas_in_all)
    made = applied(made, {"world.step_seconds": base.world.step_seconds * ratio})
    share = {"tokens": 1 / ratio, "steps": 1.0}.get(at) or pace(base) / pace(made)
    steps = max(round(base.run.steps * share), 1)
    warmup = round(base.inner.warmup_steps * steps / base.run.steps)
    return applied(made, {"inner.warmup_steps": warmup, "run.steps": steps, "run.tokens": 0})


def pace(config: Config) -> float:
    """Virtual seconds of an inner step, waiting included, by the plan of the run."""
    from isles.training.dry_run import dry_run

    plan = dry_run(config)
    share = None if plan.transfers is None else plan.transfers.utilisation
    return (plan.step_seconds or config.world.step_seconds) / (share or 1.0)


def tuned_in(folder: Path, rows: Mapping[str, Config]) -> TunedSettings:
    """The best settings of `isles tune --out FOLDER/ROW` for each of `rows` that has such a search; a note on those
    that have none, and on what was searched on another model, text or number of workers. ValueError: nobody has.
    """
    found: dict[str, Mapping[str, Any]] = {}
    for name, config in rows.items():
        place = folder / name.replace(":", ".")
        study = read_tuning(place) if (place / TUNED).is_file() else {"trials": []}
        if best := complete(study):
            found[name] = best[0]["settings"]
            there, here = (_flat(parse_toml(text), found[name]) for text in (study["config"], to_toml(config)))
            if differ := ", ".join(key for key in here if key in there and there[key] != here[key]):
                print(f"note: {place} was tuned with other {differ}", file=sys.stderr)
    if not found:
        raise ValueError(f"--tuned {folder}: holds no finished search in {', '.join(rows)}; make one with isles tune")
    if missing := [name for name in rows if name not in found]:
        print(f"note: not tuned, for {folder} holds no search: {', '.join(missing)}", file=sys.stderr)
    return found


def _flat(tables: Mapping[str, Mapping[str, Any]], searched: Iterable[str]) -> dict[str, Any]:
    """{"section.key": value} of what a search takes as it is."""
    flat = {f"{name}.{key}": value for name, table in tables.items() for key, value in table.items()}
    return {key: flat[key] for key in flat if not key.startswith("inner.") and key not in (*_FREE, *searched)}
