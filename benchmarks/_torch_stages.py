"""Isles' stages under the schedules of `torch.distributed.pipelining`, over gloo: what the executor is held against."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

from isles.models.decoder import next_token_loss
from isles.models.stages import Stage

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
