"""What a hurried person types: taken where it can be, else answered at once with what to type instead."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from isles.base.errors import nearest
from tests.cli.command import in_process
from tests.training.runs import TINY, run, tiny, write_text

Answer = Callable[..., tuple[int, str, str]]
SMALL = [word for setting in TINY for word in ("--set", setting)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's folder: a text, a folder of texts, and a finished run."""
    folder = tmp_path_factory.mktemp("slips")
    text = write_text(folder / "my-text.txt")
    (folder / "texts").mkdir()
    (folder / "tiny-model").mkdir()
    run(tiny(text, workers=1, steps=3), folder / "done")
    return folder


@pytest.fixture
def answer(folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Answer:
    """answer(*arguments): (exit code, stdout, stderr) of the command in the user's folder; starting a worker fails."""
    monkeypatch.setattr("isles.launch.handles.WorkerProcesses", None)
    return in_process(folder, monkeypatch, capfd)


# (what is typed, the answer's words)
REFUSED: list[tuple[str, list[str]]] = [
    ("run", ["no such command 'run': choose one of train, compare"]),
    ("evla x", ["did you mean 'eval'?"]),
    ("plan pathz", ["did you mean 'paths'?", "memory"]),
    ("train my-text.txt", ["my-text.txt: is no CONFIG.toml", "--data my-text.txt"]),
    ("train texts", ["texts: is no CONFIG.toml", "--data texts"]),
    ("train done", ["done: is no CONFIG.toml", "isles resume done"]),
    ("train --data.path my-text.txt", ["did you mean --set data.path=...?"]),
    ("train --batch-size 8", ["did you mean --set data.batch_size=...?"]),
    ("train --learning-rate 1e-3", ["did you mean --set inner.lr=...?"]),
    ("train --metod ddp", ["did you mean --method?"]),
    ("train --frobnicate 3", ["no such option --frobnicate"]),
    ("lighthouse --listen host:1", ["no such option --listen\n"]),  # and no guess
    ("train --set lr=1e-3", ["lr: did you mean 'inner.lr'?"]),
    ("train --set path=F", ["path: did you mean 'data.path'?"]),
    ("train --set sync_every=5", ["did you mean 'replicas.sync_every'?"]),
    ("train --set inner.learning_rate=1", ["unknown key 'inner.learning_rate': did you mean 'inner.lr'?"]),
    ("train --set model.n_embd=64", ["did you mean 'model.d_model'?"]),
    ("train --set inner.zzz=1", ["unknown key 'inner.zzz': choose one of"]),
    ("train --steps 10", ["no exchange falls into a run of 10 steps", "--set replicas.sync_every=10"]),
    ("train --data typo", ["data.path = 'typo' does not exist"]),
    ("train --data my-text.txt --set model.context=90000000 --dry-run", ["data.path has at most", "give more text"]),
    ("train --lr fast", ["'--lr'", "valid number"]),
    ("train --tokens 10x", ["--tokens = '10x'"]),
    ("train --tokens 1M --steps 5", ["run.tokens = 1000000 and run.steps both say"]),
    ("train --model org/gpt2", ["model.hf = 'org/gpt2'", "hf download org/gpt2 --local-dir gpt2"]),
    ("train --model pkg:build", ["model.context is missing"]),
    ("train --nodes 2 --node 1 --rendezvous localhost:9", ["--token is missing"]),
    ("train --preset home", ["did you mean 'home-links'?"]),
    ("train --method Dilocko", ["did you mean 'diloco'?"]),
    ("train --model 7b", ["model.size = '7b' is not known: did you mean 'eager-4B'?"]),
    ("train --model big", ["model.size = 'big' is not known: choose one of"]),
    ("train --set model.device=mps", ["model.device = 'mps'", "auto trains on its CPU"]),
    ("train --method diloco --set replicas.codec=powersdg:4", ["did you mean 'powersgd:4'?"]),
    ("eval done my-text.txt", ["unexpected extra argument", "--data my-text.txt"]),
    ("methods nolocco", ["did you mean 'noloco'?"]),
    ("methods noloco --memory", ["--legal, --memory and METHOD each print something else"]),
    ("config --brief --presets", ["give one of them"]),
]


@pytest.mark.parametrize(("typed", "words"), REFUSED, ids=[typed for typed, _ in REFUSED])
def test_a_slip_is_answered_before_anything_starts(answer: Answer, typed: str, words: list[str]) -> None:
    code, out, error = answer(*typed.split())
    assert (code, out) == (2, "")
    assert error.startswith("isles: ") and error.count("\n") == 1
    for word in words:
        assert word in error


# (what is typed, words of what is printed)
TAKEN: list[tuple[str, list[str]]] = [
    ("train --dry-run --method DDP", ["ddp, 4 workers"]),
    ("train --dry-run --model 0.53m --data my-text.txt", ["0.53M", "parameters"]),
    ("train --dry-run --preset dilocox-clusters --method none", ["none, 8 workers"]),
    ("train --dry-run --steps 10 --workers 1", ["noloco, 1 worker"]),
    ("compare --dry-run --quick --methods all", ["streaming-noloco", "sparseloco", "in all"]),
    ("methods DiLoCo", ['method = "diloco"', "outer_momentum = 0.9", "isles config --method diloco"]),
    ("generate done/model.safetensors --prompt the --tokens 3", ["the"]),
]


@pytest.mark.parametrize(("typed", "words"), TAKEN, ids=[typed for typed, _ in TAKEN])
def test_what_is_meant_is_taken(answer: Answer, typed: str, words: list[str]) -> None:
    code, out, error = answer(*typed.split())
    assert code == 0, error
    for word in words:
        assert word in out


def test_shorthands_are_settings_below_set(answer: Answer, folder: Path) -> None:
    """In each command that has them; --set, written out, wins."""
    words = ["--data", "my-text.txt", "--lr", "0.02", "--tokens", "256", "--set", "run.tokens=192", *SMALL]
    words += ["--method", "none", "--workers", "2"]
    assert answer("train", *words, "--out", "short")[0] == 0
    written = (folder / "short" / "config.toml").read_text()
    assert 'path = "my-text.txt"' in written and "tokens = 192" in written and "steps = 3" in written
    assert "lr = 0.01" in written  # of --set, in SMALL
    for verb in ("compare", "simulate", "tune", "lighthouse"):
        code, out, _ = answer(verb, "--help")
        assert code == 0 and all(f"--{name}" in out for name in ("data", "lr", "model", "tokens"))


@pytest.mark.parametrize("method", ["noloco", "ddp", "custom", "demo", "localsgd"])
def test_brief_settings_are_fifteen_at_most(answer: Answer, method: str, folder: Path) -> None:
    """And a file that can be run, which says what the whole one says."""
    code, out, _ = answer("config", "--brief", "--method", method)
    keys = [line for line in out.splitlines() if " =" in line and (not line.startswith("# ") or line.endswith(" ="))]
    assert code == 0 and 10 <= len(keys) <= 16  # the method's name beside 15
    (folder / "brief.toml").write_text(out)
    assert answer("train", "brief.toml", "--dry-run", "--steps", "2000")[0] == 0


@pytest.mark.parametrize(("free", "words"), [(0.3e9, "start fewer"), (0.1e9, "end other programs")])
def test_short_of_memory(answer: Answer, monkeypatch: pytest.MonkeyPatch, free: float, words: str) -> None:
    monkeypatch.setattr("isles.running.python.free_memory", lambda: free)
    workers = "2" if free > 0.2e9 else "1"
    code, _, error = answer("join", "127.0.0.1:9", "--workers", workers, "--token", "ab" * 32)
    assert code == 2 and f"--workers {workers}: each takes 0.2 GB" in error and words in error


@pytest.mark.parametrize(
    ("value", "known", "meant"),
    [
        ("DDP", ["ddp", "none"], "ddp"),
        ("home", ["home-links", "noloco"], "home-links"),
        ("powersdg:4", ["powersgd:16", "int8:stochastic"], "powersgd:4"),
        ("int8:stochastc", ["int8", "int8:stochastic"], "int8:stochastic"),
        ("inner.schedule", ["inner.lr", "inner.betas"], None),
        ("x.sync_evry", ["replicas.sync_every"], "replicas.sync_every"),
        ("", ["a"], None),
    ],
)
def test_nearest(value: str, known: list[str], meant: str | None) -> None:
    assert nearest(value, known) == meant
