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

from isles.comm.errors import PeerLost
from isles.comm.mesh import Mesh
from isles.models.cuts import pieces
from isles.models.stages import Stage
from isles.pipeline.ravnest.agreement import ClusterAgreement, cluster_inbox
from isles.pipeline.ravnest.assignment import ClusterAssignment
from isles.pipeline.ravnest.averaging import ClusterAverage, refinement
from isles.pipeline.ravnest.stage import AsyncStage
from tests.pipeline.ravnest import nodes
from tests.pipeline.ravnest.nodes import BLOCKS, Wet

THREE = ((1, 2), (3,), ())
"""First blocks of clusters of 3, 2 and 1 stages."""


@dataclass(frozen=True)
class Plan:
    """cuts: of each cluster. moved: weights are moved apart before the first average, instead of training. victim: the
    rank that ends, after so many messages. aside: workers that stand by.
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
    aside: int = 0

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
        return sum(map(len, self.ranks)) + self.aside


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


class Member:
    """One worker: its place, if it has one, and what it holds there."""

    def __init__(self, world: Mesh, plan: Plan) -> None:
        self.world, self.plan = world, plan
        stages = parts(plan)
        names = [{n: [name for name, _ in part.named_parameters()] for n, part in enumerate(own)} for own in stages]
        self.agreement = ClusterAgreement(
            cluster_inbox(world.world, 5, 1 << 20), world.world, ClusterAssignment.of(plan.cuts, range(world.size))
        )
        self.average = ClusterAverage(
            self.agreement, refinement(names), by_samples=plan.weights == "samples", with_state=plan.with_state
        )
        self.cluster, self.broken, self.node = -1, False, None
        if self.agreement.trains:
            self.serve()

    def serve(self) -> None:
        coordinates = self.agreement.assignment.coordinates_of(self.world.rank)
        assert coordinates is not None
        self.cluster, here = coordinates
        self.stage = parts(self.plan)[self.cluster][here]
        self.optimizer = nodes.stepper(self.plan.optimizer, list(self.stage.parameters()))
        self.average.serve(self.stage, self.optimizer)
        group = self.world.world.among(self.agreement.assignment.clusters[self.cluster], "pipeline")
        options = nodes.options(nodes.Row(group.size))
        self.node = AsyncStage(self.stage, self.step, group, nodes.form(), options)
        self.broken = False

    def step(self, stale: int) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def segment(self, numbers: range) -> None:
        if self.node is None or not self.agreement.trains:
            return
        self.node.resume(numbers.start, numbers.start)
        if self.broken:
            self.node.refuse()
            return
        try:
            is_root = self.node.group.rank == 0
            self.node.run((text(self.cluster, number) for number in numbers) if is_root else ())
        except PeerLost as error:
            self.agreement.miss(error.rank)
            self.broken = True

    def repair(self, updates: int) -> None:
        while self.agreement.repair():
            coordinates = self.agreement.assignment.coordinates_of(self.world.rank)
            if coordinates is not None and coordinates[0] in self.agreement.assignment.complete:
                self.serve()
                for weight in self.stage.parameters():
                    weight.grad = torch.zeros_like(weight)
                self.step(0)  # which makes the optimizer's state, to be written over
            self.average.load(updates)


def train(world: Mesh, plan: Plan, how: str = "raise") -> dict[str, Any]:
    """Rounds of training and averaging; weights and bytes at the end. how: the victim ends."""
    torch.set_num_threads(1)
    own = Member(world, plan)
    own.average.begin()
    if plan.moved:
        _move(own.stage, own.optimizer, own.cluster)
    before = [world.transport.traffic[channel].bytes_sent for channel in ("outer", "inner")]
    if world.rank == plan.victim:
        end_after(world, plan.after, how)
    whole: Sequence[int] = ()
    for round in range(plan.rounds):
        if not plan.moved:
            own.segment(range(round * plan.each, (round + 1) * plan.each))
        whole = own.average.average(round, samples(plan, own.cluster))
        own.repair((round + 1) * plan.each)
    found = {
        "cluster": own.cluster,
        "trains": own.agreement.trains,
        "assignment": own.agreement.assignment,
        "whole": list(whole),
        "sent": world.transport.traffic["outer"].bytes_sent - before[0],
        "told": world.transport.traffic["inner"].bytes_sent - before[1],
        "weights": {},
        "moments": {},
    }
    if own.node is not None:
        state = own.optimizer.state
        found["weights"] = {name: weight.detach().clone() for name, weight in own.stage.named_parameters()}
        found["moments"] = {
            name: [value.clone() for value in state[weight].values() if value is not None and value.ndim]
            for name, weight in own.stage.named_parameters()
            if weight in state
        }
    return found


def train_and_lose(world: Mesh, plan: Plan, victims: dict[int, int]) -> dict[str, Any]:
    """`train`, in which each of `victims` ends after so many messages."""
    if world.rank in victims:
        end_after(world, victims[world.rank])
    return train(world, plan)


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


def end_after(world: Mesh, messages: int, how: str = "raise") -> None:
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
