"""Validation in stages when one of them is lost: the others hear of it at once, and judge rightly with who comes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import isles
from isles.comm.errors import PeerLost
from isles.comm.mesh import Mesh
from isles.models.cuts import pieces
from isles.models.stages import Stage
from isles.pipeline.compute import StageCompute
from isles.pipeline.evaluation import mean_loss
from tests.pipeline.ravnest import nodes
from tests.pipeline.ravnest.averages import Killed, end_after
from tests.pipeline.ravnest.nodes import BLOCKS, Wet

TEXTS = 6


def judge(world: Mesh, ranks: list[int], texts: list[torch.Tensor]) -> float:
    """By a cluster of three."""
    group = world.world.among(ranks, "pipeline")
    cut = pieces((1, 3), BLOCKS, loss_at_origin=False)
    compute = StageCompute(Stage(Wet(0.0), cut[group.rank]), group, nodes.form(), 1)
    return mean_loss(compute, group, texts)


def texts(first: int) -> list[torch.Tensor]:
    return [nodes.window(first + number) for number in range(TEXTS)]


def judge_twice(world: Mesh, victim: int, after: int) -> tuple[float, float | None]:
    """Seconds until the others knew that stage `victim` is lost; their loss with worker 3 in its place."""
    torch.set_num_threads(1)
    first, began = [0, 1, 2], world.transport.now()
    if world.rank == victim:
        end_after(world, after)
    if world.rank in first:
        try:
            judge(world, first, texts(0))
        except PeerLost:
            pass
        else:
            return 0.0, None  # it was too late
    knew = world.transport.now() - began
    ranks = [3 if rank == victim else rank for rank in first]
    return knew, judge(world, ranks, texts(100))


def expected() -> float:
    """By the whole model."""
    model, total = Wet(0.0).eval(), 0.0
    with torch.no_grad():
        for text in texts(100):
            x = model.enter(text[:, :-1])
            for block in model.blocks:
                x = model.through(block, x)
            total += float(torch.nn.functional.cross_entropy(model.leave(x).flatten(0, 1), text[:, 1:].flatten()))
    return total / TEXTS


@pytest.mark.parametrize("victim", [1, *(pytest.param(rank, marks=pytest.mark.long) for rank in (0, 2))])
def test_a_loss_in_validation_is_known_at_once(victim: int) -> None:
    """At any message that the lost stage would have sent; the next judgement reads nothing of the broken one."""
    links = isles.Links(bandwidth=1e7, latency=0.01, jitter=0.5)
    tried = 0
    for after in range(12):
        done: list[Any] = isles.run_virtual(
            judge_twice, 4, links=links, args=(victim, after), step_seconds=0.0, return_errors=True
        )
        if not isinstance(done[victim], Killed):
            break
        left = [one for rank, one in enumerate(done) if rank != victim]
        if any(not isinstance(one, Exception) and one[1] is None for one in left):
            continue  # somebody had all that it needed before
        assert not any(isinstance(one, Exception) for one in left), left
        assert all(knew < 1.0 and loss == pytest.approx(expected(), rel=1e-6) for knew, loss in left)
        tried += 1
    assert tried >= (1 if victim == 2 else 2)
