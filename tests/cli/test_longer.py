"""`isles resume RUN --steps N`, `--step K` of a complete run, and `isles train --resume auto`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from isles.training.config.inner import InnerConfig, lr_factor
from isles.training.records.checkpoint import Checkpoints
from tests.cli.command import in_process
from tests.training.runs import TINY, metrics, write_text

TRAIN = ["train", "--workers", "2", "--set", "data.path=text.txt"]
TRAIN += [word for setting in TINY for word in ("--set", setting)]
Answer = Callable[..., tuple[int, str]]


@pytest.fixture
def answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Answer:
    """answer(*words): (exit code, stdout and stderr) of the command, in a folder with a text."""
    write_text(tmp_path / "text.txt")
    command = in_process(tmp_path, monkeypatch, capfd)

    def ask(*words: str) -> tuple[int, str]:
        code, out, error = command(*words)
        return code, out + error

    return ask


def done(said: tuple[int, str]) -> str:
    assert said[0] == 0, said[1]
    return said[1]


def train(*settings: str, out: str, steps: int = 6) -> list[str]:
    every = [] if "replicas.method=none" in settings else ["replicas.sync_every=3"]
    own = [word for one in (*every, *settings) for word in ("--set", one)]
    return [*TRAIN, *own, "--steps", str(steps), "--out", out]


def files(out: str) -> tuple[bytes, list[Any]]:
    """A run's weights, and what its metrics say of training."""
    keys = ("step", "worker", "loss", "lr", "tokens")
    return Path(out, "model.safetensors").read_bytes(), sorted(
        [line[key] for key in keys] for line in metrics(Path(out))
    )


CLUSTERS = ["pipeline.routing=ravnest", "pipeline.ravnest.clusters=[[1], []]", "pipeline.clip=stage", "world.workers=3"]
CLUSTERS += ["model.tie_embeddings=false", "pipeline.microbatches=2", "replicas.method=localsgd", "model.layers=2"]
SWARM = ["pipeline.routing=swarm", "pipeline.swarm.peers=[1,2]", "pipeline.microbatches=2", "world.workers=3"]
SWARM += ["replicas.method=none", "model.layers=2", "model.tie_embeddings=false"]
LONG = pytest.mark.long
KINDS = {
    "pairs": [],
    "under way": ["replicas.method=delayed", "replicas.outer_delay=2"],
    "stages": ["pipeline.stages=2", "pipeline.microbatches=2", "model.layers=2", "replicas.method=diloco"],
    "clusters": CLUSTERS,
    "swarm": SWARM,
    "late swarm": [*SWARM, "pipeline.swarm.delay_updates=1"],
}


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=LONG if kind in ("stages", "clusters", "swarm", "late swarm") else ()) for kind in KINDS],
)
def test_a_longer_run_is_the_run_that_was_that_long_from_the_start(answer: Answer, kind: str) -> None:
    """To the bit, where the learning rate does not depend on how long the run is."""
    own = ["inner.final_lr_fraction=1", "run.checkpoint_every=6", "run.validate_every=0", *KINDS[kind]]
    done(answer(*train(*own, out="long", steps=12)))
    done(answer(*train(*own, out="short")))
    assert Checkpoints(Path("short")).steps() == [6]
    said = done(answer("resume", "short", "--steps", "12"))
    assert "the learning rate of step 7 is 0.01 (instead of 0.01)" in said and "resuming short after step 6" in said
    assert files("short") == files("long")
    complete = "isles: short: this run is complete; go on with --steps N, or go back with --step K\n"
    assert answer("resume", "short") == (2, complete)


def test_the_schedule_is_that_of_the_longer_run(answer: Answer) -> None:
    """From the first step after the end; that of the steps before is what it was."""
    own = ["run.checkpoint_every=6", "run.log_every=1"]
    done(answer(*train(*own, out="run")))
    done(answer("resume", "run", "--steps", "9"))
    inner = InnerConfig(lr=0.01, warmup_steps=2)
    rates = {line["step"]: line["lr"] for line in metrics(Path("run"))}
    assert rates == {step: inner.lr * lr_factor(step, 6 if step <= 6 else 9, inner) for step in range(1, 10)}
    assert json.loads(Path("run", "summary.json").read_text())["steps"] == 9


def test_a_complete_run_goes_back_to_a_checkpoint(answer: Answer) -> None:
    own = ["run.checkpoint_every=3", "run.keep_checkpoints=0"]
    done(answer(*train(*own, out="run", steps=9)))
    shutil.copytree("run", "before")
    assert "there are 3, 6, 9" in answer("resume", "run", "--step", "4")[1]
    assert "the checkpoint is of step 6; choose more" in answer("resume", "run", "--step", "6", "--steps", "6")[1]
    assert files("run") == files("before") and Path("run", "summary.json").exists()
    done(answer("resume", "run", "--step", "3"))
    assert files("run") == files("before")
    done(answer("resume", "run", "--step", "3", "--steps", "6"))
    assert Checkpoints(Path("run")).steps() == [3, 6] and metrics(Path("run"))[-1]["step"] == 6


def test_resume_auto_starts_goes_on_and_is_done(answer: Answer, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a scheduler does that starts the same command again; where it says that it does, without the option."""
    command = [*train("run.checkpoint_every=3", out="run"), "--resume", "auto"]
    done(answer(*command))
    before = files("run")
    assert done(answer(*command)) == "run: this run is complete\n"
    for name in ("summary.json", "model.safetensors"):
        Path("run", name).unlink()
    shutil.rmtree("run/checkpoints/step-6")
    shutil.copytree("run", "again")
    assert "resuming run after step 3" in done(answer(*command))
    assert files("run") == before
    shutil.rmtree("run/checkpoints")
    Path("run", "summary.json").unlink()
    assert "resuming" not in done(answer(*command))  # it was cut off before its first checkpoint: it begins again
    assert files("run") == before
    other = answer(*command, "--set", "inner.lr=0.02")
    assert other[0] == 2 and "holds another run (inner.lr = 0.01 there, 0.02 here)" in other[1]
    without = [word for word in command[:-2] if word != "run"] + ["again"]
    assert answer(*without)[0] == 2
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert "resuming again after step 3" in done(answer(*without))


def test_what_resume_refuses(answer: Answer) -> None:
    done(answer(*train(out="run")))
    for words, line in (
        ([*TRAIN, "--resume", "auto"], "--resume auto: name the run directory with --out"),
        ([*TRAIN, "--resume", "run"], "--resume run: write --resume auto, or isles resume run"),
        (["resume", "run", "--steps", "12"], "run: no checkpoint of this run is there: begin another from its model"),
    ):
        code, said = answer(*words)
        assert code == 2 and line in said and said.count("\n") == 1, said
    Path("run", "members.jsonl").touch()
    for words, line in (
        (["resume", "run", "--steps", "12"], "run: its workers come and go: leave --step, --steps"),
        (["resume", "run"], "run: this run is complete; begin another with run.start"),
        ([*train(out="run"), "--resume", "auto"], "holds a run whose workers come and go; go on with isles resume run"),
    ):
        code, said = answer(*words)
        assert code == 2 and line in said and said.count("\n") == 1, said
