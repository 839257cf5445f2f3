"""Several runs one after another, as `isles compare` and `isles simulate` make them: one folder each, one table, one
page; the rows of a comparison, and the search for settings that comes before it.

A row is a method with settings of its own:

    none                                             a method
    diloco@replicas.outer_lr=0.4@inner.lr=0.01       the same with settings over those of all
    package.module:Class                             one of your own
    fast                                             a table [methods.fast] of CONFIG.toml, which says method = "diloco"

Two rows are always there: workers that never exchange (`none`), and one worker that reads all the tokens.

Equal terms: as many tokens, steps or virtual seconds, with settings that were tuned.

The search for settings is Optuna's, in a directory that several processes may work on, and that goes on after any end.

    RUN/study.log        Optuna's journal
    RUN/tune.json        terms and trials; report.html, best.toml: see `isles.report.comparison`
    RUN/trials/N/        the run directory of trial N
    RUN/owners/          a locked file for each process at work

Trial N draws from (seed, N) and from the trials before, so a study that was stopped goes on as if it had not been. A
trial whose process has died is marked failed, and its number is used again. Everything that chooses holds a lock.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import re
import shutil
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import typer

from isles.base.durable import write_text
from isles.base.parsing import parse_toml
from isles.base.tables import changed, parse_value
from isles.cli.terminal import Progress, print_table
from isles.cli.train import report_device
from isles.models.model_limits import limits
from isles.network.noise import hash64
from isles.pipeline.config import PipelineConfig
from isles.plan.memory_fit import measured_step
from isles.plan.run_plan import plan_run, priced, refuse
from isles.replicas import METHODS
from isles.replicas.config import Dimension, settings_of
from isles.report import write_report
from isles.report.comparison import (
    ALONE,
    INDEX,
    NEVER,
    TUNED,
    comparison_rows,
    complete,
    read_tuning,
    run_folder,
    validation_loss_of,
)
from isles.report.panels import Table
from isles.report.rundir import read_run
from isles.report.units import format_seconds
from isles.running.python import refuse_too_many
from isles.running.run import Interrupted, launch
from isles.training.config.reading import ending, read_config, to_toml, tokens_a_step
from isles.training.config.sections import Config
from isles.training.interrupts import Interrupts
from isles.training.records.rundir import as_json
from isles.training.records.shard import NotFinite
from isles.training.stage_runner import refuse_stages

if TYPE_CHECKING:
    import optuna

    from isles.training.records.summary import SummaryTable

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
    return {key: parse_value(value) for key, value in (part.split("=") for part in _QUICK.split())}


def names(text: str, option: str) -> list[str]:
    """What stands between the commas outside of brackets; ValueError for nothing, or for one twice."""
    found = [name.strip() for name in re.split(r",(?![^\[{]*[\]}])", text) if name.strip()]
    if not found or len(set(found)) < len(found):
        raise ValueError(f"{option} {text}: name each one once, separated by commas")
    return found


def rows_of(methods: str) -> list[ComparisonRow]:
    """The rows that --methods names; all: every method but fsdp, whose loss is that of ddp."""
    named = [name for name in METHODS if name != "fsdp"] if methods == "all" else names(methods, "--methods")
    parts = [part.split("@") for part in named]
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
    times, run, world = config.replicas_in_all * config.world.inner, config.run, config.world
    steps = {key: getattr(run, key) * times for key in ("steps", "log_every", "validate_every")}
    steps |= {"checkpoint_every": run.checkpoint_every * times} if run.checkpoint_every != "auto" else {}
    world = changed(world, {"workers": 1, "inner": 1, "inside": "ddp", "virtual.inner_links": "lan"})
    data = replace(config.data, batch_size=config.data.batch_size_per_worker(times))
    return ending(replace(config, data=data, pipeline=PipelineConfig(), world=world, run=replace(run, **steps)))


def of_runs(folders: Sequence[Path], out: Path, as_: str | None, over: Sequence[str] | None) -> dict[str, list[Any]]:
    """Finished runs by label, as compare.json in `out` holds them: runs that differ in the seed alone are one row. A
    note where they are not at equal terms. as_: what they are priced as, over their own links or each of these.
    """
    rows: dict[str, list[tuple[dict[str, Any], dict[str, Any]]]] = {}
    for folder in folders:
        run = read_run(folder)
        if run.summary is None:
            raise ValueError(f"{folder}: this run has not ended; isles resume {folder} goes on with it")
        flat = {f"{name}.{key}": value for name, table in run.config.items() for key, value in table.items()}
        terms = {key: value for key, value in flat.items() if key not in _SEEDED}
        summary = {**run.summary, "folder": os.path.relpath(folder, out)}
        if as_ is not None and "joins" in summary:
            raise ValueError(f"{folder}: workers come and go in it, so it depends on time, which --as does not price")
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
    measured, lines, total = dict[str, float](), [], 0.0
    for label in dict.fromkeys(label for label, _ in configs):
        group = [one for (name, _), one in configs.items() if name == label]
        one = group[0]
        readers = one.replicas_in_all * one.world.inner
        sequences = one.data.batch_size_per_worker(readers) * one.inner.accumulation
        key = str((one.model, one.inner, sequences))  # options are tables, which have no hash
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


OnMetrics, OnNotice = Callable[[dict[str, Any]], None], Callable[[str], None]
Start = Callable[[Config, Path, OnMetrics, OnNotice], "SummaryTable"]
"""As `isles.running.run.launch`."""


def run_all(
    configs: Configs, out: Path | None, verb: str, start: Start | None = None
) -> tuple[Path, dict[str, list[dict[str, Any]]]]:
    """Train them into `out` (runs/VERB-DATE-TIME where that is None) and write the page and the picture; the folder,
    and the summaries by row. typer.Exit(130) where that is interrupted. ValueError: `out` is in use.
    start: in the place of `launch`.
    """
    for one in configs.values():
        refuse_stages(one)
        if one.world.backend != "virtual":
            refuse_too_many(one.world.workers)
    for one in {name: one for (name, _), one in configs.items()}.values():  # seeds change nothing of it
        refuse(one, joined=start is not None)
        if one.run.priced_as:
            priced(one, one.run.priced_as)  # refuses, too
    begin = start or launch
    out = new_folder(out, verb)
    report_device(next(iter(configs.values())))  # as all others
    summaries: dict[str, list[dict[str, Any]]] = {name: [] for name, _ in configs}
    labels, folder, begun = list(summaries), out, time.monotonic()
    work = {place: one.run.steps * one.world.workers for place, one in configs.items()}  # about as long each
    done = 0
    try:
        with Interrupts() as interrupts:
            for (name, seed), one in configs.items():
                interrupts.check()
                folder = out / run_folder(name, seed)
                left = (time.monotonic() - begun) * (sum(work.values()) / done - 1) if done else None
                about = "" if left is None else f", {format_seconds(left)} left"
                title = f"{name} ({labels.index(name) + 1} of {len(labels)}), seed {seed}{about}:"
                done += work[name, seed]
                if one.world.has_processes and one.run.checkpoint_every == "auto":
                    one = changed(one, {"run.checkpoint_every": 0})  # states of all rows would fill the disk
                with Progress(title, one.world.workers, one.run.steps, plain=f"{title} ") as progress:
                    summaries[name].append(begin(one, folder, progress.line, progress.notice))
                write_report(folder)
    except KeyboardInterrupt as stop:
        what = str(stop) if isinstance(stop, Interrupted) else f"stopped after {folder}"
        print(f"isles: {what}; the runs after it were not begun", file=sys.stderr)
        raise typer.Exit(130) from None
    write_pages(out, summaries)
    return out, summaries


def new_folder(out: Path | None, verb: str) -> Path:
    """`out`, or runs/VERB-DATE-TIME. ValueError where it holds something."""
    out = out or Path("runs") / f"{verb}-{datetime.now():%Y%m%d-%H%M%S}"
    if out.exists() and any(out.iterdir()):
        raise ValueError(f"--out {out}: is not empty; name another directory")
    return out


def write_pages(out: Path, summaries: dict[str, list[dict[str, Any]]]) -> None:
    """The index of a comparison and its page."""
    out.mkdir(parents=True, exist_ok=True)
    (out / INDEX).write_text(json.dumps(summaries, indent=2) + "\n", encoding="utf-8")
    write_report(out)


def show(out: Path, summaries: dict[str, list[dict[str, Any]]]) -> None:
    """Print the table and where the page is."""
    heads, rows = comparison_rows(summaries)
    print_table(Table(heads=heads, rows=rows))
    print(f"report  {out / 'report.html'}")


def seeds_of(text: str) -> list[int]:
    """The numbers of --seeds."""
    found = names(text, "--seeds")
    for part in found:
        if not part.isdigit():
            raise ValueError(f"--seeds: {part!r} is no seed; write whole numbers such as 0,1,2")
    return [int(part) for part in found]


_WIDE, _NEAR = 4.0, 2.0  # factors around the inner rate: alone, and beside the method's own settings
_PARTS, _RUNGS, _FACTOR = 9, (1, 3), 3  # judged after each ninth; after the first and the third, a third goes on
_TIE = 1.02  # of the best loss after the third: before rates fall, small batches and large rates are that far behind
_LEAST = 4  # trials before the sampler learns from them
Train = Callable[[int, Config, Path, Callable[[dict[str, Any]], None]], dict[str, Any]]
"""(number, config, folder, on_line) -> the summary of the run."""


class _Pruned(Exception):
    """This trial is not worth its other steps."""


@dataclass(frozen=True, kw_only=True)
class Terms:
    """What is searched: `config` has the settings that are not, at equal tokens, steps or seconds. over: dimensions in
    the place of the usual ones.
    """

    config: Config
    at: str
    seed: int
    trials: int
    over: Sequence[Dimension] = ()

    @property
    def inner(self) -> list[Dimension]:
        """What is searched first: the inner rate and the batch."""
        if self.over:
            return list(self.over)
        batch = self.config.data.batch_size
        found = [Dimension.around("inner.lr", self.config.inner.lr, _WIDE)]
        if self.at != "steps":  # there a larger one is better and costs nothing
            choices = [size for size in (batch // 2, batch, 2 * batch) if size]
            found.append(Dimension(name="data.batch_size", start=batch, choices=choices))
        return found

    @property
    def own(self) -> list[Dimension]:
        """What is searched then, at the best of that: the method's own settings; none where there are none."""
        return [] if self.over else self.config.replicas.space(self.config.run.steps, timed=self.at == "seconds")

    @property
    def first(self) -> int:
        return -(-self.trials // 2) if self.own else self.trials

    def run(self, settings: dict[str, Any]) -> Config:
        made = at_equal(self.at, changed(self.config, settings), self.config)
        shown = {"validate_every": -(-made.run.steps // _PARTS), "checkpoint_every": 0}
        return replace(made, run=replace(made.run, seed=self.seed, **shown))


class Study:
    """One process's hold on the search in `out`. ValueError where that directory holds another search."""

    def __init__(self, terms: Terms, out: Path) -> None:
        try:
            import optuna
            from optuna.storages import JournalStorage
            from optuna.storages.journal import JournalFileBackend
        except ImportError as error:
            raise ValueError('isles tune needs optuna: pip install ".[tune]"') from error

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self.terms, self.out, self._optuna, self._states = terms, out, optuna, optuna.trial.TrialState
        (out / "owners").mkdir(parents=True, exist_ok=True)
        self._terms = {"method": terms.config.method, "at": terms.at, "seed": terms.seed}
        self._terms |= {"over": repr(terms.over), "config": to_toml(terms.config)}
        before = read_tuning(out) if (out / TUNED).exists() else {}
        for key, value in self._terms.items():
            if before.get(key, value) != value:
                raise ValueError(f"--out {out}: holds a search with another {key}; name another directory")
        with self._exclusive():
            storage = JournalStorage(JournalFileBackend(str(out / "study.log")))
            self.study = optuna.create_study(storage=storage, study_name="isles", load_if_exists=True)

    @contextlib.contextmanager
    def _exclusive(self) -> Iterator[None]:
        with (self.out / "owners" / "turn").open("a") as handle:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield

    def work(self, is_over: Callable[[], bool], train: Train) -> None:
        """Trials until all are there, or `is_over`."""
        own = self.out / "owners" / f"{os.uname().nodename}-{os.getpid()}"
        with own.open("a") as handle:
            fcntl.flock(handle, fcntl.LOCK_EX)
            try:
                while not is_over() and (trial := self._ask(own.name)) is not None:
                    self._try(trial, train)
            finally:
                own.unlink(missing_ok=True)

    def _ask(self, owner: str) -> optuna.Trial | None:
        """The next trial; None where all are there."""
        with self._exclusive():
            for trial in self.study.trials:
                if not trial.state.is_finished() and not self._lives(trial.user_attrs.get("owner", "")):
                    self.study.tell(trial.number, state=self._states.FAIL)
            taken = {trial.user_attrs["index"] for trial in self._there()}
            index = min(set(range(len(taken) + 1)) - taken)
            if index >= self.terms.trials:
                return None
            if index == 0:
                self.study.enqueue_trial({one.name: one.start for one in self.terms.inner})
            seed = hash64(self.terms.seed, index) % 2**32
            self.study.sampler = self._optuna.samplers.TPESampler(seed=seed, n_startup_trials=_LEAST)
            trial = self.study.ask()
            trial.set_user_attr("owner", owner)
            trial.set_user_attr("index", index)
            trial.set_user_attr("settings", self._settings(trial, index))
            return trial

    def _there(self) -> list[optuna.trial.FrozenTrial]:
        """All trials but those that failed, which are made again."""
        return [trial for trial in self.study.trials if trial.state != self._states.FAIL]

    def _settings(self, trial: optuna.Trial, index: int) -> dict[str, Any]:
        if index < self.terms.first:
            return settings_of({one.name: _suggested(trial, one) for one in self.terms.inner})
        before = [one for one in complete(self.record()) if one["index"] < self.terms.first]
        inner = before[0]["settings"] if before else settings_of({one.name: one.start for one in self.terms.inner})
        near = Dimension.around("inner.lr / best", 1.0, _NEAR)  # a method's own rates move the best inner one
        own = settings_of({one.name: _suggested(trial, one) for one in self.terms.own})
        return inner | settings_of({"inner.lr": inner["inner.lr"] * _suggested(trial, near)}) | own

    def _lives(self, owner: str) -> bool:
        try:
            with (self.out / "owners" / owner).open() as handle:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            pass  # it has given its file up
        return False

    def _try(self, trial: optuna.Trial, train: Train) -> None:
        index, folder = trial.user_attrs["index"], self.out / "trials" / str(trial.user_attrs["index"])
        steps, final, behind, seen = 0, None, False, dict[int, list[float | None]]()

        def look(line: dict[str, Any]) -> None:
            nonlocal steps, behind
            if behind:  # workers that never talk do not hear of each other's end
                raise _Pruned
            steps, every = line["step"], config.run.validate_every
            at = seen.setdefault(steps, [])
            at.append(line.get("val_loss"))
            if len(at) < config.world.workers or steps % every or steps >= config.run.steps:
                return
            if losses := [loss for loss in at if loss is not None]:
                loss = math.fsum(losses) / len(losses)
                trial.report(loss, steps // every)
                behind = not math.isfinite(loss) or self._is_behind(loss, steps // every)
                if behind:
                    raise _Pruned

        try:
            config = self.terms.run(trial.user_attrs["settings"])
            trial.set_user_attr("of", config.run.steps)
            shutil.rmtree(folder, ignore_errors=True)
            final = validation_loss_of(train(index, config, folder, look))
            steps = config.run.steps
            if final is None:
                raise ValueError("data.validation_fraction = 0: there is no validation loss to tune by")
        except (_Pruned, NotFinite):
            pass
        except BaseException as error:
            if index == 0 or not isinstance(error, ValueError):  # else these settings alone are refused
                self.study.tell(trial, state=self._states.FAIL)
                raise
        trial.set_user_attr("steps", steps)
        if final is not None and math.isfinite(final):
            self.study.tell(trial, final)
        else:
            self.study.tell(trial, state=self._states.PRUNED)
        with self._exclusive():
            self._write()

    def _is_behind(self, loss: float, rung: int) -> bool:
        """Whether a trial is not among the best third so far; nor, after the first look, which says little, among the
        best two, and after the second as good as the best. Optuna's own rule counts failed trials too, see above.
        """
        if rung not in _RUNGS:
            return False
        losses = sorted(one.intermediate_values[rung] for one in self._there() if rung in one.intermediate_values)
        best = losses[: len(losses) // _FACTOR] or losses[:1]
        return loss > (max(best[-1], losses[:2][-1]) if rung == _RUNGS[0] else max(best[-1], _TIE * losses[0]))

    def record(self) -> dict[str, Any]:
        """Terms and trials as tune.json has them."""
        trials = [
            {"steps": 0, "of": 0, "settings": {}, **one.user_attrs, "loss": one.value, "params": one.params}
            | {"state": one.state.name.lower()}
            for one in sorted(self._there(), key=lambda one: one.user_attrs.get("index", -1))
            if "index" in one.user_attrs
        ]
        return {**self._terms, "trials": trials, "importances": self._importances()}

    def _importances(self) -> dict[str, float]:
        from optuna.importance import PedAnovaImportanceEvaluator, get_param_importances

        found: dict[str, float] = {}
        ended = [tuple(one.params) for one in self.study.trials if one.state.name == "COMPLETE"]
        for names in (names for names in dict.fromkeys(ended) if ended.count(names) > _LEAST):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that few trials say little
                found |= get_param_importances(self.study, evaluator=PedAnovaImportanceEvaluator(), params=list(names))
        return found

    def _write(self) -> None:
        record = self.record()
        write_text(self.out / TUNED, as_json(record, indent=1) + "\n")
        if best := complete(record):
            run, base = self.terms.run(best[0]["settings"]), self.terms.config.run
            run = replace(run, run=replace(base, steps=run.run.steps, tokens=0))
            head = f"# The best of isles tune --method {run.method} --at {self.terms.at}: trial {best[0]['index']}\n"
            write_text(self.out / "best.toml", head + to_toml(run))


def _suggested(trial: optuna.Trial, one: Dimension) -> Any:
    if one.choices:
        return trial.suggest_categorical(one.name, list(one.choices))
    if one.whole:
        return trial.suggest_int(one.name, int(one.low), int(one.high), log=one.log)
    return trial.suggest_float(one.name, one.low, one.high, log=one.log)
