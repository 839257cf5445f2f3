"""A model's blocks, at which fragments, islands, stages and memory units divide it; and module trees that share
tensors, so that Isles can change the modules of a copy and leave the user's model unchanged.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

from torch import nn


def blocks_of(model: nn.Module) -> tuple[str, Sequence[nn.Module]]:
    """Name and members of the model's ModuleList with the most parameters; ("", []) without a ModuleList."""
    lists = [(name, list(module)) for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    return max(
        lists, key=lambda entry: sum(p.numel() for block in entry[1] for p in block.parameters()), default=("", [])
    )


def module_at(root: nn.Module, path: str) -> nn.Module | None:
    """The module at `path`; None if there is none."""
    try:
        return root.get_submodule(path)
    except AttributeError:
        return None


def check_order(key: str, order: Sequence[int], count: int, what: str) -> None:
    """ValueError, one line, if `order` has a number twice, or one that is not below `count`. what: a noun for these."""
    for number in order:
        if not 0 <= number < count:
            raise ValueError(f"{key}: there is no {what} {number}; they are numbered 0 to {count - 1}")
    if len(set(order)) < len(order):
        raise ValueError(f"{key} = {','.join(map(str, order))}: name each {what} once")


def sharing(module: nn.Module) -> nn.Module:
    """A copy of the module tree that shares its parameters and buffers."""
    return _twin(module, {})


def _twin(module: nn.Module, twins: dict[int, nn.Module]) -> nn.Module:
    if id(module) not in twins:
        twin = twins[id(module)] = copy.copy(module)
        twin._parameters, twin._buffers = module._parameters.copy(), module._buffers.copy()
        children = module._modules.items()
        twin._modules = {name: None if child is None else _twin(child, twins) for name, child in children}
    return twins[id(module)]
