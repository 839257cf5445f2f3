"""The units of a model: its blocks, with parameters that only they use. The rest of the model stays on the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from isles.models.blocks import blocks_of

# Modules whose matrices autocast casts before it uses them; only those may travel in autocast's format.
_CAST = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


class ParameterSlot(NamedTuple):
    """The place of a parameter: its module, and its name there."""

    module: nn.Module
    name: str
    parameter: nn.Parameter


@dataclass(frozen=True)
class ModelUnit:
    """One block. slots: its parameters, each once."""

    name: str
    module: nn.Module
    slots: tuple[ParameterSlot, ...]

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Its parameters, in the order of the slots."""
        return [slot.parameter for slot in self.slots]


def units_of(model: nn.Module) -> list[ModelUnit]:
    """The units in the order of the forward pass. ValueError if the model has no blocks, or if blocks share parameters
    with each other or with the rest of the model.
    """
    name, blocks = blocks_of(model)
    if not blocks:
        raise ValueError(
            "memory.method: the model has no blocks in an nn.ModuleList to plan by; "
            'hold them in one, or choose memory.method = "none"'
        )
    units, seen = [], dict[int, str]()
    inside = {id(module) for block in blocks for module in block.modules()}
    for module in model.modules():
        if id(module) not in inside:
            seen.update({id(parameter): "the rest of the model" for parameter in module.parameters(recurse=False)})
    for index, block in enumerate(blocks):
        slots, unit_name = list[ParameterSlot](), f"{name}.{index}"
        for module in block.modules():
            for label, parameter in module._parameters.items():
                if parameter is None:
                    continue
                if seen.get(id(parameter), unit_name) != unit_name:
                    raise ValueError(
                        f"memory.method: {unit_name} shares {label!r} with {seen[id(parameter)]}, so neither can be "
                        'moved alone; untie them, or choose memory.method = "none"'
                    )
                if id(parameter) in seen:
                    raise ValueError(
                        f"memory.method: {unit_name} uses {label!r} under two names; give it one, or choose "
                        'memory.method = "none"'
                    )
                seen[id(parameter)] = unit_name
                slots.append(ParameterSlot(module, label, parameter))
        units.append(ModelUnit(unit_name, block, tuple(slots)))
    return units


def travels_as(slot: ParameterSlot, autocast: str) -> torch.dtype:
    """The format in which a parameter travels to the device. Matrices that autocast would cast anyway travel as
    bfloat16, with the same resulting bits; all others in their own format.
    """
    cast = autocast == "bf16" and isinstance(slot.module, _CAST) and slot.name == "weight"
    return torch.bfloat16 if cast and slot.parameter.dtype is torch.float32 else slot.parameter.dtype


# ---------------------------------------------------------------------------------------------------------------------
# The edges of a unit in the graph


class _Edge(torch.autograd.Function):
    """The identity; calls back when the gradients of all its tensors are there."""

    @staticmethod
    def forward(ctx: Any, call: Callable[[], None], *tensors: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        ctx.call = call
        ctx.set_materialize_grads(False)
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        ctx.call()
        return (None, *gradients)


def edge(call: Callable[[], None], value: Any, *, always: bool = False) -> Any:
    """Pass every tensor in `value` that needs a gradient through one edge of the graph. In the backward pass `call`
    runs once: after the gradients of later operations, and before those of earlier ones. always: if no tensor needs a
    gradient (the first block of a model reads the input itself), pass the first floating-point tensor through.
    """
    leaves, spec = tree_flatten(value)
    marked = [index for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad]
    if not marked and always:
        marked = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.is_floating_point()][:1]
        for index in marked:
            leaves[index] = leaves[index].detach().requires_grad_()
    if not marked:
        return value
    passed = _Edge.apply(call, *(leaves[index] for index in marked))
    for index, tensor in zip(marked, passed, strict=True):
        leaves[index] = tensor
    return tree_unflatten(leaves, spec)


def tensors_in(value: Any) -> list[Tensor]:
    """Every tensor in nested lists, tuples and tables."""
    return [leaf for leaf in tree_flatten(value)[0] if isinstance(leaf, Tensor)]


@contextmanager
def forwards(
    units: Sequence[ModelUnit], around: Callable[[int, Callable[..., Any]], Callable[..., Any]]
) -> Iterator[None]:
    """Replace each unit's forward by around(index, forward) temporarily."""
    for index, unit in enumerate(units):
        unit.module.forward = around(index, unit.module.forward)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for unit in units:
            del unit.module.forward


# ---------------------------------------------------------------------------------------------------------------------
# What the graph saves


def is_cast(tensor: Tensor) -> bool:
    """Whether this is autocast's copy of a parameter, or a view of such a copy."""
    node = tensor.grad_fn
    for _ in range(4):
        if node is None or len(node.next_functions) != 1:
            return False
        above = node.next_functions[0][0]
        if node.name() == "ToCopyBackward0":
            return above is not None and above.name().endswith("AccumulateGrad")
        node = above
    return False
