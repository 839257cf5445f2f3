"""The same stages under `torch.distributed.pipelining`; a module of its own, so that fresh processes can import it."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

from isles.comm.mesh import Mesh
from isles.models.decoder import next_token_loss
from isles.models.stages import Stage
from tests.pipeline import workers
from tests.pipeline.workers import Cell

SCHEDULES: dict[str, type[PipelineScheduleSingle]] = {"all": ScheduleGPipe, "1f1b": Schedule1F1B}
"""By what our executor calls as many forwards in flight."""


class Logits(nn.Module):
    """A stage as torch's stages want it: one tensor in, one out, scores at the last."""

    def __init__(self, stage: Stage) -> None:
        super().__init__()
        self.stage = stage

    def forward(self, x: Tensor) -> Tensor:
        piece = self.stage.piece
        out = self.stage(x, enter=piece.enters)
        return self.stage.logits(out) if piece.leaves else out


def schedule(stage: Stage, group: dist.ProcessGroup, kind: str, microbatches: int) -> PipelineScheduleSingle:
    """torch's, over the workers of `group`, one stage each."""
    held = PipelineStage(Logits(stage), group.rank(), group.size(), torch.device("cpu"), group=group)
    return SCHEDULES[kind](held, microbatches, loss_fn=next_token_loss)


def step(made: PipelineScheduleSingle, group: dist.ProcessGroup, batch: Tensor) -> list[Tensor]:
    """One step over `batch` (B, T+1); the losses of the microbatches at the last stage, else nothing."""
    losses: list[Tensor] = []
    if group.rank() == 0:
        made.step(batch[:, :-1])
    elif group.rank() == group.size() - 1:
        made.step(target=batch[:, 1:], losses=losses)
    else:
        made.step()
    return losses


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
