"""`isles tune`: one search however often it is stopped, whoever works on it; what trials have alike; the pages."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import isles
from isles.base.tables import changed
from isles.cli import app
from isles.cli.several import SharedSettings, Study, Terms, quick, read_beside, rows_of, tuned_in
from isles.cli.terminal import Progress
from isles.replicas.config import MOMENTUM, STEP, Dimension, settings_of
from isles.replicas.methods.config import DiLoCoConfig
from isles.report.comparison import complete, read_tuning, saved
from isles.running.run import launch
from isles.training.config.reading import read_config, tokens_a_step
from isles.training.config.sections import Config
from tests.training.runs import write_text

pytest.importorskip("optuna", reason="needs the extra isles[tune]")
TRIALS = 5


def command(folder: Path, out: str, *more: str) -> Any:
    text = folder / "text.txt"
    if not text.exists():
        write_text(text)
    words = ["--set", f"data.path={text}", "--out", str(folder / out), *more]
    return CliRunner().invoke(app, ["tune", "--quick", "--method", "diloco", "--trials", str(TRIALS), *words])


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("tuned")
    done = command(folder, "out")
    assert done.exit_code == 0, done.output
    return folder / "out", done


def trials(out: Path) -> list[tuple[Any, ...]]:
    return [tuple(map(repr, one.values())) for one in read_tuning(out)["trials"]]


def test_what_it_leaves(tuned: tuple[Path, Any]) -> None:
    """The best as TOML that trains, a page, a table; trial 0 has the configuration's own settings."""
    out, done = tuned
    study = read_tuning(out)
    own = read_config(None, {**quick(), "replicas.method": "diloco"}, [])
    first, best = study["trials"][0], complete(study)[0]
    assert first["settings"] == {"inner.lr": own.inner.lr, "data.batch_size": own.data.batch_size}
    assert {one["index"] for one in study["trials"]} == set(range(TRIALS))
    config = read_config(str(out / "best.toml"), {}, [])
    assert config.inner.lr == best["settings"]["inner.lr"] and config.run.seed == own.run.seed
    kept = read_config(str(out / "trials" / str(best["index"]) / "config.toml"), {}, [])
    assert (kept.inner, kept.replicas, kept.data) == (config.inner, config.replicas, config.data)
    assert kept.run.seed == 1000  # not a seed that is judged by
    row = next(line.split() for line in done.stdout.splitlines() if line.split()[0] == str(best["index"]))
    assert row[1] == f"{best['loss']:.4f}"
    page = (out / "report.html").read_text()
    assert "History" in page and "Trials" in page
    assert CliRunner().invoke(app, ["report", str(out)]).exit_code == 0 and (out / "report.html").read_text() == page


def test_stopped_and_resumed_it_is_the_same(tuned: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in the middle of trial 2, then the same command: the same settings, losses and steps."""
    line = Progress.line

    def pressed(self: Progress, values: dict[str, Any]) -> None:
        line(self, values)
        if "trial 3 of" in self.plain and values["step"] in (1, 2, 3):  # a ninth of the run
            os.kill(os.getpid(), signal.SIGINT)

    folder = tuned[0].parent
    with monkeypatch.context() as patched:
        patched.setattr(Progress, "line", pressed)
        stopped = command(folder, "again")
    assert stopped.exit_code == 130 and "goes on" in stopped.stderr, stopped.output
    assert len(trials(folder / "again")) <= 3
    assert command(folder, "again").exit_code == 0
    assert trials(folder / "again") == trials(tuned[0])
    assert command(folder, "again", "--budget", "1ms").exit_code == 0  # nothing is left to do
    other = command(folder, "again", "--at", "steps")
    assert isinstance(other.exception, ValueError) and "holds a search with another at" in str(other.exception)


def test_a_comparison_takes_what_was_tuned(tuned: tuple[Path, Any], capsys: pytest.CaptureFixture[str]) -> None:
    """Each row the best settings of its own search, for as many tokens; those that are given stand over them; what has
    none is said.
    """
    folder = tuned[0].parent
    studies, lone = folder / "studies", folder / "studies" / "one-worker"
    lone.mkdir(parents=True)
    (studies / "diloco").symlink_to(tuned[0])
    other = {"state": "complete", "loss": 1.0, "settings": {"inner.lr": 0.03, "data.batch_size": 4}}
    (lone / "tune.json").write_text(json.dumps({"trials": [other], "config": "[model]\nlayers = 3\n"}))
    words, rows = [f"data.path={folder / 'text.txt'}"], rows_of("diloco,diloco@inner.lr=0.5")
    asked = SharedSettings(None, quick(), words)
    before = read_beside(asked, rows, [3])
    found = tuned_in(studies, {label.split("@")[0]: one for (label, _), one in before.items()})
    made = {label: one for (label, _), one in read_beside(asked, rows, [3], found).items()}
    said = capsys.readouterr().err
    assert "holds no search: none\n" in said
    assert [line for line in said.splitlines() if "another" in line] == [f"note: {lone} was tuned on another model"]
    best = complete(read_tuning(tuned[0]))[0]["settings"]
    for name, rate in (("diloco", best["inner.lr"]), ("diloco@inner.lr=0.5", 0.5)):
        one = made[name]
        held = {key: getattr(getattr(one, key.split(".")[0]), key.split(".")[1]) for key in best}
        assert held == {**best, "inner.lr": rate}
    assert (made["none"].inner.lr, made["none"].data.batch_size) == (0.01, 2)
    assert (made["one-worker"].inner.lr, made["one-worker"].run.steps) == (0.03, 12)  # twice the batch of 24 steps
    tokens = [one.run.steps * tokens_a_step(one, one.replicas_in_all) for one in made.values()]
    assert max(tokens) - min(tokens) <= 4 * 16 * 2  # less than a step
    flags = ["--methods", "diloco", "--seeds", "3", "--dry-run", "--set", words[0], "--tuned"]
    done = CliRunner().invoke(app, ["compare", "--quick", *flags, str(studies)])
    steps = {line.split()[0]: line.split()[3] for line in done.stdout.splitlines() if line.split()[:1]}
    assert steps["one-worker"] == "12" and steps["diloco"] == str(made["diloco"].run.steps)
    nobody = CliRunner().invoke(app, ["compare", "--quick", *flags, str(folder)])
    assert isinstance(nobody.exception, ValueError) and "make one with isles tune" in str(nobody.exception)


def terms(count: int, at: str = "tokens", method: str = "diloco", **settings: Any) -> Terms:
    config = read_config(None, {**quick(), "replicas.method": method, "run.steps": 64}, [], shared=True)
    return Terms(config=changed(config, settings), at=at, seed=7, trials=count)


def pretended(number: int, config: Config, folder: Path, look: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """A run that learns the better the nearer its inner rate is to 0.02."""
    end = 1 + abs(config.inner.lr - 0.02) * 20 + abs(config.replicas.outer_momentum - 0.3)  # type: ignore[attr-defined]
    for step in range(1, config.run.steps + 1):
        judged = step % config.run.validate_every == 0
        for worker in range(config.world.workers):
            look(
                {"step": step, "worker": worker, "val_loss": end + 2 - 2 * step / config.run.steps if judged else None}
            )
    return {"method": "diloco", "workers": 2, "seed": 7, "val_loss": end}


def test_a_trial_of_a_dead_process_is_run_again(tmp_path: Path) -> None:
    """It is told failed; its number, and with it its settings, are given again."""
    whole, dead = Study(terms(4), tmp_path / "whole"), Study(terms(4), tmp_path / "dead")
    whole.work(lambda: False, pretended)
    for _ in range(2):
        asked = dead._ask("host-1")  # and is never heard of again
    assert asked is not None and asked.user_attrs["index"] == 0
    dead.work(lambda: False, pretended)
    assert [one.state.name for one in dead.study.trials] == ["FAIL"] * 2 + ["COMPLETE"] * 1 + [
        one.state.name for one in whole.study.trials[1:]
    ]
    assert dead.record() == whole.record()


def test_pruning_saves_steps(tmp_path: Path) -> None:
    """At least 40 % of 30 trials', and the best is found nevertheless."""
    study = Study(terms(30), tmp_path)
    study.work(lambda: False, pretended)
    told = study.record()
    assert saved(told) >= 0.4
    assert {one["state"] for one in told["trials"]} == {"complete", "pruned"} and len(told["trials"]) == 30
    best = complete(told)[0]
    assert best["loss"] < told["trials"][0]["loss"] - 0.1 and abs(best["settings"]["inner.lr"] - 0.02) < 0.01
    assert set(told["importances"]) and best["steps"] == best["of"]


def test_a_pruned_run_of_workers_that_never_talk_ends(tmp_path: Path) -> None:
    """Each of them: none waits for the one that was told first."""
    choices = Dimension(name="inner.lr", start=0.01, choices=[0.01, 0.5])
    one = terms(4, method="none", **{"data.path": str(write_text(tmp_path / "text.txt")), "run.log_every": 1})
    study = Study(replace(one, over=[choices]), tmp_path / "out")
    study.work(lambda: False, lambda number, config, folder, look: launch(config, folder, look, lambda notice: None))
    pruned = [one for one in study.record()["trials"] if one["state"] == "pruned"]
    assert pruned
    for one in pruned:
        lines = (tmp_path / "out" / "trials" / str(one["index"]) / "metrics.jsonl").read_text().splitlines()
        assert max(json.loads(line)["step"] for line in lines) <= one["steps"] + 1 < one["of"] // 2


def work_alone(folder: Path) -> None:
    Study(terms(12), folder).work(lambda: False, pretended)


def test_two_processes_share_the_trials(tmp_path: Path) -> None:
    """None is tried twice, and none is left out."""
    Study(terms(12), tmp_path)
    context = multiprocessing.get_context("fork")
    both = [context.Process(target=work_alone, args=(tmp_path,)) for _ in range(2)]
    for process in both:
        process.start()
    for process in both:
        process.join(60)
    assert [process.exitcode for process in both] == [0, 0]
    study = read_tuning(tmp_path)
    assert [one["index"] for one in study["trials"]] == list(range(12))
    assert all(one["state"] != "running" for one in study["trials"])
    assert len({json.dumps(one["settings"]) for one in study["trials"]}) == 12


@pytest.mark.long
def test_two_commands_of_which_one_is_killed(tmp_path: Path) -> None:
    """Real processes on real runs: the other one makes the trial that was under way again; no settings twice."""
    out, text = tmp_path / "out", write_text(tmp_path / "text.txt")
    words = ["--method", "diloco", "--trials", "10", "--set", f"data.path={text}", "--out", str(out)]
    command = [sys.executable, "-m", "isles", "tune", "--quick", *words]
    both = [subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) for _ in range(2)]
    try:
        ends = time.monotonic() + 300
        while not list((out / "trials").glob("*/summary.json")) and time.monotonic() < ends:  # most are still to come
            time.sleep(0.05)
        both[0].kill()
        assert both[1].wait(300) == 0
    finally:
        for process in both:
            process.kill()
            process.wait(60)
    study = read_tuning(out)
    assert [one["index"] for one in study["trials"]] == list(range(10))
    assert {one["state"] for one in study["trials"]} <= {"complete", "pruned"}
    assert len({json.dumps(one["settings"]) for one in study["trials"]}) == 10
    for one in study["trials"]:  # accounted for: each has the run that its line says
        kept = read_config(str(out / "trials" / str(one["index"]) / "config.toml"), {}, [])
        assert kept.inner.lr == one["settings"]["inner.lr"] and one["steps"] <= one["of"] == kept.run.steps


def test_what_trials_have_alike() -> None:
    """Twice the batch: half the steps at equal tokens, as many at equal steps; and each step takes twice as long."""
    for at, steps in (("tokens", 32), ("steps", 64), ("seconds", 32)):
        made = terms(2, at).run({"data.batch_size": 4})
        assert abs(made.run.steps - steps) <= (4 if at == "seconds" else 0), at
        assert (made.run.seed, made.world.virtual.step_seconds) == (7, pytest.approx(0.2))
        assert made.inner.warmup_steps == 2 * made.run.steps // 64 or at == "seconds"
    one = terms(2, **{"run.tokens": 64 * 64}).run({"data.batch_size": 1})
    assert (one.run.tokens, one.run.steps * tokens_a_step(one, 2)) == (0, 64 * 64)
    rare, often = (terms(2, "seconds").run({"replicas.sync_every": every}).run.steps for every in (8, 1))
    assert rare > 64 > often  # of rounds of 2
    assert [one.name for one in terms(2, "steps").inner] == ["inner.lr"]  # a larger batch would be free
    assert "replicas.sync_every" in [one.name for one in terms(2, "seconds").own]
    assert (terms(30).first, terms(30, method="ddp").first) == (15, 30)


def test_a_method_s_own_space() -> None:
    """outer_lr / (1 - momentum) and momentum; a configuration's own values lie within."""
    step, momentum = DiLoCoConfig(outer_lr=0.7, outer_momentum=0.9).space(100, timed=False)
    assert step.start == pytest.approx(7) and step.low <= 7 <= step.high and momentum.high == 0.9
    found = settings_of({STEP: 2.0, MOMENTUM: 0.75})
    assert found == {"replicas.outer_lr": 0.5, "replicas.outer_momentum": 0.75}


@pytest.mark.parametrize(
    ("name", "always", "timed"),
    [
        ("demo", {"1 - replicas.compression_decay": (1e-4, 1e-2)}, {"replicas.compression_topk": (8, 128)}),
        ("dct-dp", {"replicas.error_feedback": ["local", "none"]}, {"1 - replicas.sparsity": (0.0025, 0.04)}),
        ("sparta", {}, {"replicas.sync_every": (1, 4), "replicas.fraction": (0.00125, 0.02)}),
        ("ist", {"replicas.sampler": ["random", "stratified", "rolling"], "replicas.sync_every": (12, 100)}, {}),
    ],
)
def test_spaces_of_methods_without_an_outer_rate(name: str, always: dict[str, Any], timed: dict[str, Any]) -> None:
    """What only says how much is sent is searched where time counts. A point of the space is a setting that is taken,
    and the configuration's own values are in it.
    """
    config = isles.method(name).Config()
    for at, wanted in ((False, always), (True, {**always, **timed})):
        space = config.space(400, timed=at)
        found = {one.name: list(one.choices) or pytest.approx((one.low, one.high)) for one in space}
        assert found.keys() == wanted.keys() and all(found[key] == wanted[key] for key in wanted)
        for point in ("low", "start", "high"):
            values = {one.name: one.choices[-1] if one.choices else getattr(one, point) for one in space}
            made = {key.partition(".")[2]: value for key, value in settings_of(values).items()}
            assert replace(config, **made) is not None  # it refuses what it does not take
    start = settings_of({one.name: one.start for one in config.space(400, timed=True)})
    assert all(getattr(config, key.partition(".")[2]) == value for key, value in start.items())


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--at", "bytes"], "choose one of tokens, steps, seconds"),
        (["--over", "replicas.outer_rate=0.1..1"], "write SECTION.KEY"),
        (["--over", "replicas.outer_lr=1..0.1"], "the lower one first"),
        (["--set", "world.backend=distributed"], "always on the virtual clock"),
        (["--trials", "0"], "1 trial or more"),
        (["--budget", "20 parsecs"], "write a number and a unit"),
    ],
)
def test_a_slip_costs_nothing(tmp_path: Path, more: list[str], said: str) -> None:
    done = command(tmp_path, "out", *more)
    assert isinstance(done.exception, ValueError) and said in str(done.exception)
    assert not (tmp_path / "out").exists()


def test_over() -> None:
    """Ranges on a logarithmic scale, from 0 on a plain one; whole numbers; choices."""
    from isles.cli.tune import _dimension

    config = terms(1).config
    assert _dimension("replicas.outer_lr=0.1..2", config) == Dimension(
        name="replicas.outer_lr", start=0.7, low=0.1, high=2.0
    )
    assert _dimension("replicas.outer_momentum=0..0.9", config).log is False
    assert _dimension("replicas.sync_every=1..8", config).whole
    assert _dimension("replicas.codec=none,int8", config).choices == ["none", "int8"]
    over = Terms(config=config, at="steps", seed=0, trials=9, over=[_dimension("inner.lr=0.01..0.1", config)])
    assert (over.first, over.own) == (9, [])
