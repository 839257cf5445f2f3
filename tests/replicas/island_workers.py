"""What the workers of islands do in these tests; in a module of its own, so that fresh processes can import it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import isles
from isles.comm.mesh import Mesh
from isles.comm.tags import CHANNELS
from isles.replicas.sync import ReplicaSync

from .workers import adamw, batch, bits, weights

RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "none": ("none", {}),
    "localsgd": ("localsgd", {"sync_every": 3}),
    "diloco": ("diloco", {"sync_every": 3, "outer_momentum": 0.5}),
    "noloco": ("noloco", {"sync_every": 3}),
    "eager": ("eager", {"sync_every": 3, "outer_momentum": 0.5}),
    "streaming, int4": (
        "streaming-diloco",
        {"sync_every": 3, "fragments": "strided", "overlap_steps": 1, "codec": "int4", "error_feedback": "local"},
    ),
}


class Blocks(nn.Module):
    """Blocks of odd sizes in a ModuleList, one of them with a frozen part: 0.5 k entries."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.start = nn.Linear(5, 9)
            self.blocks = nn.ModuleList([nn.Linear(9, 9), nn.Linear(9, 9, bias=False)])
            self.end = nn.Linear(9, 7)
            self.again = nn.Linear(9, 7)
            self.scale = nn.Parameter(torch.ones(1), requires_grad=False)
        self.again.weight = self.end.weight
        self.register_buffer("shift", torch.zeros(9))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.start(x) + self.shift)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return (self.end(x) + self.again(x.tanh())) * self.scale


def wrapped(world: Mesh, model: nn.Module, name: str, inside: str, max_norm: float | None = None) -> ReplicaSync:
    """The method of `RUNS[name]` across islands, `inside` in them; alone in its island: without any."""
    method, options = RUNS[name]
    if world.inner.size == 1:
        return isles.method(method)(model, adamw(model), world.outer, max_norm=max_norm, **options)
    kind = isles.method(inside)
    part = kind.local_part(model, world.inner, kind.Config())
    return isles.method(method)(part, kind(part, adamw(part), world.inner, max_norm=max_norm), world.outer, **options)


def island_loss(model: nn.Module, world: Mesh, step: int, island: int) -> Tensor:
    """Mean squared error of this worker's part of the batch of its island, which `island` workers share."""
    replica = world.outer.rank
    own = (
        [replica * island + world.inner.rank]
        if world.inner.size > 1
        else range(replica * island, (replica + 1) * island)
    )
    pairs = [batch(worker, step) for worker in own]
    x, y = (torch.cat(parts) for parts in zip(*pairs, strict=True))
    return F.mse_loss(model(x), y)


@dataclass(frozen=True)
class Case:
    """A run: `name` of RUNS across islands of `inner` workers, `inside` in them. island: workers' batches that an
    island trains on. stop: save everything after that step, and go on with a fresh optimizer.
    """

    name: str
    inside: str = "ddp"
    inner: int = 2
    island: int = 2
    max_norm: float | None = None
    stop: int | None = None


STEPS = 8


def train_all(world: Mesh, cases: Sequence[Case]) -> list[dict[str, Any]]:
    """`train` for each of `cases`."""
    return [train(world, case) for case in cases]


def train(world: Mesh, case: Case) -> dict[str, Any]:
    """The consolidated model, what was sent by channel, and what the plan said."""
    name, inside, max_norm, steps = case.name, case.inside, case.max_norm, STEPS
    before = {channel: world.world.traffic[channel].bytes_sent for channel in CHANNELS}
    inner, island, stop = case.inner, case.island, case.stop
    world = isles.mesh(inner=inner, deadlines=world.world.deadlines)
    model = Blocks(world.rank)  # worker 0's are the run's
    optimizer = wrapped(world, model, name, inside, max_norm)
    for step in range(1, steps + 1):
        island_loss(optimizer.model, world, step, island).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == stop:
            state, held = optimizer.state_dict(), {k: v.clone() for k, v in optimizer.weights().items()}
            optimizer = wrapped(world, Blocks(7), name, inside, max_norm)
            optimizer.load_weights(held)
            optimizer.load_state_dict(state)
    with optimizer.evaluation_weights() as judged, torch.no_grad():
        loss = float(F.mse_loss(judged(batch(99, 0, 64)[0]), batch(99, 0, 64)[1]))
    optimizer.land_all()  # as `isles train` does, whose bytes are planned
    traffic = world.world.traffic
    sent = {channel: traffic[channel].bytes_sent - before[channel] for channel in CHANNELS}
    blank = Blocks(3)
    planned = optimizer.outline(steps)
    spread = optimizer.replica_std()
    whole = optimizer.consolidate()
    blank.load_state_dict(whole.state_dict())
    return {
        "weights": weights(blank),
        "bits": bits(weights(blank)),
        "sent": sent,
        "loss": loss,
        "std": spread,
        "planned": planned.opening[world.outer.rank] + planned.sent[world.outer.rank],
        "held": sum({p.data_ptr(): p.numel() for p in optimizer.weights().values()}.values()),
        "state": sum(t.numel() for s in optimizer.state.values() for t in map(isles_rows, s.values()) if t.dim()),
    }


def isles_rows(tensor: Tensor) -> Tensor:
    from isles.replicas.island.fsdp import own_rows

    return own_rows(tensor)
