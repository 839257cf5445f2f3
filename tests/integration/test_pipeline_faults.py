"""Runs in stages that are hit in the middle of a step: a worker that is killed, and one that stands still."""

from __future__ import annotations

import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from isles.comm.errors import WorkerFailed
from isles.running.run import launch
from isles.training.config.reading import read_config
from tests.integration.test_faults import workers
from tests.training.runs import TINY, run, write_text
from tests.training.struck import STEP

DEADLINE = 3.0
KILLED, STOPPED = (signal.SIGKILL, 2.0), (signal.SIGSTOP, DEADLINE + 1.0)  # the signal, and seconds until it is named


def config(folder: Path, *assignments: str) -> Any:
    flags = {"replicas.method": "tests.training.struck:StruckNoLoCo", "world.workers": 4, "run.steps": 10}
    settings = [f"data.path={folder / 'text.txt'}", "replicas.sync_every=3", f"replicas.orders={folder / 'orders'}"]
    settings += ["model.layers=2", "pipeline.stages=2", "pipeline.microbatches=2", "pipeline.routing=random"]
    settings += [f"world.pipeline_deadline={DEADLINE:g}", "run.checkpoint_every=4"]
    return read_config(None, flags, [*TINY, *settings, *assignments])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text, and the run that nobody hits."""
    folder = tmp_path_factory.mktemp("hit")
    write_text(folder / "text.txt")
    run(config(folder), folder / "whole")
    return folder


@pytest.mark.parametrize(
    ("blow", "victim"),
    [
        pytest.param(blow, victim, id=f"{blow[0].name}-{victim}", marks=() if chosen else pytest.mark.long)
        for blow in (KILLED, STOPPED)
        for victim in range(4)
        for chosen in [(blow, victim) == (KILLED, 3)]
    ],
)
def test_a_worker_hit_in_the_middle_of_a_step_is_named(
    folder: Path, tmp_path: Path, blow: tuple[int, float], victim: int
) -> None:
    """In time; no process stays; and the command that is printed goes on to the weights of the run that nobody hit."""
    number, seconds = blow
    orders, out = folder / "orders", tmp_path / "run"
    saved = out / "checkpoints" / f"step-{STEP - 2}" / "manifest.json"
    orders.write_text(f"{int(number)} {victim} {saved}")
    real = config(folder, "world.backend=distributed")
    with pytest.raises(WorkerFailed, match=f"worker {victim} failed: ") as caught:
        launch(real, out, lambda line: None, lambda notice: None)
    took = time.time() - float(orders.with_suffix(".when").read_text())
    why = "exit code -9" if number == signal.SIGKILL else rf"worker {victim} did not answer on channel 'pipeline'"
    assert re.search(why, str(caught.value)), str(caught.value)
    assert took < seconds, took
    assert not workers()
    orders.unlink()
    (note,) = caught.value.__notes__
    assert note == f"go on after step {STEP - 2} with: isles resume {out}"
    launch(real, out, lambda line: None, lambda notice: None, resume=STEP - 2)
    ours, theirs = (load_file(path / "model.safetensors") for path in (out, folder / "whole"))
    assert all((ours[name] == theirs[name]).all() for name in theirs) and ours.keys() == theirs.keys()
