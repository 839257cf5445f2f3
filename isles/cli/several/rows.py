"""The rows of a comparison: methods, each with settings of its own, at equal terms.

    none                                             a method
    diloco@replicas.outer_lr=0.4@inner.lr=0.01       the same with settings over those of all
    package.module:Class                             one of your own
    fast                                             a table [methods.fast] of CONFIG.toml, which says method = "diloco"

Two rows are always there: workers that never exchange (`none`), and one worker that reads all the tokens.

Equal terms: as many tokens, steps or virtual seconds, with settings that were tuned.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from isles.base.parsing import parse_toml
from isles.base.tables import changed
from isles.report.comparison import ALONE, NEVER
from isles.report.tuning import TUNED, complete, read_tuning
from isles.training.config.reading import to_toml, tokens_a_step
from isles.training.config.sections import Config

if TYPE_CHECKING:
    from isles.report.panels import Table
    from isles.training.config.sections import Config

    Configs = dict[tuple[str, int], Config]
    Tuned = Mapping[str, Mapping[str, Any]] | None

USUAL = "none,ddp,localsgd,diloco,noloco"
_QUICK = (
    "model.d_model=16 model.layers=1 model.heads=2 model.ffn=24 model.context=16 data.batch_size=2 inner.lr=0.01 "
    "data.validation_sequences=8 inner.warmup_steps=2 replicas.sync_every=2 run.validate_every=0 run.steps=12 "
    "world.workers=2 world.backend=virtual"
)
_SEEDED = ("run.seed", "replicas.seed")


@dataclass(frozen=True)
class ComparisonRow:
    """name: a method, or a table of CONFIG.toml. settings: "section.key=value", over those of all rows."""

    name: str
    settings: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """As the user writes it."""
        return "@".join((self.name, *self.settings))


def quick() -> dict[str, Any]:
    """--quick, under the other options: a model of no use, in seconds."""
    from isles.base.tables import parse_value

    return {key: parse_value(value) for key, value in (part.split("=") for part in _QUICK.split())}


def names(text: str, option: str) -> list[str]:
    """What stands between the commas outside of brackets; ValueError for nothing, or for one twice."""
    found = [name.strip() for name in re.split(r",(?![^\[{]*[\]}])", text) if name.strip()]
    if not found or len(set(found)) < len(found):
        raise ValueError(f"{option} {text}: name each one once, separated by commas")
    return found


def rows_of(methods: str) -> list[ComparisonRow]:
    """The rows that --methods names."""
    parts = [part.split("@") for part in names(methods, "--methods")]
    return [ComparisonRow(name, tuple(settings)) for name, *settings in parts]


class SharedSettings(NamedTuple):
    """What a user says of every row: CONFIG.toml, the settings of options, and --set."""

    config: str | None
    flags: Mapping[str, Any]
    assignments: Sequence[str]


def read_all(
    shared: SharedSettings, rows: Sequence[ComparisonRow], seeds: Sequence[int], tuned: Tuned = None
) -> Configs:
    """All configurations, before the first is run: a slip in the last should not cost the hours of the others; over
    what was `tuned`, for as many tokens.
    """
    from isles.training.config.reading import read_config

    config, flags, assignments = shared
    outside = [row.name for row in rows if ":" in row.name]

    def read(row: ComparisonRow, seed: int) -> Config:
        own, settings = {**flags, "replicas.method": row.name, "run.seed": seed}, [*assignments, *row.settings]
        base = read_config(config, own, settings, shared=True, beside=outside)
        if tuned is None or row.name not in tuned:
            return base
        below = [f"{key}={value}" for key, value in tuned[row.name].items()]
        return at_equal("tokens", read_config(config, own, [*below, *settings], shared=True, beside=outside), base)

    return {(row.label, seed): read(row, seed) for row in rows for seed in seeds}


def swept(shared: SharedSettings, rows: Sequence[ComparisonRow], sweep: str) -> list[ComparisonRow]:
    """Each row once for every value of --sweep KEY=A,B,C; one whose method does not have the key stays as it is."""
    key, equals, text = sweep.partition("=")
    if not equals or "." not in key:
        raise ValueError(f"--sweep {sweep}: write --sweep section.key=A,B,C")
    values, found, name = names(text, f"--sweep {key}"), list[ComparisonRow](), key.split(".")[1]
    read = read_all(shared, rows, [0])
    for row in rows:
        one = read[row.label, 0]
        has = not key.startswith("replicas.") or hasattr(one.replicas, name)
        if has and (one.method != "none" or not key.startswith("world.")):  # nobody talks over a world there
            found += [ComparisonRow(row.name, (*row.settings, f"{key}={value}")) for value in values]
        else:
            found.append(row)
    if found == list(rows):
        raise ValueError(f"--sweep {key}: no method of --methods has it")
    return found


def read_beside(
    shared: SharedSettings, rows: Sequence[ComparisonRow], seeds: Sequence[int], tuned: Tuned = None
) -> Configs:
    """`read_all`, and beside them the rows that all are held against; a note where one cannot be."""
    from isles.base.tables import changed

    configs = read_all(shared, rows, seeds, tuned)
    # Where nothing is exchanged nothing can be dropped.
    calm = shared._replace(assignments=[*shared.assignments, "world.drop_outer=0"])
    try:
        never = read_all(calm, [ComparisonRow(NEVER)], seeds)
        alone = {(ALONE, seed): one_worker(one) for (_, seed), one in never.items()}
        if tuned is not None:
            never = read_all(calm, [ComparisonRow(NEVER)], seeds, tuned)
            alone = {key: at_equal("tokens", changed(one, tuned.get(ALONE, {})), one) for key, one in alone.items()}
        return {**configs, **never, **alone}
    except ValueError as error:
        print(f"note: no rows of workers that never talk, and of one worker: {error}", file=sys.stderr)
        return configs


def one_worker(config: Config) -> Config:
    """`config`, in which nobody talks, with one worker that reads the tokens of all: as many steps more."""
    from isles.base.tables import changed
    from isles.pipeline.config import PipelineConfig
    from isles.training.config.reading import ending

    times, run, world = config.replicas_in_all * config.world.inner, config.run, config.world
    steps = {key: getattr(run, key) * times for key in ("steps", "log_every", "validate_every", "checkpoint_every")}
    world = changed(world, {"workers": 1, "inner": 1, "inside": "ddp", "virtual.inner_links": "lan"})
    data = replace(config.data, batch_size=config.data.batch_size_per_worker(times))
    return ending(replace(config, data=data, pipeline=PipelineConfig(), world=world, run=replace(run, **steps)))


def of_runs(folders: Sequence[Path], out: Path, as_: str | None, over: Sequence[str] | None) -> dict[str, list[Any]]:
    """Finished runs by label, as compare.json in `out` holds them: runs that differ in the seed alone are one row. A
    note where they are not at equal terms. as_: what they are priced as, over their own links or each of these.
    """
    from isles.plan.prices import priced
    from isles.report.rundir import read_run
    from isles.training.config.reading import read_config

    rows: dict[str, list[tuple[dict[str, Any], dict[str, Any]]]] = {}
    for folder in folders:
        run = read_run(folder)
        if run.summary is None:
            raise ValueError(f"{folder}: this run has not ended; isles resume {folder} goes on with it")
        flat = {f"{name}.{key}": value for name, table in run.config.items() for key, value in table.items()}
        terms = {key: value for key, value in flat.items() if key not in _SEEDED}
        summary = {**run.summary, "folder": os.path.relpath(folder, out)}
        if as_ is not None and "joins" in summary:
            raise ValueError(f"{folder}: workers come and go in it, so it hangs on time, which --as does not price")
        for links in over or [terms.get("world.virtual.links")]:
            price = {} if as_ is None else priced(read_config(str(folder / "config.toml"), {}, []), as_, links)
            setting = {**terms, "world.virtual.links": links}
            rows.setdefault(repr(sorted(setting.items())), []).append(({**summary, **price}, setting))
    found: dict[str, list[dict[str, Any]]] = {}
    for group in rows.values():
        summaries, terms = [summary for summary, _ in group], group[0][1]
        method = summaries[0]["method"]
        others = [other for (summary, other), *_ in rows.values() if summary["method"] == method]
        keys = [key for key in terms if any(other.get(key) != terms[key] for other in others)]
        label = "@".join([method, *(f"{key}={terms[key]}" for key in keys)])
        if len({summary["seed"] for summary in summaries}) < len(summaries):
            raise ValueError(f"{label}: two runs of the same settings and seed; give one of them")
        found[label] = summaries
    for key in ("tokens", "parameters", "corpus_sha256"):
        if len({summary.get(key) for group in found.values() for summary in group}) > 1:
            print(f"note: not at equal terms: {key} differs between these runs", file=sys.stderr)
    return found


def estimate(configs: Configs) -> Table:
    """What is to be run, a line a row, and about how long it takes here. Measures a step."""
    from isles.models.model_limits import limits
    from isles.plan.computing import measured_step
    from isles.report.panels import Table
    from isles.report.units import format_seconds
    from isles.training.config.reading import tokens_a_step

    measured, lines, total = dict[object, float](), [], 0.0
    for label in dict.fromkeys(label for label, _ in configs):
        group = [one for (name, _), one in configs.items() if name == label]
        one = group[0]
        readers = one.replicas_in_all * one.world.inner
        sequences = one.data.batch_size_per_worker(readers) * one.inner.accumulation
        key = (one.model, one.inner, sequences)
        if key not in measured:
            measured[key] = measured_step(one, sequences, limits(one.model).context)
        at_once = min(readers, os.cpu_count() or 1) if one.world.has_processes else 1
        seconds = len(group) * one.run.steps * measured[key] * readers / at_once
        total += seconds
        counts = (len(group), one.world.workers, one.run.steps, one.run.steps * tokens_a_step(one, one.replicas_in_all))
        lines.append([label, *(f"{count:,}" for count in counts), format_seconds(seconds)])
    lines.append(["in all", str(len(configs)), "", "", "", format_seconds(total)])
    return Table(heads=["row", "seeds", "workers", "steps", "tokens", "about"], rows=lines)


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
    from isles.plan.run_plan import plan_run

    plan = plan_run(config)
    found = plan.step_seconds if plan.time is None else plan.time.step
    return found or config.world.virtual.step_seconds


def tuned_in(folder: Path, rows: Mapping[str, Config]) -> dict[str, Mapping[str, Any]]:
    """The best settings of `isles tune --out FOLDER/ROW` for each of `rows` that has such a search; notes on those that
    have none, or one on another model. ValueError: nobody has.
    """
    found: dict[str, Mapping[str, Any]] = {}
    for name, config in rows.items():
        path = folder / name.replace(":", ".")
        study = read_tuning(path) if (path / TUNED).is_file() else {"trials": []}
        if best := complete(study):
            found[name] = best[0]["settings"]
            if parse_toml(study["config"]).get("model") != parse_toml(to_toml(config))["model"]:
                print(f"note: {path} was tuned on another model", file=sys.stderr)
    if not found:
        raise ValueError(f"--tuned {folder}: holds no finished search in {', '.join(rows)}; make one with isles tune")
    if missing := [name for name in rows if name not in found]:
        print(f"note: not tuned, for {folder} holds no search: {', '.join(missing)}", file=sys.stderr)
    return found
