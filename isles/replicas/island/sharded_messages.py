"""The two collectives of torch's `fully_shard` over Isles' messages, or counted beside torch's own.

    gather    every worker's shares of a block, end to end              before its forward and its backward pass
    scatter   the mean of everyone's gradients of a block, a share each     after its backward pass

What peers send over Isles' messages is judged before it is used (`isles.comm.trust`): weights, and gradients. Gradients
that are not finite are left to the step, which knows whether a scaler skips it: `Scatter.suspect`. Of torch's own
collectives nothing is seen but their result.

Each sends (R - 1) times a share's bytes for R workers. The objects fit `FSDPModule.set_custom_all_gather` and
`set_custom_reduce_scatter`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from isles.comm.collectives import basic as collectives
from isles.comm.group import Group
from isles.comm.transport import native_collectives
from isles.comm.trust import JUMPS, mean_square

# The older names warn from torch 2.13 on.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


class Messages:
    """Messages of `group` on `channel`, which whoever judges the model sets to "eval" meanwhile."""

    leeway = 1.0

    def __init__(self, group: Group, number: int) -> None:
        """number: of the block, which no two have."""
        self.group, self.channel, self.number = group, group.channel, number

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

    def _native(self, start: Callable[..., Any], async_op: bool) -> Any:
        """A collective of torch's own, whose lost members are missed."""
        work = native_collectives(self.group.transport).followed(partial(start, async_op=True), self.group.ranks)
        return work if async_op else work.wait()

    def _accept(self, squares: dict[int, float], entries: int) -> None:
        """Judge everyone's shares by their mean squares."""
        others = {position: square for position, square in squares.items() if position != self.group.rank}
        call = self.group.call(self.channel, leeway=self.leeway)
        call.accept(self.number, others, squares[self.group.rank], entries)


class Gather(Messages):
    """Over Isles' messages, for tensors on the CPU."""

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> None:
        """output (R * n,) <- everyone's input (n,), in group order."""
        shares = output_tensor.chunk(self.group.size)
        self._swap([input_tensor] * self.group.size, shares)
        squares = {position: mean_square(share) for position, share in enumerate(shares)}
        if math.isfinite(squares[self.group.rank]):  # else the run diverges, and says so of its loss
            self._accept(squares, input_tensor.numel())


class Scatter(Messages):
    """Over Isles' messages, for tensors on the CPU: sums in the order of ranks, in float32 at least."""

    leeway = JUMPS

    def __init__(self, group: Group, number: int) -> None:
        super().__init__(group, number)
        self.suspect: int | None = None
        """The rank of one whose gradient was not finite while the own one was; who steps forgets it."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        """output (n,) <- mean (or sum, as `op` says) of everyone's part for this worker of input (R * n,)."""
        parts = input_tensor.chunk(self.group.size)
        theirs = [torch.empty_like(part) for part in parts]
        self._swap(parts, theirs)
        self._look(theirs)
        total = theirs[0].to(torch.promote_types(output_tensor.dtype, torch.float32))
        for part in theirs[1:]:
            total += part
        output_tensor.copy_(total.div_(self.group.size) if op == dist.ReduceOp.AVG else total)

    def _look(self, parts: Sequence[Tensor]) -> None:
        squares = {position: mean_square(part) for position, part in enumerate(parts)}
        broken = [position for position, square in squares.items() if not math.isfinite(square)]
        if not broken:
            self._accept(squares, parts[0].numel())
        elif self.group.rank not in broken:
            self.suspect = self.group.ranks[broken[0]]


class NativeGather(Messages):
    """torch's own, counted: NCCL between GPUs."""

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> Any:
        self._count(input_tensor)
        return self._native(partial(_all_gather, output_tensor, input_tensor, group=group), async_op)


class NativeScatter(Messages):
    """torch's own, counted: NCCL between GPUs."""

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False) -> Any:
        self._count(output_tensor)
        start = partial(_reduce_scatter, output_tensor, input_tensor, op=op, group=group)
        return self._native(start, async_op)
