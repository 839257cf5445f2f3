"""Whole runs in clusters: run directory, exact resume, the dry run's bytes, a killed worker, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import isles
from isles.comm.mesh import Mesh
from isles.data import Corpus, load_corpus
from isles.plan.peers import plan_clusters
from isles.running.run import launch
from isles.training.config.reading import read_config, to_toml
from isles.training.config.sections import Config
from isles.training.records.checkpoint import Checkpoints
from isles.training.records.reshard import prepare
from isles.training.worker import deadlines, train_worker
from tests.cli.command import isles as command
from tests.pipeline.ravnest import averages

SETTINGS = [
    "model.layers=4",
    "model.d_model=16",
    "model.heads=2",
    "model.ffn=32",
    "model.context=16",
    "model.tie_embeddings=false",
    "data.batch_size=4",
    "data.validation_sequences=16",
    "replicas.method=localsgd",
    "replicas.sync_every=4",
    "pipeline.routing=ravnest",
    "pipeline.ravnest.clusters=[[1, 2], [3], []]",
    "pipeline.microbatches=2",
    "pipeline.clip=stage",
    "world.workers=6",
    "world.backend=virtual",
    "inner.warmup_steps=2",
    "run.steps=12",
    "run.log_every=2",
    "run.validate_every=6",
]


def config(*more: str) -> Config:
    return read_config(None, {}, [*SETTINGS, *more])


def train(config: Config, out: Path, resume: int | None = None) -> dict[str, Any]:
    return launch(config, out, lambda line: None, lambda notice: None, resume)


def lines(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def test_a_run_resumes_exactly_and_sends_what_its_dry_run_says(tmp_path: Path) -> None:
    """One worker stands by."""
    more = ("pipeline.ravnest.average_optimizer=true", 'pipeline.ravnest.stage_lr="1/(1+tau)"', "world.workers=7")
    read = config("run.steps=8", "run.checkpoint_every=6", *more)
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    summary = train(read, whole)
    shutil.copytree(whole, cut)
    for name in ("summary.json", "model.safetensors"):
        (cut / name).unlink()
    again = train(read_config(str(cut / "config.toml"), {}, []), cut, resume=6)

    ours, theirs = (load_file(str(out / "model.safetensors")) for out in (whole, cut))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours) and ours.keys() == theirs.keys()
    assert lines(whole) == lines(cut)
    assert {key for key in summary if summary[key] != again[key]} <= {"train_seconds", "wall_seconds"}
    assert summary["val_loss"] == summary["val_loss_replicas"] and summary["replicas"] == 3
    ages = {line["worker"]: line["staleness"] for line in lines(whole)}
    assert ages[2] == ages[4] == ages[5] == 0  # leaves
    plan = plan_clusters(read)
    counted = sum(summary["channels"][name]["bytes_sent"] for name in ("pipeline", "outer", "inner"))
    assert sum(plan.bytes_sent) / 7 == counted
    assert plan.averages == 2 and plan.agreements == plan.standby == 1


@pytest.mark.long
def test_gloo_gives_the_same_model(tmp_path: Path) -> None:
    """And goes on from its checkpoint to the same bits."""
    for backend in ("virtual", "distributed"):
        made = config(f"world.backend={backend}", "run.checkpoint_every=6")
        train(made, tmp_path / backend)
    again = tmp_path / "again"
    shutil.copytree(tmp_path / "distributed", again)
    for name in ("summary.json", "model.safetensors"):
        (again / name).unlink()
    train(read_config(str(again / "config.toml"), {}, []), again, resume=6)
    ours, *others = (
        load_file(str(tmp_path / name / "model.safetensors")) for name in ("virtual", "distributed", "again")
    )
    assert all(torch.equal(ours[name], theirs[name]) for theirs in others for name in ours)


def ends_after(world: Mesh, config: Config, corpus: Corpus, victim: int, messages: int) -> dict[str, Any] | None:
    """What a worker comes to; `victim` ends before it sends one more message than so many."""
    if world.rank == victim:
        averages.end_after(world, messages)
    return train_worker(world, config, corpus=corpus)


@pytest.mark.parametrize(("victim", "messages"), [(0, 40), pytest.param(3, 25, marks=pytest.mark.long)])
def test_a_cluster_of_which_a_worker_is_lost_is_whole_again(victim: int, messages: int) -> None:
    """One that stands by takes the root's place, with its text, or a leaf's: three clusters at the end."""
    made = config("world.workers=7", "replicas.sync_every=3", "run.validate_every=0")
    corpus = load_corpus(made.data)
    done = isles.run_virtual(
        ends_after, 7, links="lan", args=(made, corpus, victim, messages), deadlines=deadlines(made), return_errors=True
    )
    assert [rank for rank, one in enumerate(done) if isinstance(one, Exception)] == [victim], done
    left = [one for one in done if not isinstance(one, Exception)]
    assert sum(one["val_loss_replica"] is not None for one in left) == 3
    assert len({one["val_loss_replica"] for one in left} - {None}) == 1
    assert sum(one["val_loss"] is not None for one in left) == 1
    descriptor = max(left, key=lambda one: one["parameters"])
    assert descriptor["val_loss"] is not None and descriptor["val_loss"] < 5.5


@pytest.mark.long
def test_a_lost_worker_comes_back_when_the_run_is_resumed(tmp_path: Path) -> None:
    """Its cluster was out, and is whole again from the next average on."""
    out, read = tmp_path / "run", config("run.steps=10", "run.checkpoint_every=6")
    train(read, out)
    for name in ("summary.json", "model.safetensors"):
        (out / name).unlink()
    checkpoints = Checkpoints(out)
    facts = {key: value for key, value in checkpoints.manifest(6).items() if key not in ("workers", "ranks", "step")}
    checkpoints.commit(6, [0, 1, 2, 4, 5], facts, keep=0)  # as if worker 3 had been lost
    ready = prepare(out, None)
    assert "workers 3 had been lost: they load the others' weights" in ready.notes[-1]
    summary = train(ready.config, out, resume=ready.step)
    assert summary["workers"] == 6 and summary["val_loss"] == summary["val_loss_replicas"]
    seen = {line["worker"] for line in lines(out) if line["step"] > 8}
    assert seen == set(range(6))


@pytest.mark.long
@pytest.mark.parametrize(("after", "workers"), [(9, 6), (31, 6), (31, 7)])
def test_a_killed_worker_takes_its_cluster_out_of_the_run(tmp_path: Path, after: int, workers: int) -> None:
    """By SIGKILL, over gloo: the run ends with a model of the others', or of all where one stood by."""
    own = [one for one in SETTINGS if not one.startswith("model.")] + [
        "world.backend=distributed",
        "model.factory=tests.pipeline.ravnest.drowning:make",
        "model.context=8",
        "model.vocab=256",
        f'model.options={{mark = "{tmp_path / "mark"}", after = {after}}}',
        "run.steps=20",
        f"world.workers={workers}",
    ]
    sets = [word for one in own for word in ("--set", one)]
    (tmp_path / "plain.toml").write_text("")
    code, _, error = command(
        "train", str(tmp_path / "plain.toml"), "--out", str(tmp_path / "run"), *sets, folder=tmp_path
    )
    assert code == 0, error
    assert (tmp_path / "mark").exists() and "the others go on without it" in error
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["workers"] == workers - 1 and summary["val_loss"] is not None
    assert ("in place of a lost worker" in error) == (workers == 7)
    assert (tmp_path / "run" / "model.safetensors").exists()


def test_the_configuration_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text(to_toml(config()))
    assert read_config(str(path), {}, []) == config()


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["world.workers=5"], "pipeline.ravnest.clusters = [[1, 2], [3], []]: they are 6 workers, world.workers = 5"),
        (["world.workers=4", "pipeline.ravnest.clusters=[[2]]"], "another cluster, but there is only one; set it to 2"),
        (
            ["replicas.method=diloco"],
            'replicas.method = "diloco" does not go with pipeline.routing = "ravnest": clusters average weights',
        ),
        (
            ["model.tie_embeddings=true"],
            "model.tie_embeddings = true does not go with peers: the embedding is the head as well",
        ),
        (
            ["pipeline.clip=model"],
            "and inner.max_norm: it wants all stages at one step",
        ),
        (["pipeline.boundary.kind=dct:0.5"], 'pipeline.boundary.kind = "dct:0.5" does not go with'),
        (["pipeline.cut=[1,2]"], "cut and ravnest.clusters say the same"),
        (["pipeline.ravnest.clusters=[[],[]]", "world.workers=2"], "clusters of one stage each are replicas"),
        (
            ["pipeline.routing=fixed"],
            'pipeline.ravnest.clusters = [[1, 2], [3], []] acts with routing = "ravnest" only',
        ),
        (["run.start=runs/other"], 'run.start = "runs/other" does not go with pipeline.stages'),
        (["pipeline.stages=2"], "pipeline.stages = 2: ravnest.clusters = [[1, 2], [3], []] is 3 stages"),
        (["replicas.on_late=quorum"], 'replicas.on_late = "quorum" does not go with pipeline.routing = "ravnest"'),
        (["memory.vectors=disk", "memory.disk=."], 'memory.vectors = "disk" does not go with pipeline.routing'),
    ],
)
def test_what_does_not_go_with_clusters_is_refused_in_a_line(more: list[str], words: str) -> None:
    with pytest.raises(ValueError) as error:
        config(*more)
    assert words in str(error.value) and "\n" not in str(error.value)


def test_cuts_that_the_model_does_not_have_are_refused() -> None:
    with pytest.raises(ValueError, match=r"one of pipeline.ravnest.clusters = \[1, 9\]: name rising numbers of blocks"):
        plan_clusters(config("pipeline.ravnest.clusters=[[1, 9], [3], []]"))
