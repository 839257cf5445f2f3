"""Stages that lose all of their peers: made anew of their neighbours, or the end of the run in a line."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from isles.comm.mesh import Mesh
from isles.data import Corpus, Loader, load_corpus
from isles.models import build
from isles.pipeline.swarm.swarm import StageLost
from isles.training.config.inner import lr_factor
from isles.training.config.sections import Config
from isles.training.kinds import layout_of
from isles.training.swarm import trainer as trainers
from isles.training.swarm.trainer import SwarmTrainer
from tests.cli.command import isles
from tests.pipeline.swarm import killing
from tests.training.swarm.test_simulated import run as churned
from tests.training.swarm.test_swarm import config, fragile, furthest

REBUILD = (
    "pipeline.swarm.peers=[2,2,2]",
    "world.workers=6",
    "pipeline.swarm.stage_lost=rebuild",
    "run.validate_every=3",
)


class Noting(SwarmTrainer):
    """Remembers the step in which it made a stage anew."""

    revived = 0

    def revive(self, *given: Any) -> Any:
        self.revived = self.model_step.step
        self.steps_before = self.optimizer.steps
        return super().revive(*given)


def trained(world: Mesh, read: Config, corpus: Corpus) -> dict[str, Any]:
    trainer = Noting(read, world.arranged(layout_of(read)), corpus)
    trainer.run(None)
    # Where validation or the end found the stage lost, the optimizer's steps had been done before.
    between = trainer.revived and trainer.steps_before == trainer.revived
    return {
        "revived": trainer.revived + bool(between),
        "rate": trainer.schedule.get_last_lr()[0],
        "weights": {name: tensor.clone() for name, tensor in trainer.optimizer.weights().items()},
    }


def whole(done: list[Any]) -> tuple[dict[str, Tensor], int]:
    """The weights of all stages, and before which step one was made anew; 0: none."""
    left = [each[0] for each in done if each is not None]
    weights = {name: tensor for each in left for name, tensor in each["weights"].items()}
    return weights, max(each["revived"] for each in left)


def run(deaths: dict[int, int], *more: str) -> list[Any]:
    read = config(*REBUILD, *more)
    args = (read, load_corpus(read.data))
    return killing.run(trained, 6, args, deaths, links="home-fibre", step_seconds=0.1)


@cache
def expected(before: int) -> dict[str, Tensor]:
    """One process whose second block is made of the others before step `before`; 0: never. Written out by hand."""
    read = config(*REBUILD)
    inner, steps = read.inner, read.run.steps
    loader = Loader(load_corpus(read.data), read.data, context=16, worker=0, workers=1, seed=read.run.seed)
    model: Any = build(read.model, seed=read.run.seed)
    blocks = [list(block.parameters()) for block in model.blocks]
    lost = {id(parameter) for parameter in blocks[1]}
    moments = {name: [torch.zeros_like(own), torch.zeros_like(own), 0] for name, own in model.named_parameters()}
    norms = [1.0, 1.0, 1.0]  # of no gradient yet: alike
    factor = 1.0
    for step in range(1, steps + 2):
        if step == before:
            for own, first, last in zip(blocks[1], blocks[0], blocks[2], strict=True):
                own.data = (norms[0] * first.data + norms[2] * last.data) / (norms[0] + norms[2])
            for name, own in model.named_parameters():
                if id(own) in lost:
                    moments[name] = [torch.zeros_like(own), torch.zeros_like(own), 0]
            factor = 1.1
        if step > steps:
            break
        model.zero_grad()
        for part in loader.read(np.arange((step - 1) * 12, step * 12)).split(2):
            (model(part).loss / 6).backward()
        norms = [sum(float(own.grad.square().sum()) for own in block) ** 0.5 for block in blocks]
        norm = sum(float(own.grad.square().sum()) for own in model.parameters()) ** 0.5
        rate = inner.lr * lr_factor(step, steps, inner)
        for name, own in model.named_parameters():
            gradient = own.grad * min(1.0, inner.max_norm / (norm + 1e-6))
            first, second, count = moments[name]
            first = inner.betas[0] * first + (1 - inner.betas[0]) * gradient
            second = inner.betas[1] * second + (1 - inner.betas[1]) * gradient.square()
            moments[name] = [first, second, count + 1]
            its = rate * (factor if id(own) in lost else 1.0)
            change = first / (1 - inner.betas[0] ** (count + 1))
            change = change / ((second / (1 - inner.betas[1] ** (count + 1))).sqrt() + 1e-8)
            decay = inner.weight_decay if own.ndim >= 2 else 0.0
            own.data = own.data * (1 - its * decay) - its * change
    return {name: own.detach().clone() for name, own in model.named_parameters()}


def check_rebuilt(message: int) -> int:
    weights, before = whole(run({2: message, 3: message}))
    assert furthest(weights, expected(before)) < 1e-12, (message, before)
    return before


def test_a_stage_without_peers_is_made_of_its_neighbours() -> None:
    assert 1 < check_rebuilt(400) < 8


@pytest.mark.long
def test_at_any_moment() -> None:
    """From the first messages to the last: in steps, in validation, while the model is put together."""
    steps = {check_rebuilt(message) for message in range(20, 1200, 60)}
    print(sorted(steps))
    assert len(steps) >= 6


@pytest.mark.long
@pytest.mark.parametrize("consistency", ["strict", "relaxed"])
def test_any_consistency(consistency: str) -> None:
    weights, before = whole(run({2: 500, 3: 510}, f"pipeline.swarm.consistency={consistency}"))
    assert before and furthest(weights, expected(before)) < 1e-12


@pytest.mark.long
def test_a_mutant_that_copies_one_neighbour_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainers, "merged", lambda before, norm, after, other: before)
    weights, before = whole(run({2: 400, 3: 400}))
    assert furthest(weights, expected(before)) > 1e-3


@pytest.mark.parametrize(
    ("stage", "words"),
    [(0, "no other stage has its embedding"), pytest.param(2, "no other stage has its head", marks=pytest.mark.long)],
)
def test_first_and_last_stage_end_the_run(stage: int, words: str) -> None:
    with pytest.raises(StageLost, match=f"stage {stage} has no peer left: {words}"):
        run({2 * stage: 400, 2 * stage + 1: 430})


@pytest.mark.long
@pytest.mark.parametrize(("joins", "comer"), [(1.5, True), (20.0, False)], ids=["comes", "too late"])
def test_who_comes_in_time_takes_the_place(joins: float, comer: bool, tmp_path: Path) -> None:
    """Else one of another stage does, as soon as patience ends."""
    events = [{"at": 0.5, "kill": 2}, {"at": 0.6, "kill": 3}, {"at": joins, "join": 1}]
    swarm, summary, weights = churned(tmp_path / "run", events, *REBUILD, "pipeline.swarm.stage_patience=5")
    rebuilt = {rank: each.model_step.rebuilt for rank, each in swarm.workers.items()}
    assert sum(rebuilt.values()) == 1 and rebuilt[6] == comer if 6 in rebuilt else not comer
    assert min(furthest(weights, expected(before)) for before in range(2, 8)) < 1e-12
    assert summary["rebuilt"] == 1 and (summary["virtual_seconds"] > 5) == (not comer)


@pytest.mark.long
def test_processes_go_on(tmp_path: Path) -> None:
    """The only peer of stage 1 ends by SIGKILL; one of another stage goes there."""
    (tmp_path / "plain.toml").write_text("")
    more = ("pipeline.swarm.peers=[2,1,2]", "world.workers=5", "pipeline.swarm.stage_lost=rebuild", "run.steps=6")
    words = fragile(tmp_path / "mark", 1, 27, *more)
    code, _, error = isles("train", "plain.toml", "--out", "run", *words, folder=tmp_path)
    assert code == 0, error
    assert "to stage 1 before step" in error and "rebuilds it from its neighbours" in error
    assert all(bool(tensor.isfinite().all()) for tensor in load_file(str(tmp_path / "run/model.safetensors")).values())
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert max(line.get("rebuilt", 0) for line in lines) == 1


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["pipeline.swarm.peers=[3,4]"], 'pipeline.swarm.stage_lost = "rebuild": of 2 stages none has two neighbours'),
        (["pipeline.boundary.kind=bottleneck:8"], "a stage has learned layers that its neighbours do not have"),
        (
            ["pipeline.swarm.stage_lost=stop", "pipeline.swarm.stage_patience=5"],
            'acts with stage_lost = "rebuild": set that',
        ),
        (["pipeline.swarm.stage_patience=-1"], "choose 0 seconds or more"),
    ],
)
def test_what_cannot_be_rebuilt_is_refused_in_a_line(more: list[str], words: str) -> None:
    with pytest.raises(ValueError) as error:
        config("pipeline.swarm.stage_lost=rebuild", *more)
    assert words in str(error.value) and "\n" not in str(error.value)


def test_stages_of_unequal_blocks_are_refused() -> None:
    with pytest.raises(ValueError, match="stages of 2, 1, 1 blocks cannot stand in for each other"):
        run({}, "model.layers=4", "pipeline.cut=[2,3]")
