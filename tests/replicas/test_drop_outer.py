"""`world.drop_outer`, DiLoCo's ablation of bad lines: what is dropped is in no mean, and its worker goes on alone."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import isles
from isles.comm.mesh import Mesh
from isles.network.noise import uniform
from tests.replicas.workers import LINKS, Net, adamw, loss_of, sgd, train_step, weights

H, ROUNDS, WORKERS, SEED = 2, 4, 3, 5
STREAM = 0x64726F70  # as `OuterSync` draws
PLAIN: dict[str, Any] = {"sync_every": H, "outer_lr": 0.7, "outer_momentum": 0.5}


def trained(world: Mesh, share: float | None, name: str = "diloco", **options: Any) -> list[tuple[Tensor, Tensor]]:
    """(live weights, anchor) after every round, before `finish`."""
    model = Net(dtype=torch.float64)
    optimizer: Any = isles.method(name)(model, adamw(model), world.outer, **{**PLAIN, **options})
    if share is not None:
        optimizer.drop_outer(share, SEED)
    seen = []
    for step in range(1, H * ROUNDS + 1):
        train_step(optimizer, world.rank, step)
        if step % H == 0:
            seen.append((weights(model), torch.cat([fragment.anchor.clone() for fragment in optimizer.fragments])))
    optimizer.finish()
    assert torch.equal(weights(model), seen[-1][1])  # the model of the run is the anchor
    assert optimizer.skipped == 0  # nothing was broken, and nothing was warned of
    return seen


def inner_step(optimizer: torch.optim.Optimizer, model: Net, worker: int, step: int) -> None:
    loss_of(model, worker, step).backward()
    optimizer.step()
    optimizer.zero_grad()


def run(share: float | None, workers: int = WORKERS, name: str = "diloco") -> Any:
    return isles.run_virtual(trained, workers, links=LINKS, args=(share, name))


def test_the_mean_is_of_what_came() -> None:
    """Replicas in a list, float64: Nesterov on the mean of those that came; the others go on from their own weights."""
    replicas = [Net(dtype=torch.float64) for _ in range(WORKERS)]
    inner = [adamw(replica) for replica in replicas]
    anchor, momentum = weights(replicas[0]), torch.zeros_like(weights(replicas[0]))
    logs, came = run(0.5), []
    for round in range(1, ROUNDS + 1):
        for rank, (replica, optimizer) in enumerate(zip(replicas, inner, strict=True)):
            for step in range((round - 1) * H + 1, round * H + 1):
                inner_step(optimizer, replica, rank, step)
        present = [rank for rank in range(WORKERS) if uniform(SEED, STREAM, round, 0, rank) >= 0.5]
        came.append(len(present))
        if present:
            gradient = torch.stack([anchor - weights(replicas[rank]) for rank in present]).mean(0)
            momentum = 0.5 * momentum + gradient
            anchor = anchor - 0.7 * (gradient + 0.5 * momentum)
        for rank in present:
            torch.nn.utils.vector_to_parameters(anchor.clone(), replicas[rank].parameters())
        for rank, log in enumerate(logs):
            torch.testing.assert_close(log[round - 1][1], anchor, rtol=0, atol=1e-12)
            torch.testing.assert_close(log[round - 1][0], weights(replicas[rank]), rtol=0, atol=1e-12)
            assert torch.equal(log[round - 1][1], logs[0][round - 1][1])  # anchors agree to the bit
    assert {1, 2} & set(came) and len(set(came)) > 1  # the seed shows rounds of several kinds


@pytest.mark.parametrize("name", ["diloco", "noloco"])
def test_none_and_all(name: str) -> None:
    """0: the bits of a run without it. 1: every worker trains on by itself, and no anchor moves."""
    without, none, every = run(None, name=name), run(0.0, name=name), run(1.0, name=name)
    for rank in range(WORKERS):
        pairs = zip(without[rank], none[rank], strict=True)
        assert all(torch.equal(a, b) for before, after in pairs for a, b in zip(before, after, strict=True))
        alone = Net(dtype=torch.float64)
        start, optimizer = weights(alone), adamw(alone)
        for step in range(1, H * ROUNDS + 1):
            inner_step(optimizer, alone, rank, step)
            if step % H == 0:
                live, anchor = every[rank][step // H - 1]
                assert torch.equal(live, weights(alone)) and torch.equal(anchor, start)


def test_a_single_worker() -> None:
    """Its rounds, which nobody else is in, are dropped too."""
    [log] = run(1.0, workers=1)
    assert all(torch.equal(anchor, log[0][1]) for _, anchor in log) and not torch.equal(log[0][0], log[1][0])


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("ddp", {}, "DDP sends no outer gradients"),
        ("delayed", {"sync_every": 2}, "land later"),
        ("eager", {"sync_every": 2}, "land later"),
        ("streaming-diloco", {"sync_every": 2, "fragments": "whole"}, "land later"),
        ("dilocox", {"sync_every": 2}, "land later"),
        ("sparta", {}, "keeps what did not travel"),
        ("sparseloco", {"sync_every": 2}, "a second time"),
        ("diloco", {"codec": "int4", "error_feedback": "local"}, "a second time"),
        ("diloco", {"weights": "samples"}, 'choose "equal"'),
        ("noloco", {"on_peer_failure": "solo"}, "by other rules"),
    ],
)
def test_refused(name: str, options: dict[str, Any], says: str) -> None:
    def worker(world: Mesh) -> None:
        model = copy.deepcopy(Net())
        isles.method(name)(model, sgd(model), world.outer, **options).drop_outer(0.5, SEED)

    with pytest.raises(Exception, match=says):
        isles.run_virtual(worker, 1, links=LINKS)
