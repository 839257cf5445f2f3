"""A run that loses a worker goes on saving, and is resumed with those that were left or with as many as before."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from isles.training.records.checkpoint import Checkpoints
from isles.training.records.replica_spread import Spread
from isles.training.records.reshard import prepare
from isles.training.records.writer import truncate_metrics
from tests.training.dying import AWAITED
from tests.training.runs import Told, lines_of, run, run_apart, tiny, write_text

STEPS, SAVED = 18, (5, 10, 15)


@pytest.fixture(scope="module")
def lost(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of three workers of which number 0 is killed after step 7, when step 5 is saved; without its end."""
    folder = tmp_path_factory.mktemp("lost")
    config = tiny(write_text(folder / "text.txt"), "replicas.sync_every=3", "world.backend=distributed",
                  "replicas.on_peer_failure=solo", "run.checkpoint_every=5", "run.keep_checkpoints=0",
                  method="tests.training.dying:DyingNoLoCo", workers=3, steps=STEPS)  # fmt: skip
    told = Told()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(AWAITED, str(folder / "run" / "checkpoints" / f"step-{SAVED[0]}" / "manifest.json"))
        run_apart(config, folder / "run", told)
    assert any("worker 0 failed" in notice and "the others go on without it" in notice for notice in told.notices)
    (folder / "run" / "summary.json").unlink()
    return folder / "run"


def test_checkpoints_and_spreads_are_of_those_that_are_left(lost: Path) -> None:
    checkpoints = Checkpoints(lost)
    assert checkpoints.steps() == list(SAVED)
    assert [checkpoints.ranks(step) for step in SAVED] == [[0, 1, 2], [1, 2], [1, 2]]
    spreads = [line["step"] for line in lines_of(lost / "metrics.jsonl") if "replica_std" in line]
    assert spreads == list(range(2, STEPS + 1, 2))


@pytest.mark.parametrize("workers", [2, 3])
def test_it_goes_on_with_two_and_with_three(lost: Path, tmp_path: Path, workers: int) -> None:
    """From the states of workers 1 and 2, which become 0, 1 (and 2); nobody counts as lost any more."""
    out = tmp_path / "run"
    shutil.copytree(lost, out)
    ready, checkpoints, told = prepare(out, workers), Checkpoints(out), Told()
    who = "the 2 workers that were left" if workers == 2 else "3 workers instead of 2"
    assert ready.notes[0] == f"going on with {who} after step 15"
    assert ready.step == 15 and checkpoints.ranks(15) == list(range(workers))
    outer = [checkpoints.read_shard(15, worker)["optimizer"]["outer"] for worker in range(workers)]
    assert all(state["roster"] == {} for state in outer)
    summary = run(ready.config, out, told, ready.step)
    assert (summary["workers"], summary["steps"]) == (workers, STEPS)
    assert not any("failed" in notice for notice in told.notices)
    assert {line["worker"] for line in told.lines} == set(range(workers))
    assert prepare(out, None).notes == []


def test_states_on_other_machines_are_asked_for(lost: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    shutil.copytree(lost, out)
    step = out / "checkpoints" / "step-15"
    manifest = json.loads((step / "manifest.json").read_text())
    for file in step.glob("worker-2.*"):  # as on a machine that worker 2 was not on
        file.unlink()
        del manifest["files"][file.name]
    (step / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match="after step 15 the states of workers 2 are on other machines"):
        prepare(out, None)


def test_a_spread_waits_for_nobody_who_is_lost(lost: Path) -> None:
    spread = Spread(dict.fromkeys(range(3), 0))
    assert spread.take(1, 0, "AAAAAA==", 1) == spread.take(2, 0, "AAAAAA==", 1) == {}
    assert spread.take(1, 2, "AACAPw==", 1) == {}
    assert spread.lose(1) == {1: 0.5}
    assert spread.take(2, 2, "AACAPw==", 1) == {2: 0.5}
    assert spread.lose(0) == {}


def test_metrics_beyond_the_checkpoint_are_cut(tmp_path: Path) -> None:
    """And a last line that was cut off in writing."""
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"st')
    truncate_metrics(path, 2)
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'
