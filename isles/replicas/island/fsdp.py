"""A model whose workers hold a share of every parameter each, by torch's `fully_shard` (FSDP, Zhao et al., 2023, after
ZeRO-3, Rajbhandari et al., 2020).

    model = isles.shard(model, world.inner)       # before the inner optimizer is made

Its parameters are then DTensors, of which this worker has its rows. A unit (a block, and what is in none) takes part in
two collectives:

    gather    every worker's shares of a block, end to end              before its forward and its backward pass
    scatter   the mean of everyone's gradients of a block, a share each     after its backward pass

Each sends (R - 1) times a share's bytes for R workers. On CPUs the messages are Isles' own, so they have Isles'
deadlines and counters, and means add up in the order of ranks; on GPUs they are torch's over NCCL, counted by the same
formula. The objects fit `FSDPModule.set_custom_all_gather` and `set_custom_reduce_scatter`.

What peers send over Isles' messages is checked before it is used (`isles.comm.trust`): weights, and gradients.
Gradients that are not finite are left to the step, which knows whether a scaler skips it: `Scatter.suspect`. Of torch's
own collectives only the result is seen.
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, is_dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from isles.comm.collectives import basic as collectives
from isles.comm.group import Group
from isles.comm.transport import native_collectives
from isles.comm.trust import JUMPS, mean_square
from isles.models.blocks import blocks_of
from isles.replicas.start import spread_from_first

_NOTE = "isles_sharding"


@dataclass(frozen=True)
class Unit:
    """Bytes of one worker's share of what is gathered together, padded as it travels; `trained`: of its gradients."""

    held: int
    trained: int


@dataclass(frozen=True)
class Sharding:
    """How `shard` cut a model. skeleton: the model as it was before, on the meta device."""

    group: Group
    skeleton: nn.Module
    units: tuple[Unit, ...]
    reshard_after_forward: bool
    messages: list[Any] = field(default_factory=list)


def shard(model: nn.Module, group: Group, *, reshard_after_forward: bool = True) -> nn.Module:
    """`model`, in place, with every worker of `group` left with its share of worker 0's parameters.

    reshard_after_forward: give a unit's gathered weights back after its forward pass and gather them again for the
    backward pass (ZeRO-3), or keep them in between (ZeRO-2): a third fewer bytes for the memory of all units.

    ValueError on a backend without a process for each worker. In a world that is only planned: a copy with the shapes
    of worker 0's share, which cannot be run.
    """
    if not group.transport.native:
        raise ValueError(
            "torch's fully_shard needs a process for each worker, and the virtual backend has one for all: set "
            'world.backend = "distributed", or take ddp'
        )
    parameters = list(model.parameters())
    blocks = _blocks(model)
    _refuse_unfit(model, blocks)
    sketched = parameters[0].is_meta
    for parameter in parameters:
        parameter.data = parameter.data.contiguous()  # rows of it are then one run of memory
    skeleton = _without_numbers(model)
    units = tuple(_unit(own, group.size) for own in _gathered_together(blocks, model))
    sharding = Sharding(group, skeleton, units, reshard_after_forward)
    if sketched:
        model = copy.deepcopy(model)
        _replace(model, lambda _, parameter: torch.empty_like(parameter[: _most_rows(parameter, group.size)]))
    else:
        with torch.no_grad():
            spread_from_first(group, [*parameters, *model.buffers()])
        if group.size > 1:
            _shard(model, blocks, sharding)
    object.__setattr__(model, _NOTE, sharding)  # not a submodule of it
    return model


def is_sharded(model: nn.Module) -> bool:
    """Whether `shard` cut it."""
    return hasattr(model, _NOTE)


def sharding_of(model: nn.Module) -> Sharding:
    """How `model` was cut. ValueError where it was not."""
    if not is_sharded(model):
        raise ValueError(
            "the model is not sharded: call model = isles.shard(model, group) before its inner optimizer is made"
        )
    return cast(Sharding, getattr(model, _NOTE))


def own_rows(tensor: Tensor) -> Tensor:
    """What this worker holds of a tensor, live: all of it unless it is sharded."""
    if not hasattr(tensor, "to_local"):  # a DTensor has; asked of every gradient that is clipped, so without importing
        return tensor
    with torch.no_grad():
        return tensor.to_local()  # type: ignore[no-any-return]


def without_meshes(state: Any) -> Any:
    """Nested dicts, lists and tuples with the own rows of sharded tensors in their place."""
    if isinstance(state, dict):
        return {key: without_meshes(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(map(without_meshes, state))
    return own_rows(state) if isinstance(state, Tensor) else state


def as_sharded(rows: Tensor, like: Tensor) -> Tensor:
    """`rows` as the own rows of a tensor that is sharded as `like` is; as they are where that is not sharded, or where
    they are no rows of such a tensor (a count of steps).
    """
    from torch.distributed.tensor import DTensor

    if not isinstance(like, DTensor) or rows.shape != own_rows(like).shape:
        return rows
    return DTensor.from_local(
        rows, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


@torch.no_grad()
def gathered(model: nn.Module) -> nn.Module:
    """A plain model of everyone's shares, on all workers. Bytes sent: (R - 1) times the own share."""
    sharding = sharding_of(model)
    whole = copy.deepcopy(sharding.skeleton)
    held, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    _replace(whole, lambda name, empty: _gathered(held[name], empty, sharding.group))
    for name, buffer in whole.named_buffers():
        buffer.copy_(buffers[name])
    return whole


def _replace(model: nn.Module, by: Callable[[str, Tensor], Tensor]) -> None:
    """Each parameter by what `by` makes of its name and itself; tied ones stay tied."""
    made = {
        parameter: nn.Parameter(by(name, parameter), requires_grad=parameter.requires_grad)
        for name, parameter in model.named_parameters()
    }
    for path, parameter in list(model.named_parameters(remove_duplicate=False)):
        module, _, name = path.rpartition(".")
        setattr(model.get_submodule(module), name, made[parameter])


def _gathered(tensor: Tensor, empty: Tensor, group: Group) -> Tensor:
    whole = torch.empty_like(empty, device="cpu")
    parts, own = _rows(whole, group.size), own_rows(tensor).detach().cpu().contiguous()
    group.start(collectives.all_to_all(group.call("control"), [own] * group.size, parts), "control").wait()
    return whole.to(tensor.device)


def _blocks(model: nn.Module) -> list[nn.Module]:
    """The model's blocks that can be gathered apart: with a forward of their own, there once, sharing nothing."""
    _, blocks = blocks_of(model)
    owners = Counter(id(held) for module in model.modules() for held in module.parameters(recurse=False))
    return [
        block
        for block in blocks
        if list(blocks).count(block) == 1
        and not isinstance(block, nn.ModuleList | nn.ModuleDict)
        and all(
            owners[id(held)] == sum(held is own for part in block.modules() for own in part.parameters(recurse=False))
            for held in block.parameters()
        )
    ]


def _refuse_unfit(model: nn.Module, blocks: Sequence[nn.Module]) -> None:
    """ValueError, with the mend, for parameters that torch's fully_shard cannot take."""
    for name, parameter in model.named_parameters():
        if parameter.dim() == 0:
            raise ValueError(f"{name} is a single number, which fsdp cannot cut: give it the shape (1,), or take ddp")
    for unit in _gathered_together(blocks, model):
        formats = sorted({str(parameter.dtype) for parameter in unit if parameter.requires_grad})
        if len(formats) > 1:
            raise ValueError(
                f"fsdp gathers parameters in one format, and here are {' and '.join(formats)} together: convert the "
                "model to one of them, or take ddp"
            )


def _refuse_hidden_tensors(model: nn.Module, arguments: Any, output: Any) -> None:
    """A forward hook: torch gathers weights for the backward pass when a gradient reaches a tensor it has seen."""
    if torch.is_grad_enabled() and not (isinstance(output, Tensor | dict | list | tuple) or is_dataclass(output)):
        raise ValueError(
            f"the model returns a {type(output).__name__}, in which fsdp sees no tensor: return a tensor, a dict, a "
            "tuple or a dataclass, such as isles.models.Output(loss, logits), or take ddp"
        )


def _shard(model: nn.Module, blocks: Sequence[nn.Module], sharding: Sharding) -> None:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    group, device = sharding.group, next(model.parameters()).device.type
    if device == "cuda":
        torch.cuda.set_device(next(model.parameters()).device)  # fully_shard moves parameters to the current one
    gather, scatter = (NativeGather, NativeScatter) if device == "cuda" else (Gather, Scatter)
    processes = native_collectives(group.transport).process_group(group.ranks, device)
    mesh = DeviceMesh.from_group(processes, device)
    for number, module in enumerate((*blocks, model)):
        unit: Any = fully_shard(module, mesh=mesh, reshard_after_forward=sharding.reshard_after_forward)
        if not hasattr(unit, "set_custom_all_gather"):
            raise ValueError(f"torch {torch.__version__} does not let fsdp's bytes be counted: pip install -U torch")
        messages = gather(group, 2 * number), scatter(group, 2 * number + 1)
        unit.set_custom_all_gather(messages[0])
        unit.set_custom_reduce_scatter(messages[1])
        sharding.messages.extend(messages)
    model.register_forward_hook(_refuse_hidden_tensors, prepend=True)


def _gathered_together(blocks: Sequence[nn.Module], model: nn.Module) -> list[list[nn.Parameter]]:
    """The parameters of each block, and those in none."""
    inside = {id(parameter) for block in blocks for parameter in block.parameters()}
    rest = [parameter for parameter in model.parameters() if id(parameter) not in inside]
    return [*(list(block.parameters()) for block in blocks), rest]


def _unit(parameters: Sequence[Tensor], size: int) -> Unit:
    def share(parameter: Tensor) -> int:
        return parameter[: _most_rows(parameter, size)].nbytes

    return Unit(sum(map(share, parameters)), sum(share(p) for p in parameters if p.requires_grad))


def _most_rows(tensor: Tensor, size: int) -> int:
    return -(-len(tensor) // size)


def _rows(tensor: Tensor, size: int) -> list[Tensor]:
    """The rows of each worker as `fully_shard` deals them: equal runs for the first ones, what is left, nothing."""
    parts = list(tensor.detach().chunk(size))
    return parts + [tensor.detach()[:0]] * (size - len(parts))


def _without_numbers(model: nn.Module) -> nn.Module:
    """A copy whose parameters are on the meta device; tied ones stay tied, and buffers are copied."""
    empty = {
        id(parameter): nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
        for parameter in model.parameters()
    }
    return copy.deepcopy(model, empty)  # type: ignore[arg-type]


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
