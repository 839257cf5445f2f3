"""A run goes on in other stages: every bit of its state goes where its name goes."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from isles.running.run import launch
from isles.training.config.reading import read_config
from isles.training.records.checkpoint import Checkpoints
from isles.training.records.reshard import prepare
from tests.training.runs import Told, lines_of, run, tiny, write_text

AT, STEPS = 4, 8  # AT stands in the middle of a round of 3
REPLICAS = 2
MORE = ["model.layers=4", "model.tie_embeddings=false", "inner.max_norm=0", "run.log_every=1"]
WHOLE = ["data.batch_size=1", "inner.accumulation=2"]
SPLIT = ["data.batch_size=2", "pipeline.microbatches=2"]


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """begun(method, stages): the directory of a run, and whether it is whole."""
    folder = tmp_path_factory.mktemp("runs")
    text = write_text(folder / "text.txt", 8000)

    @cache
    def make(method: str, stages: int, *more: str) -> Path:
        own = [*SPLIT, f"pipeline.stages={stages}"] if stages > 1 else WHOLE
        own += ["inner.optimizer=muon"] if method == "muon" else []
        settings = [*MORE, *own, f"run.checkpoint_every={AT}", *more]
        out = folder / f"{method}-{stages}-{len(more)}"
        run(tiny(text, *settings, method=method.replace("muon", "noloco"), workers=REPLICAS * stages, steps=STEPS), out)
        return out

    return make


def stopped(whole: Path, path: Path) -> Path:
    """A copy that stopped at its checkpoint."""
    import shutil

    shutil.copytree(whole, path)
    for name in ("summary.json", "model.safetensors"):
        (path / name).unlink()
    Checkpoints(path).go_back(AT)
    return path


def go_on(path: Path, workers: int | None, stages: int | None) -> tuple[dict[str, Any], list[str]]:
    ready, told = prepare(path, workers, stages), Told()
    summary = launch(ready.config, path, told.lines.append, told.notices.append, resume=ready.step)
    return summary, ready.notes


METHODS = ("diloco", "noloco", "delayed", "eager", "muon")  # muon: noloco, with two inner optimizers
CHANGES = ((2, 1), (2, 4), (4, 2), (1, 2))
QUICK = {("noloco", 2, 1), ("muon", 1, 2)}  # late answers: test_regroup.py


@pytest.mark.parametrize(
    ("method", "before", "after"),
    [
        pytest.param(method, *change, marks=[] if (method, *change) in QUICK else pytest.mark.long)
        for method in METHODS
        for change in CHANGES
    ],
)
def test_the_weights_are_those_of_the_run_that_never_changed(
    begun: Any, tmp_path: Path, method: str, before: int, after: int
) -> None:
    path = stopped(begun(method, before), tmp_path / "run")
    summary, notes = go_on(path, None, after)
    expected = load_file(begun(method, 1) / "model.safetensors")
    found = load_file(path / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert summary["workers"] == REPLICAS * after and "keep their bits" in notes[0]
    never = json.loads((begun(method, 1) / "summary.json").read_text())
    assert summary["tokens"] == never["tokens"] and summary["val_loss"] == pytest.approx(never["val_loss"], abs=1e-6)


def test_totals_and_the_text_go_on(begun: Any, tmp_path: Path) -> None:
    """Bytes are conserved, and the same sequences are read as before."""
    path = stopped(begun("diloco", 2), tmp_path / "run")
    before = [Checkpoints(path).read_shard(AT, worker) for worker in range(4)]
    prepare(path, None, 4)
    after = [Checkpoints(path).read_shard(AT, worker) for worker in range(8)]
    for channel in ("outer", "pipeline"):
        sums = [
            sum(state["optimizer"]["traffic"][channel]["bytes_sent"] for state in states) for states in (before, after)
        ]
        assert sums[0] == sums[1] > 0
    assert [state["loader"] is None for state in after] == [False, True, True, True] * 2
    assert sum(state["tokens"] for state in after) == sum(state["tokens"] for state in before)
    assert Checkpoints(path).manifest(AT)["cut"] == [1, 2, 3]


@pytest.mark.long
def test_replicas_come_and_go(begun: Any, tmp_path: Path) -> None:
    """2 -> 3 -> 1 replicas of two stages: means per stage."""
    path = stopped(begun("diloco", 2), tmp_path / "run")
    old = [Checkpoints(path).read_shard(AT, worker) for worker in range(4)]
    prepare(path, 6)
    for number, new in enumerate(Checkpoints(path).read_shard(AT, worker) for worker in range(6)):
        for name, tensor in new["model"].items():
            held = [state["model"][name] for state in (old[number % 2], old[2 + number % 2])]
            expected = torch.stack(held).double().mean(0).float()
            assert torch.equal(tensor, expected)
    summary, notes = go_on(path, 2, None)
    assert summary["workers"] == 2 and "the mean over the 3 replicas" not in "".join(notes)  # equal on all
    assert summary["val_loss"] < 5.6


def test_other_cut_points_are_refused_in_a_line(begun: Any, tmp_path: Path) -> None:
    """Unless --stages says that they are wanted; then nothing changes but the cut."""
    path = stopped(begun("noloco", 2), tmp_path / "run")
    toml = path / "config.toml"
    text = toml.read_text()
    toml.write_text(text.replace("[pipeline]\n", "[pipeline]\ncut = [1]\n").replace("cut = []\n", ""))
    with pytest.raises(ValueError, match=r"begin at blocks \[3\], config.toml's at \[1\]; set") as refusal:
        prepare(path, None)
    assert "\n" not in str(refusal.value)
    ready = prepare(path, None, 2)
    assert ready.config.pipeline.cut == (1,) and Checkpoints(path).manifest(AT)["cut"] == [1]
    toml.write_text(toml.read_text().replace("stages = 2", "stages = 4").replace("cut = [1]", "cut = []"))
    with pytest.raises(ValueError, match="or resume with --stages 4"):
        read_and_prepare(path)


def read_and_prepare(path: Path) -> None:
    toml = path / "config.toml"
    toml.write_text(toml.read_text().replace("workers = 4", "workers = 8"))
    read_config(str(toml), {}, [])
    prepare(path, None)


@pytest.mark.parametrize(("stages", "says"), [(3, "choose a multiple of 3"), (8, "has 4 blocks"), (0, "choose 1 or")])
def test_what_cannot_be_is_refused_and_changes_nothing(begun: Any, tmp_path: Path, stages: int, says: str) -> None:
    path = stopped(begun("noloco", 2), tmp_path / "run")
    files = {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}
    with pytest.raises(ValueError, match=says):
        prepare(path, 4 if stages == 3 else None, stages)
    assert files == {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}
    assert lines_of(path / "metrics.jsonl")


OWN_RULE = ("tests.replicas.own_rules:LearnedOuterAdam", "replicas.sync_every=2")


def numbers(path: Path, workers: int) -> list[dict[str, float]]:
    shards = (Checkpoints(path).read_shard(AT, worker) for worker in range(workers))
    held = [shard["optimizer"]["outer"]["fragments"][0]["scalars"] for shard in shards]
    return [{name: float(one) for name, one in own.items()} for own in held]


def test_numbers_of_an_outer_rule_stay_with_their_stage(begun: Any, tmp_path: Path) -> None:
    """Each stage has learned a rate of its own: with more replicas it goes on with that; other stages are refused, and
    nothing is changed.
    """
    method, *settings = OWN_RULE
    path = stopped(begun(method, 2, *settings), tmp_path / "run")
    before = numbers(path, 4)
    assert before[0] == before[2] != before[1] == before[3]
    files = {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}
    with pytest.raises(ValueError, match=r"rate of the outer rule is 0\.\d+, 0\.\d+ in the 2 stages") as refusal:
        prepare(path, None, 1)
    assert "\n" not in str(refusal.value)
    assert files == {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}
    prepare(path, 6)
    assert numbers(path, 6) == before[:2] * 3


def test_numbers_of_an_outer_rule_are_of_each_new_stage(begun: Any, tmp_path: Path) -> None:
    """What the whole model has learned is where each of its stages begins."""
    method, *settings = OWN_RULE
    path = stopped(begun(method, 1, *settings), tmp_path / "run")
    (before, *_) = numbers(path, 2)
    ready, told = prepare(path, None, 2), Told()
    assert numbers(path, 4) == [before] * 4
    summary = launch(ready.config, path, told.lines.append, told.notices.append, resume=ready.step)
    assert summary["workers"] == 4 and summary["val_loss"] < 5.6
