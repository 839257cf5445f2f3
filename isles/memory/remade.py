"""A plan that moves nothing: every block keeps what its forward pass saves, or makes it again. Optimizer, weights and
the order of passes are left alone, so it goes with methods that shard parameters, with gradient scalers, and with
several passes under way.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

from isles.memory.activations import Repeatable
from isles.memory.costs import Placement
from isles.memory.meter import MemoryMeter
from isles.memory.plan import MemoryPlan
from isles.memory.units import units_of


def moves_nothing(placements: tuple[Placement, ...]) -> bool:
    """Whether all stays on the device."""
    return all(one.place == "device" and one.activations != "swap" for one in placements)


class Remade:
    """`model` under such a plan, until `close`."""

    def __init__(self, plan: MemoryPlan, model: nn.Module) -> None:
        assert moves_nothing(plan.placements)
        self.plan, self.device = plan, next(model.parameters()).device
        units = zip(units_of(model), plan.placements, strict=True)
        self._modules = [unit.module for unit, one in units if one.activations == "recompute"]
        for module in self._modules:
            module.forward = partial(_again, module, module.forward)  # type: ignore[method-assign]

    def close(self) -> None:
        """Give the blocks their own forward back."""
        for module in self._modules:
            module.__dict__.pop("forward", None)


def _again(module: nn.Module, forward: Any, *args: Any, **named: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **named)
    return checkpoint(Repeatable(module, forward), *args, use_reentrant=False, **named)


def count_all(meter: MemoryMeter, model: nn.Module, inner: Optimizer) -> None:
    """Tell the meter what is there beside the passes: weights, buffers, and the states that the first step makes."""
    meter.track(*model.parameters(), *model.buffers())

    def stepped(*_: Any) -> None:
        values = (value for state in inner.state.values() for value in state.values())
        meter.track(*(value for value in values if isinstance(value, Tensor)))

    inner.register_step_post_hook(stepped)
