"""Runs from Python are those of the command, to the bit, and docs/python.md runs as printed."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import isles
from isles import cli
from isles.base.tables import parse_value
from tests.training.runs import TINY, write_text

PAGE = Path(__file__).parents[2] / "docs" / "python.md"
SMALL: dict[str, Any] = {key: parse_value(value) for key, _, value in (setting.partition("=") for setting in TINY)}
TABLES = {"replicas": {"method": "diloco", "sync_every": 3}}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_text(tmp_path / "my-text.txt")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_run_from_python_is_that_of_the_command(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    told: list[dict[str, Any]] = []
    (folder / "my.toml").write_text('[replicas]\nmethod = "diloco"\nsync_every = 3\n')
    changes = {**SMALL, "workers": 2, "steps": 6, "data": "my-text.txt"}
    run = isles.train("my.toml", out="here", on_metrics=told.append, **changes)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    words = [word for setting in TINY for word in ("--set", setting)]
    words = ["my.toml", *words, "--workers", "2", "--steps", "6", "--data", "my-text.txt", "--out", "there"]
    monkeypatch.setattr(sys, "argv", ["isles", "train", *words])
    with pytest.raises(SystemExit):
        cli.main()
    for name in ("config.toml", "model.safetensors"):
        assert (folder / "here" / name).read_bytes() == (folder / "there" / name).read_bytes()
    assert run.path == Path("here") and run.summary["val_loss"] == isles.load_run("there").summary["val_loss"]
    assert [line["step"] for line in told if line["worker"] == 0] == [2, 4, 6]
    assert set(run.metrics["worker"].dropna()) == {0, 1} and len(run.metrics) >= len(told)
    monkeypatch.setitem(sys.modules, "pandas", None)
    lines = [line for line in run.metrics if "worker" in line]
    assert [(line["step"], line["loss"]) for line in lines] == [(line["step"], line["loss"]) for line in told]
    model, tokens = run.model(), torch.arange(8)[None]
    assert not model.training and torch.equal(model.logits(tokens), isles.load_run("there").model().logits(tokens))
    again = isles.train(run.config, out="again")  # a whole configuration, and tables as a dict
    tables = isles.train(TABLES, out="tables", **changes)
    assert again.config == tables.config == run.config
    assert (folder / "tables" / "model.safetensors").read_bytes() == (
        folder / "here" / "model.safetensors"
    ).read_bytes()
    assert TABLES == {"replicas": {"method": "diloco", "sync_every": 3}}


def test_processes_start_without_the_callers_script(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which has no guard, and whose classes they do not need."""
    (folder / "script.py").write_text("raise RuntimeError('it runs again')\n")
    main = ModuleType("__main__")
    main.__file__ = str(folder / "script.py")
    monkeypatch.setitem(sys.modules, "__main__", main)
    real = {**SMALL, "world.backend": "distributed"}
    run = isles.train(workers=2, steps=2, method="none", data="my-text.txt", out="real", **real)
    assert run.summary["backend"] == "distributed" and sys.modules["__main__"] is main


REFUSED: list[tuple[Callable[[], Any], str]] = [
    (lambda: isles.train(sync_evry=3), "sync_evry = 3: did you mean replicas.sync_every?"),
    (lambda: isles.train(codec="int8"), "pipeline.boundary.codec or replicas.codec?"),
    (lambda: isles.train(zzz=1), "zzz = 1: write a setting's key"),
    (lambda: isles.train(steps=5, **{"run.steps": 6}), "run.steps = 6: did you mean run.steps? write"),
    (lambda: isles.train(steps=0), "run.steps = 0: choose 1 or more steps"),
    (lambda: isles.train(data="nowhere"), "data.path = 'nowhere' does not exist"),
    (lambda: isles.train(tokens="1M", steps=3), "run.tokens = 1000000 and run.steps both say"),
    (lambda: isles.train("nowhere.toml"), "nowhere.toml: cannot be read"),
    (lambda: isles.train([]), "config = []: give the path of a CONFIG.toml"),  # type: ignore[arg-type]
    (lambda: isles.train(out=3), "out = 3: give the path"),  # type: ignore[arg-type]
    (lambda: isles.train({"run": 5}), "run stands outside a section"),
    (lambda: isles.train({"rum": {}}), "unknown section 'rum': did you mean 'run'?"),
    (lambda: isles.train(workers=10_000), "world.workers = 10000: more than 8 a core"),
    (lambda: isles.simulate(backend="distributed"), "did you mean world.backend?"),
    (lambda: isles.load_run("nowhere"), "nowhere: no run directory"),
]


@pytest.mark.parametrize(("call", "words"), REFUSED, ids=[words for _, words in REFUSED])
def test_a_mistake_is_a_value_error_of_one_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch, call: Callable[[], Any], words: str
) -> None:
    monkeypatch.setattr("isles.running.backends.start_server", lambda: None)
    with pytest.raises(ValueError, match=re.escape(words)) as error:
        call()
    assert "\n" not in str(error.value) and [path.name for path in folder.iterdir()] == ["my-text.txt"]


SRUN = {"SLURM_PROCID": "1", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "1"}


@pytest.mark.parametrize("started", [{"TORCHELASTIC_RUN_ID": "x"}, {**SRUN, "SLURM_LOCALID": "1", "SLURM_JOB_ID": "7"}])
def test_not_below_torchrun_or_srun(started: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in started.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="without torchrun, srun -n and mpirun"):
        isles.train()


def test_a_run_that_is_not_complete(folder: Path) -> None:
    run = isles.train(workers=1, steps=2, data="my-text.txt", out="short", method="none", **SMALL)
    (folder / "short" / "summary.json").unlink()
    with pytest.raises(ValueError, match=r"not complete, it has no summary\.json; go on with isles resume short"):
        run.summary  # noqa: B018


@pytest.mark.long
@pytest.mark.parametrize("way", ["script", "stdin"])
def test_the_page_runs_as_printed(folder: Path, way: str) -> None:
    """In a script without a guard, and where it is typed."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) == 3
    write_text(folder / "my-text.txt", 20_000)
    (folder / "page.py").write_text("\n".join(blocks))
    words, text = ([sys.executable, "page.py"], None) if way == "script" else ([sys.executable, "-"], "\n".join(blocks))
    done = subprocess.run(words, input=text, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "did you mean replicas.sync_every?" in done.stdout and (folder / "runs" / "home" / "summary.json").is_file()
