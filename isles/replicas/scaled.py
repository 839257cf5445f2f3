"""One step of a loss that a torch.amp.GradScaler has scaled, whoever calls: `optimizer.step(scaler=scaler)`, or torch's
`scaler.step(optimizer)`.

Torch's way calls `step` whatever the gradients are (`_step_supports_amp_scaling`), so that workers never come apart by
a step; gradients are divided here, and what the scaler's `update` reads is what all workers agree on.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.optim import Optimizer


class Scaled:
    """Of a step of `optimizer`, whose gradients are those of a scaled loss. scaler: the enabled one that scaled it."""

    def __init__(self, optimizer: Optimizer, scaler: torch.amp.GradScaler) -> None:
        self.scaler, self._optimizer = scaler, optimizer
        self.scale = scaler.get_scale()
        self._overflowed = False

    def unscale(self) -> None:
        """Divide the gradients by the scale, unless `scaler.unscale_` has."""
        factor = getattr(self._optimizer, "grad_scale", None)
        if factor is not None:  # torch's way: it has looked at the gradients, and left them
            inverse = factor.double().reciprocal().float()
            for group in self._optimizer.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter.grad.mul_(inverse.to(parameter.grad.device))
        elif not self._found():
            self.scaler.unscale_(self._optimizer)

    @property
    def overflowed(self) -> bool:
        """Whether a gradient is not finite, so that the step is left out and the scale lowered."""
        return self._overflowed or any(bool(found) for found in self._found().values())

    def overflow(self) -> None:
        """Another worker's gradient is not finite."""
        self._overflowed = True
        for found in self._found().values():
            found.fill_(1.0)

    def _found(self) -> dict[str, Any]:
        """What the scaler has found in these gradients, and reads again in `update`."""
        return self.scaler._found_inf_per_device(self._optimizer)


class TakesScalers:
    """Of an optimizer whose `step` unscales and skips itself, for `scaler.step(optimizer)`."""

    _asking: torch.amp.GradScaler | None = None

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """torch's scaler asks for it, and says nowhere else who it is: it is remembered for the `step` that it calls.
        To others who ask the answer is no: Lightning would refuse to clip, which torch does not.
        """
        asking = sys._getframe(1)
        if asking.f_code is not torch.amp.GradScaler.step.__code__:
            return False
        self._asking = asking.f_locals["self"]
        return True

    def scaled(self, scaler: Any) -> Scaled | None:
        """Of this step, None without a scaler that is enabled. scaler: what `step` was given, if anything."""
        scaler, self._asking = scaler or self._asking, None
        assert isinstance(self, Optimizer)
        return Scaled(self, scaler) if scaler is not None and scaler.is_enabled() else None
