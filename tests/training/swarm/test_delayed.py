"""Updates behind the next step's microbatches: the delayed recursion of one process, whoever is lost."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from isles.data import Loader, load_corpus
from isles.models import build, limits
from isles.training.config.inner import lr_factor
from isles.training.config.reading import read_config
from isles.training.config.sections import Config
from isles.training.optimizer import inner_optimizer
from isles.training.simulated_churn import SimulatedSwarm
from isles.training.worker import train_worker
from tests.pipeline.swarm import killing
from tests.training.swarm.test_simulated import EVENTS, write
from tests.training.swarm.test_swarm import config as synchronous
from tests.training.swarm.test_swarm import furthest, train

torch.set_num_threads(1)


def config(*more: str) -> Config:
    return synchronous("pipeline.swarm.delay_updates=1", "run.validate_every=0", *more)


def recursion(read: Config) -> dict[str, Tensor]:
    """The weights of one process: each gradient is of the weights of two updates before, or of those at the start."""
    model = build(read.model, seed=read.run.seed)
    loader = Loader(load_corpus(read.data), read.data, context=limits(read.model)[0], worker=0, workers=1, seed=0)
    inner = inner_optimizer(model, read.inner, "adamw")
    rows, count = read.data.batch_size // read.pipeline.microbatches, read.pipeline.microbatches
    parameters = list(model.parameters())
    now = before = [parameter.detach().clone() for parameter in parameters]
    for step in range(1, read.run.steps + 1):
        put(parameters, before)
        model.zero_grad()
        for first in range((step - 1) * rows * count, step * rows * count, rows):
            (model(loader.read(np.arange(first, first + rows))).loss / count).backward()
        put(parameters, now)
        if read.inner.max_norm:
            torch.nn.utils.clip_grad_norm_(parameters, read.inner.max_norm)
        for group in inner.param_groups:
            group["lr"] = read.inner.lr * lr_factor(step, read.run.steps, read.inner)
        inner.step()
        before, now = now, [parameter.detach().clone() for parameter in parameters]
    return dict(model.state_dict())


@torch.no_grad()
def put(parameters: list[torch.nn.Parameter], values: list[Tensor]) -> None:
    for parameter, value in zip(parameters, values, strict=True):
        parameter.copy_(value)


@pytest.fixture(scope="module")
def expected() -> dict[str, Tensor]:
    return recursion(config())


@pytest.mark.long
@pytest.mark.parametrize(
    "consistency", ["exact", *(pytest.param(other, marks=pytest.mark.long) for other in ("strict", "relaxed"))]
)
def test_updates_are_the_delayed_recursion(expected: Any, tmp_path: Path, consistency: str) -> None:
    _, weights = train(config(f"pipeline.swarm.consistency={consistency}"), tmp_path / "run")
    assert furthest(weights, expected) < 1e-12


@pytest.mark.long
def test_one_peer_a_stage_has_the_same_bits(tmp_path: Path) -> None:
    read = config("pipeline.swarm.peers=[1,1,1]", "world.workers=3", "inner.max_norm=0")
    _, weights = train(read, tmp_path / "run")
    assert furthest(weights, recursion(read)) == 0


@pytest.mark.long
def test_processes_give_the_same(expected: Any, tmp_path: Path) -> None:
    _, weights = train(config("world.backend=distributed"), tmp_path / "run")
    assert furthest(weights, expected) < 1e-12


@pytest.mark.long
def test_a_checkpoint_is_gone_on_from_to_the_bit(tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    _, first = train(config("run.checkpoint_every=4"), whole)
    shutil.copytree(whole, cut)
    for name in ("summary.json", "model.safetensors"):
        (cut / name).unlink()
    _, again = train(read_config(str(cut / "config.toml"), {}, []), cut, resume=4)
    assert furthest(first, again) == 0


@pytest.mark.long
def test_who_comes_and_goes_changes_nothing(tmp_path: Path) -> None:
    read = config()
    folder = tmp_path / "run"
    swarm = SimulatedSwarm(
        read, write(tmp_path / "trace.jsonl", EVENTS), folder, lambda line: None, lambda notice: None
    )
    summary = swarm.run()
    assert {key: summary[key] for key in ("joins", "deaths", "leaves")} == {"joins": 3, "deaths": 2, "leaves": 2}
    assert furthest(load_file(str(folder / "model.safetensors")), recursion(read)) < 1e-12


def killed(expected: dict[str, Tensor], folder: Path, deaths: dict[int, int], read: Config) -> None:
    folder.mkdir()
    args = (read, folder, None, load_corpus(read.data))
    done = killing.run(train_worker, read.world.workers, args, deaths, links="home-fibre", step_seconds=0.1)
    assert [rank for rank, each in enumerate(done) if each is None] == sorted(deaths)
    assert furthest(load_file(str(folder / "model.safetensors")), expected) < 1e-12, deaths


@pytest.mark.long
def test_killed_peers_change_nothing(expected: Any, tmp_path: Path) -> None:
    """One of each stage, at messages of their own."""
    killed(expected, tmp_path / "run", {0: 700, 3: 300, 6: 1000}, config())


@pytest.mark.long
@pytest.mark.parametrize("consistency", ["exact", "strict"])
def test_a_peer_lost_at_any_message_changes_nothing(tmp_path: Path, consistency: str) -> None:
    """In half of the runs its share of a sum is lost, and the others go back into that step."""
    small = ("pipeline.swarm.peers=[2,3]", "pipeline.stages=2", "world.workers=5", "model.layers=2", "run.steps=3")
    read = config(*small, "pipeline.microbatches=3", f"pipeline.swarm.consistency={consistency}")
    wanted = recursion(read)
    for number, message in enumerate(range(36, 350, 6)):
        killed(wanted, tmp_path / str(message), {3 * (number % 2): message}, read)


@pytest.mark.long
def test_the_sum_of_gradients_hides_behind_microbatches(tmp_path: Path) -> None:
    """On the virtual clock, 3 stages of 3 equal peers, 20 Mbit/s, 10 ms."""
    model = ("model.d_model=64", "model.ffn=256", "model.heads=4", "model.context=8", "data.batch_size=24")
    peers = ("pipeline.swarm.peers=[3,3,3]", "world.workers=9", "pipeline.microbatches=24")
    links = ("world.virtual.links='20Mbit/s, 10ms'", "world.virtual.step_seconds=7.2", "run.steps=8", "run.log_every=8")
    took = []
    for delay in (0, 1):
        read = config(*model, *peers, *links, f"pipeline.swarm.delay_updates={delay}")
        summary, _ = train(read, tmp_path / str(delay))
        took.append(summary["virtual_seconds"])
    print("seconds", took, "ratio", took[0] / took[1])
    assert took[0] > 1.15 * took[1]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["replicas.method=diloco"], "pipeline.swarm.delay_updates = 1"),
        (["pipeline.swarm.stage_lost=rebuild"], 'pipeline.swarm.stage_lost = "rebuild"'),
        (["pipeline.swarm.delay_updates=2"], "pipeline.swarm.delay_updates = 2: choose 0, or 1 step"),
        (
            ["pipeline.routing=fixed", "pipeline.swarm.peers=[]", "pipeline.stages=7"],
            'pipeline.swarm.delay_updates = 1 acts with routing = "swarm" only',
        ),
    ],
)
def test_what_does_not_go_with_it_is_refused_in_a_line(more: list[str], words: str) -> None:
    with pytest.raises(ValueError) as error:
        config(*more)
    assert words in str(error.value) and "\n" not in str(error.value)
