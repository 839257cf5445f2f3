"""Whole runs in swarms: the weights of one process, a checkpoint gone on from, killed peers, and what is refused."""

from __future__ import annotations

import json
import shutil
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from safetensors.torch import load_file
from torch import Tensor

from isles.data import load_corpus
from isles.running.run import launch
from isles.training.config.reading import read_config, to_toml
from isles.training.config.sections import Config
from isles.training.worker import train_worker
from tests.cli.command import isles
from tests.pipeline.swarm import killing

ONE = [
    "model.layers=3",
    "model.d_model=16",
    "model.heads=2",
    "model.ffn=32",
    "model.context=16",
    "model.dtype=float64",
    "model.tie_embeddings=false",
    "data.batch_size=12",
    "data.batch_mode=global",
    "data.validation_sequences=24",
    "replicas.method=none",
    "inner.warmup_steps=2",
    "inner.max_norm=0.5",
    "world.backend=virtual",
    "run.steps=8",
    "run.log_every=2",
    "run.validate_every=4",
]
SWARM = [*ONE, "pipeline.routing=swarm", "pipeline.swarm.peers=[2,3,2]", "pipeline.microbatches=6", "world.workers=7"]


def config(*more: str) -> Config:
    return read_config(None, {}, [*SWARM, *more])


def train(config: Config, out: Path, resume: int | None = None) -> tuple[dict[str, Any], dict[str, Tensor]]:
    summary = launch(config, out, lambda line: None, lambda notice: None, resume)
    return summary, load_file(str(out / "model.safetensors"))


@cache
def single() -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The same batches in one process, that accumulates the gradients of as many microbatches."""
    one = read_config(None, {}, [*ONE, "world.workers=1", "data.batch_size=2", "inner.accumulation=6"])
    with TemporaryDirectory() as folder:
        return train(one, Path(folder) / "run")


@pytest.fixture(scope="session")
def alone() -> tuple[dict[str, Any], dict[str, Tensor]]:
    return single()


@pytest.fixture(scope="module")
def saving(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has saved a checkpoint on its way."""
    out = tmp_path_factory.mktemp("saving") / "run"
    train(config("run.checkpoint_every=4"), out)
    return out


def furthest(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    assert ours.keys() == theirs.keys()
    return max(float((ours[name] - theirs[name]).abs().max()) for name in ours)


@pytest.mark.parametrize(
    "consistency", ["exact", *(pytest.param(other, marks=pytest.mark.long) for other in ("strict", "relaxed"))]
)
def test_a_run_is_one_process_that_accumulates(alone: Any, saving: Path, tmp_path: Path, consistency: str) -> None:
    out = saving if consistency == "exact" else tmp_path / "run"
    if consistency != "exact":
        train(config(f"pipeline.swarm.consistency={consistency}"), out)
    summary = json.loads((out / "summary.json").read_text())
    assert furthest(load_file(str(out / "model.safetensors")), alone[1]) < 1e-12
    assert summary["val_loss"] == pytest.approx(alone[0]["val_loss"], abs=1e-12)
    assert summary["tokens"] == alone[0]["tokens"] and summary["replica_std"] == 0
    for line in (out / "metrics.jsonl").read_text().splitlines():
        assert json.loads(line).get("peers", 7) == 7


@pytest.mark.long
def test_one_peer_a_stage_has_the_same_bits(alone: Any, tmp_path: Path) -> None:
    more = ("pipeline.swarm.peers=[1,1,1]", "world.workers=3", "inner.max_norm=0")
    _, ours = train(config(*more), tmp_path / "run")
    one = [*ONE, "world.workers=1", "data.batch_size=2", "inner.accumulation=6", "inner.max_norm=0"]
    _, theirs = train(read_config(None, {}, one), tmp_path / "one")
    assert furthest(ours, theirs) == 0


@pytest.mark.long
def test_processes_give_the_same_model(alone: Any, tmp_path: Path) -> None:
    _, weights = train(config("world.backend=distributed"), tmp_path / "run")
    assert furthest(weights, alone[1]) < 1e-12


def test_a_checkpoint_is_gone_on_from(alone: Any, saving: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut"
    shutil.copytree(saving, cut)
    for name in ("summary.json", "model.safetensors"):
        (cut / name).unlink()
    summary, weights = train(read_config(str(cut / "config.toml"), {}, []), cut, resume=4)
    assert furthest(weights, alone[1]) < 1e-12
    assert summary["tokens"] == alone[0]["tokens"]


def test_killed_peers_change_nothing(alone: Any, tmp_path: Path) -> None:
    """One of each stage, at messages of their own: the model is that of an undisturbed run."""
    read = config()
    out = tmp_path / "run"
    out.mkdir()
    deaths = {0: 700, 3: 300, 6: 1000}
    args = (read, out, None, load_corpus(read.data))
    done = killing.run(train_worker, 7, args, deaths, links="home-fibre", step_seconds=0.1)
    assert [rank for rank, each in enumerate(done) if each is None] == [0, 3, 6]
    assert furthest(load_file(str(out / "model.safetensors")), alone[1]) < 1e-12


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["world.workers=8"], "pipeline.swarm.peers = [2, 3, 2]: they are 7 workers, world.workers = 8"),
        (["pipeline.swarm.peers=[]", "pipeline.stages=3", "world.workers=2"], "2 workers leave a stage without a peer"),
        (["pipeline.swarm.peers=[3,0,4]"], "every stage needs at least 1 at the start"),
        (["pipeline.stages=2"], "pipeline.stages = 2: swarm.peers = [2, 3, 2] is 3 stages"),
        (
            ["replicas.method=ddp"],
            'does not go with pipeline.routing = "swarm": the peers of a stage sum their gradients',
        ),
        (
            ["model.tie_embeddings=true"],
            "model.tie_embeddings = true does not go with peers: the embedding is the head as well",
        ),
        (["pipeline.recompute=true"], 'pipeline.recompute = true does not go with routing = "swarm"'),
        (["pipeline.swarm.forward_deadline=0"], "pipeline.swarm.forward_deadline = 0.0: choose seconds above 0"),
        (["pipeline.routing=fixed"], 'pipeline.swarm.peers = [2, 3, 2] acts with routing = "swarm" only'),
        (["pipeline.microbatches=5"], "pipeline.microbatches = 5 does not divide a replica's batch of 12"),
        (["world.inner=7"], "world.inner"),
        (
            ["pipeline.swarm.consistency=strict", "pipeline.swarm.backward_deadline=5"],
            "backward_deadline = 5.0 does not go with consistency",
        ),
    ],
)
def test_what_does_not_go_with_a_swarm_is_refused_in_a_line(more: list[str], words: str) -> None:
    with pytest.raises(ValueError) as error:
        config(*more)
    assert words in str(error.value) and "\n" not in str(error.value)


def test_the_configuration_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text(to_toml(config()))
    assert read_config(str(path), {}, []) == config()


KILLS = (1, 4, 7, 10, 12)


@pytest.mark.long
@pytest.mark.parametrize("after", KILLS)
@pytest.mark.parametrize("stage", [0, 2])
def test_a_process_that_is_killed_changes_nothing(tmp_path: Path, after: int, stage: int) -> None:
    """By SIGKILL, over gloo, in the backward or forward pass of that number: the run ends with the same model."""
    found = {}
    for name, number in (("well", 0), ("killed", after)):
        sets = fragile(tmp_path / name, stage, number)
        (tmp_path / "plain.toml").write_text("")
        out = tmp_path / f"run-{name}"
        code, _, error = isles("train", str(tmp_path / "plain.toml"), "--out", str(out), *sets, folder=tmp_path)
        assert code == 0, error
        assert (tmp_path / name).exists() == (name == "killed")
        found[name] = load_file(str(out / "model.safetensors"))
    assert "the others go on without it" in error
    assert furthest(found["well"], found["killed"]) < 1e-12


def fragile(mark: Path, stage: int, after: int, *more: str, name: str = "SIGKILL", times: int = 1) -> list[str]:
    """The words of a command: over gloo, with a block that signals the first processes that come so far."""
    text = mark.parent / "text.txt"  # short, for reading much takes every process its time
    text.write_text("".join(f"{number} is {number * number} squared\n" for number in range(3000)))
    own = [one for one in SWARM if not one.startswith(("model.", "inner."))] + [
        f"data.path={text}",
        "world.backend=distributed",
        "model.factory=tests.training.swarm.fragile:make",
        "model.context=8",
        "model.vocab=256",
        "model.dtype=float64",
        "inner.warmup_steps=0",
        "inner.max_norm=0",
        "run.steps=5",
        "run.validate_every=0",
        f'model.options={{mark = "{mark}", stage = {stage}, after = {after}, name = "{name}", times = {times}}}',
    ]
    return [word for each in [*own, *more] for word in ("--set", each)]


@pytest.mark.long
@pytest.mark.parametrize("peers", ["[2,1,2]", "[2,2,2]"])
def test_a_lost_stage_or_peer_is_resumed(tmp_path: Path, peers: str) -> None:
    """After two checkpoints the only peer of a stage dies, and the run ends with a line; or one of two."""
    (tmp_path / "plain.toml").write_text("")
    found = {}
    for name, after in (("well", 0), ("killed", 27 if peers == "[2,1,2]" else 7)):
        out, mark = tmp_path / f"run-{name}", tmp_path / name
        more = (f"pipeline.swarm.peers={peers}", f"world.workers={sum(map(int, peers[1:-1].split(',')))}")
        words = fragile(mark, 1, after, *more, "run.checkpoint_every=2", "run.steps=6")
        code, _, error = isles("train", "plain.toml", "--out", str(out), *words, folder=tmp_path)
        if name == "killed" and peers == "[2,1,2]":
            assert code == 1 and "stage 1 has no peer left" in error and "isles resume" in error, error
            code, _, error = isles("resume", str(out), "--trust", folder=tmp_path)
        assert code == 0, error
        if name == "killed" and peers == "[2,2,2]":  # once more from the last checkpoint, with a peer in its place
            (out / "summary.json").unlink()
            (out / "model.safetensors").unlink()
            code, _, error = isles("resume", str(out), "--trust", folder=tmp_path)
            assert code == 0 and "start from the states of their stages' peers" in error, error
        found[name] = load_file(str(out / "model.safetensors"))
    assert furthest(found["well"], found["killed"]) < 1e-12
