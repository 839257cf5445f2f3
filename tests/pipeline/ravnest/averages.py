"""What the nodes of several clusters do in the tests of averaging; in a module of its own for fresh processes."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from isles.comm.mesh import Mesh
from isles.models.cuts import pieces
from isles.models.stages import Stage
from isles.pipeline.ravnest.averaging import ClusterAverage
from isles.pipeline.ravnest.quorum import Quorum
from isles.pipeline.ravnest.refinement import refinement
from isles.pipeline.ravnest.stage import AsyncStage, AsyncWays
from tests.pipeline.ravnest import nodes
from tests.pipeline.ravnest.nodes import BLOCKS, Wet

THREE = ((1, 2), (3,), ())
"""First blocks of clusters of 3, 2 and 1 stages."""


@dataclass(frozen=True)
class Plan:
    """cuts: of each cluster. moved: weights are moved apart before the first average, instead of training. victim: the
    rank that ends, after so many messages.
    """

    cuts: tuple[tuple[int, ...], ...] = THREE
    rounds: int = 1
    each: int = 1
    optimizer: str = "sgd"
    weights: Literal["equal", "samples"] = "equal"
    with_state: bool = False
    moved: bool = False
    victim: int | None = None
    after: int = 0

    @property
    def ranks(self) -> list[list[int]]:
        """Of each cluster."""
        found, first = [], 0
        for own in self.cuts:
            found.append(list(range(first, first + len(own) + 1)))
            first += len(own) + 1
        return found

    @property
    def workers(self) -> int:
        """In all."""
        return sum(map(len, self.ranks))


class Killed(RuntimeError):
    """The victim's end."""


def parts(plan: Plan) -> list[list[Stage]]:
    """Stages of each cluster."""
    return [[Stage(Wet(0.0), piece) for piece in pieces(cuts, BLOCKS, loss_at_origin=False)] for cuts in plan.cuts]


def text(cluster: int, number: int) -> Tensor:
    """Of a microbatch of a cluster."""
    return nodes.window(1000 * cluster + number)


def samples(plan: Plan, cluster: int) -> int:
    """That a cluster counts for."""
    return plan.each * (1 + 2 * cluster if plan.moved else 1)


def train(world: Mesh, plan: Plan, how: str = "raise") -> dict[str, Any]:
    """Rounds of training and averaging; weights and bytes at the end. how: the victim ends."""
    torch.set_num_threads(1)
    stages = parts(plan)
    held = [
        {rank: [name for name, _ in stage.named_parameters()] for rank, stage in zip(ranks, own, strict=True)}
        for ranks, own in zip(plan.ranks, stages, strict=True)
    ]
    cluster = next(number for number, ranks in enumerate(plan.ranks) if world.rank in ranks)
    group = world.world.among(plan.ranks[cluster], "pipeline")
    stage = stages[cluster][group.rank]
    optimizer = nodes.stepper(plan.optimizer, list(stage.parameters()))
    quorum = Quorum(world.world, plan.ranks)
    average = ClusterAverage(
        stage,
        quorum,
        refinement(held),
        by_samples=plan.weights == "samples",
        optimizer=optimizer if plan.with_state else None,
    )
    average.begin()

    def step(stale: int) -> None:
        optimizer.step()
        optimizer.zero_grad()

    node = AsyncStage(stage, step, group, nodes.form(), AsyncWays(in_flight=group.size))
    if plan.moved:
        _move(stage, optimizer, cluster)
    before = world.transport.traffic["outer"].bytes_sent
    if world.rank == plan.victim:
        _end_after(world, plan.after, how)
    whole: Sequence[int] = ()
    for round in range(plan.rounds):
        if not plan.moved:
            numbers = range(round * plan.each, (round + 1) * plan.each)
            node.run((text(cluster, number) for number in numbers) if group.rank == 0 else ())
        whole = average.average(round, samples(plan, cluster))
    moments = {
        name: [value.clone() for value in optimizer.state[weight].values() if value is not None and value.ndim]
        for name, weight in stage.named_parameters()
        if weight in optimizer.state
    }
    return {
        "cluster": cluster,
        "weights": {name: weight.detach().clone() for name, weight in stage.named_parameters()},
        "moments": moments,
        "whole": list(whole),
        "sent": world.transport.traffic["outer"].bytes_sent - before,
    }


def _move(stage: Stage, optimizer: torch.optim.Optimizer, cluster: int) -> None:
    """Apart from the other clusters, by numbers that are the same wherever a parameter lies."""
    for name, weight in stage.named_parameters():
        weight.data += moved(name, cluster, weight.shape)
        if isinstance(optimizer, torch.optim.AdamW):
            optimizer.state[weight] = {
                "step": torch.tensor(1.0),
                "exp_avg": moved(name + "m", cluster, weight.shape),
                "exp_avg_sq": moved(name + "v", cluster, weight.shape).square(),
            }


def moved(name: str, cluster: int, shape: torch.Size) -> Tensor:
    """By how much."""
    seed = sum(map(ord, name)) * 31 + cluster
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _end_after(world: Mesh, messages: int, how: str) -> None:
    """This worker ends when it is about to send one more message than so many."""
    transport, left = world.transport, messages
    send = transport.send

    def counted(*arguments: Any) -> Any:
        nonlocal left
        if not left:
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(60)
            raise Killed("as asked")
        left -= 1
        return send(*arguments)

    transport.send = counted  # type: ignore[method-assign]
