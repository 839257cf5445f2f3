"""What a stage sends and takes is looked at: nobody sends what is not finite, and what comes is accepted by size."""

from __future__ import annotations

import torch
from torch import Tensor

from isles.comm.errors import WorkerFailed
from isles.comm.group import Group
from isles.comm.trust import JUMPS, mean_square


def accept(group: Group, kind: int, source: int, vector: Tensor) -> None:
    """Refused, naming position `source`, where what it sent cannot be what it should be (`isles.comm.trust`). kind: of
    message, those of which are compared with each other.
    """
    call = group.call("pipeline", leeway=JUMPS)
    call.accept(kind, {source: mean_square(vector.detach().view(-1))}, 0.0, vector.numel())


def refuse_own(group: Group, what: str, vector: Tensor) -> None:
    """WorkerFailed where what this worker is about to send is not finite, so that nobody else says so."""
    total = vector.detach().sum(dtype=torch.promote_types(vector.dtype, torch.float32))  # float16 ends at 65,504
    if not total.isfinite():
        raise WorkerFailed(group.transport.rank, f"{what} are not finite: lower the learning rate (inner.lr)")
