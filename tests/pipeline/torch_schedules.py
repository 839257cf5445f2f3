"""The executor beside torch's schedules; a module of its own, so that fresh processes can import it."""

from __future__ import annotations

import torch
import torch.distributed as dist

from benchmarks._torch_stages import schedule, step
from isles.comm.mesh import Mesh
from tests.pipeline import workers
from tests.pipeline.workers import Cell


def compared(world: Mesh, kind: str, microbatches: int) -> tuple[dict[str, bool], bool]:
    """Whether the executor's gradients, by name, and its losses have the bits of torch's schedule."""
    torch.set_num_threads(1)
    cell = Cell(world.size, 1, microbatches, limit=kind)
    run = workers.executor(world, cell)
    ours = run.step(1, workers.own_text(cell, world.rank, 1))
    own = {name: parameter.grad for name, parameter in run.stage.named_parameters()}
    run.stage.zero_grad()
    group = dist.group.WORLD
    assert group is not None
    batch = torch.cat([workers.window(number, 1) for number in range(microbatches)])
    losses = step(schedule(run.stage, group, kind, microbatches), group, batch)
    theirs = {name: parameter.grad for name, parameter in run.stage.named_parameters()}
    same = {name: own[name] is not theirs[name] and torch.equal(own[name], theirs[name]) for name in own}
    return same, all(torch.equal(ours[number], loss) for number, loss in enumerate(losses))
