"""A search for settings by Optuna, in a directory that several processes may work on, and that goes on after any end.

    RUN/study.log        Optuna's journal
    RUN/tune.json        terms and trials; report.html, best.toml: see `isles.report.tuning`
    RUN/trials/N/        the run directory of trial N
    RUN/owners/          a locked file for each process at work

Trial N draws from (seed, N) and from the trials before, so a study that was stopped goes on as if it had not been. A
trial whose process has died is marked failed, and its number is used again. Everything that chooses holds a lock.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isles.base.durable import write_text
from isles.base.tables import changed
from isles.cli.several.rows import at_equal
from isles.network.noise import hash64
from isles.replicas.search_space import Dimension, settings_of
from isles.report.comparison import validation_loss_of
from isles.report.tuning import TUNED, complete, read_tuning
from isles.training.config.reading import to_toml
from isles.training.config.sections import Config
from isles.training.records.rundir import as_json
from isles.training.records.shard import NotFinite

if TYPE_CHECKING:
    import optuna

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
