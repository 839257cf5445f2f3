"""The two collectives of torch's `fully_shard` over Isles' messages, or counted beside torch's own.

    gather    every worker's shares of a block, end to end              before its forward and its backward pass
    scatter   the mean of everyone's gradients of a block, a share each     after its backward pass

Each sends (R - 1) times a share's bytes for R workers. The objects fit `FSDPModule.set_custom_all_gather` and
`set_custom_reduce_scatter`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from isles.comm.collectives import basic as collectives
from isles.comm.group import Group


class Messages:
    """Messages of `group` on `channel`, which whoever judges the model sets to "eval" meanwhile."""

    def __init__(self, group: Group) -> None:
        self.group, self.channel = group, group.channel

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A new buffer."""
        return torch.empty(*size, dtype=dtype, device=device)

    def _swap(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor]) -> None:
        group, channel = self.group, self.channel
        nbytes = sum(part.nbytes for part in outgoing) - outgoing[group.rank].nbytes
        group.start(collectives.all_to_all(group.call(channel), outgoing, incoming), channel, nbytes=nbytes).wait()

    def _count(self, share: Tensor) -> None:
        for count in (self.group.traffic.sent, self.group.traffic.received):
            count(self.channel, (self.group.size - 1) * share.nbytes)


class Gather(Messages):
    """Over Isles' messages, for tensors on the CPU."""

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> None:
        """output (R * n,) <- everyone's input (n,), in group order."""
        self._swap([input_tensor] * self.group.size, output_tensor.chunk(self.group.size))


class Scatter(Messages):
    """Over Isles' messages, for tensors on the CPU: sums in the order of ranks, in float32 at least."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        """output (n,) <- mean (or sum, as `op` says) of everyone's part for this worker of input (R * n,)."""
        parts = input_tensor.chunk(self.group.size)
        theirs = [torch.empty_like(part) for part in parts]
        self._swap(parts, theirs)
        total = theirs[0].to(torch.promote_types(output_tensor.dtype, torch.float32))
        for part in theirs[1:]:
            total += part
        output_tensor.copy_(total.div_(self.group.size) if op == dist.ReduceOp.AVG else total)


class NativeGather(Messages):
    """torch's own, counted: NCCL between GPUs."""

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> Any:
        self._count(input_tensor)
        return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)


class NativeScatter(Messages):
    """torch's own, counted: NCCL between GPUs."""

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False) -> Any:
        self._count(output_tensor)
        return dist.reduce_scatter_tensor(output_tensor, input_tensor, op=op, group=group, async_op=async_op)
