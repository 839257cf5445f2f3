"""torch's PowerSGD hook beside `ddp` with codec = "powersgd:2": what real processes do in `test_same_bits`."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook as power
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import isles
from isles.comm.mesh import Mesh
from tests.comm.test_factors import Toy, inputs
from tests.replicas.workers import sgd


def beside_the_hook(world: Mesh) -> float:
    """The largest difference between the gradients that the hook and DDP hand out in five steps, relative to theirs;
    with the hook's form of error feedback, from its bases and its error on.
    """
    wrapped, model = DistributedDataParallel(Toy()), Toy()
    state = power.PowerSGDState(None, 2, start_powerSGD_iter=2, min_compression_rate=2)
    wrapped.register_comm_hook(state, power.powerSGD_hook)
    options: dict[str, Any] = {"codec": "powersgd:2", "error_feedback": "global"}
    optimizer: Any = isles.DDP(model, sgd(model, 0.0), world.outer, **options)
    own = optimizer.buckets[0].reduction
    worst = 0.0
    for step in range(8):
        if step == 3:  # the hook has drawn its bases by now; both hold the last parameter first
            (drawn,), (error,) = state.q_memory_dict.values(), state.error_dict.values()
            sizes = [basis.numel() for basis in own.averaging.bases]
            pairs = zip(drawn.split(sizes), own.averaging.bases, strict=True)
            own.averaging.bases = [part.clone().view_as(basis) for part, basis in pairs]
            own.residual.copy_(error)
        for net, clear in ((wrapped, wrapped.zero_grad), (model, optimizer.zero_grad)):
            clear()
            net(inputs(world.rank, step)).square().mean().backward()
        optimizer.step()
        theirs, ours = gradients(wrapped.module), gradients(model)
        if step >= 3:
            worst = max(worst, float((ours - theirs).norm() / theirs.norm()))
    return worst


def gradients(model: nn.Module) -> Tensor:
    return torch.cat([parameter.grad.reshape(-1) for parameter in model.parameters() if parameter.grad is not None])
