"""Module trees that share their tensors: to change what runs without touching the model that a user holds."""

from __future__ import annotations

import copy

from torch import nn


def sharing(module: nn.Module) -> nn.Module:
    """A module tree of its own over the same parameters and buffers."""
    return _twin(module, {})


def _twin(module: nn.Module, made: dict[int, nn.Module]) -> nn.Module:
    if id(module) not in made:
        twin = made[id(module)] = copy.copy(module)
        twin._parameters, twin._buffers = module._parameters.copy(), module._buffers.copy()
        twin._modules = {name: None if child is None else _twin(child, made) for name, child in module._modules.items()}
    return made[id(module)]
