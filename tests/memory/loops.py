"""A plain training loop, with a plan of memory or without one: what both leave must be the same to the bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from isles.base.wrapping import host_work
from isles.memory.costs import Placement, Profile, least_peak
from isles.memory.engines.base import Engine
from isles.memory.meter import MemoryMeter
from isles.memory.optimizer import Managed
from isles.memory.plan import MemoryPlan, digests
from isles.memory.profile import profile
from isles.models.decoder import Decoder
from isles.models.sizes import Shape
from isles.network.machines import MACHINES

UNITS = 4
SHAPE = Shape(d_model=64, layers=UNITS, heads=4, ffn=192, vocab=256, context=32, tie_embeddings=False)


@dataclass(frozen=True)
class Task:
    """A model, its batches, and its loss."""

    make: Callable[[], nn.Module]
    batch: Callable[[int], Any]
    loss: Callable[[nn.Module, Any], Tensor] = lambda model, batch: model(batch).loss


def tokens(number: int) -> Tensor:
    return torch.randint(0, 256, (2, SHAPE.context + 1), generator=torch.Generator().manual_seed(number))


DECODER = Task(lambda: Decoder(SHAPE), tokens)
TIED = Task(lambda: Decoder(Shape(**{**vars_of(SHAPE), "tie_embeddings": True})), tokens)


def vars_of(shape: Shape) -> dict[str, Any]:
    return {name: getattr(shape, name) for name in shape.__dataclass_fields__}


@dataclass
class Left:
    """What a run leaves. moved: bytes over each lane. stayed: that did not come up again, for they were there."""

    losses: list[float]
    weights: list[Tensor]
    state: list[Tensor]
    peak: int = 0
    planned: int = 0
    moved: dict[str, int] | None = None
    stayed: int = 0

    def same(self, other: Left) -> bool:
        return (
            self.losses == other.losses
            and all(map(torch.equal, self.weights, other.weights))
            and all(map(torch.equal, self.state, other.state))
        )


@cache
def profiled(task: Task, autocast: str) -> Profile:
    return profile(task.make(), task.batch(0), loss=task.loss, autocast=autocast)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), fused=True)


def plan_of(made: Profile, placements: Sequence[Placement], **settings: Any) -> MemoryPlan:
    """On as little memory as the placements run in."""
    accumulation = settings.get("accumulation", 1)
    peak = least_peak(made, placements, accumulation)
    values: dict[str, Any] = {
        "names": tuple(unit.name for unit in made.units),
        "method": "auto",
        "update": "exact",
        "accumulation": 1,
        "budget": peak,
        "peak": peak,
        "step": 0.0,
        "bound": 0.0,
        "busy": {},
        "host_bytes": 0,
        "disk_bytes": 0,
        "made_for": digests(made, None),
    }
    return MemoryPlan(placements=tuple(placements), **(values | settings))


def train(
    task: Task,
    placements: Sequence[Placement] | None = None,
    *,
    engine: Engine | None = None,
    update: str = "exact",
    max_norm: float | None = 1.0,
    accumulation: int = 1,
    autocast: str = "none",
    steps: int = 4,
    first: int = 0,
    start: tuple[Any, ...] | None = None,
    ends_with: list[Any] | None = None,
    around: Callable[[Managed], None] | None = None,
    disk: str = "",
) -> Left:
    """`steps` steps from number `first`. start: states of model, optimizer, schedule and random numbers to go on from;
    ends_with gets those that it leaves. around: is shown the managed optimizer before the first step.
    """
    torch.manual_seed(0)
    model = task.make()
    model.train()
    inner = adamw(model)
    schedule = torch.optim.lr_scheduler.LambdaLR(inner, lambda done: 1.0 / (1 + done))
    meter, managed = MemoryMeter(), None
    if placements is not None:
        made = profiled(task, autocast)
        plan = plan_of(made, placements, update=update, accumulation=accumulation)
        meter.track(*model.buffers())
        managed = Managed(
            plan, model, inner, profile=made, machine=MACHINES["H100"], engine=engine, disk=disk, meter=meter
        )
        meter.track(*managed.rest)
        if around is not None:
            around(managed)
    optimizer = inner if managed is None else managed
    if start is not None:
        model.load_state_dict(start[0])
        optimizer.load_state_dict(start[1])
        schedule.load_state_dict(start[2])
    torch.manual_seed(5)  # of dropout
    if start is not None:
        torch.set_rng_state(start[3])
    losses = []
    with managed or nullcontext():
        for step in range(first, first + steps):
            with meter if managed is not None else nullcontext():
                for index in range(accumulation):
                    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast == "bf16"):
                        loss = task.loss(model, task.batch(step * accumulation + index)) / accumulation
                    loss.backward()
                    losses.append(loss.item())
                    del loss
                if managed is not None:
                    managed.gradients()
                with host_work():
                    if max_norm is not None:
                        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
                optimizer.step()
                optimizer.zero_grad()
            schedule.step()
        if ends_with is not None:
            ends_with.extend([model.state_dict(), optimizer.state_dict(), schedule.state_dict(), torch.get_rng_state()])
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    state = [value.clone() for p in model.parameters() for value in inner.state[p].values()]
    if managed is None:
        return Left(losses, weights, state)
    runner = managed.runner
    return Left(losses, weights, state, meter.peak, managed.plan.peak, runner.moved, runner.flow.counted.stayed["up"])
