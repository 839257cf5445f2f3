"""The narrow model of one worker of IST, made in place: the divided parameters of the user's module get other tensors,
and the modules learn their widths.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from isles.models.subnet import fit, take
from isles.replicas.methods.ist.partition import Division
from isles.replicas.methods.ist.store import WEIGHT, Key


class Subnet:
    """The divided parameters of `model`, by name; of full width until `begin`."""

    def __init__(self, model: nn.Module, division: Division) -> None:
        self.model, self.division = model, division
        named = dict(model.named_parameters())
        self.parameters = {name: named[name] for name in division.axes}

    @property
    def full_bytes(self) -> int:
        """Of all divided parameters at full width."""
        shapes = self.division.shapes
        return sum(torch.Size(shapes[name]).numel() * p.itemsize for name, p in self.parameters.items())

    @property
    def undivided(self) -> list[Tensor]:
        """The trained parameters that all workers hold."""
        apart = set(map(id, self.parameters.values()))
        return [p for p in self.model.parameters() if p.requires_grad and id(p) not in apart]

    def begin(self, worker: int) -> None:
        """Become the subnet of `worker` in the first round. ValueError where torch still needs the full widths."""
        axes = self.division.axes
        self.set_values(
            {
                name: take(parameter.detach(), axes[name], self.division.held_units(name, worker, 0))
                for name, parameter in self.parameters.items()
            }
        )
        trained = [p for p in self.parameters.values() if p.requires_grad and not p.is_meta]
        with torch.enable_grad():
            try:
                torch.autograd.grad([parameter.sum() for parameter in trained], trained) if trained else None
            except RuntimeError as error:  # of shapes
                raise ValueError(
                    "a loss or an output of the model from before is still there, and its graph holds the parameters "
                    "to their full widths: wrap the model first, or delete it (or compute it in torch.no_grad())"
                ) from error

    def set_values(self, tensors: Mapping[str, Tensor]) -> None:
        """Give the parameters these values, of whatever widths, and no gradients."""
        for name, tensor in tensors.items():
            self.parameters[name].grad = None
            self.parameters[name].data = tensor
        fit(self.model)

    @contextmanager
    def set_aside(self) -> Iterator[None]:
        """The parameters may be given other values inside: the subnet, gradients included, is back after. Nothing
        computed inside has gradients of the divided ones, whose graph would expect other widths than they have later.
        """
        before = {name: (p.data, p.grad, p.requires_grad) for name, p in self.parameters.items()}
        for parameter in self.parameters.values():
            parameter.requires_grad_(False)
        try:
            yield
        finally:
            self.set_values({name: data for name, (data, _, _) in before.items()})
            for name, (_, gradient, is_trained) in before.items():
                self.parameters[name].requires_grad_(is_trained)
                self.parameters[name].grad = gradient

    def live(self, inner: Optimizer, keys: Sequence[Key]) -> dict[Key, Tensor]:
        """The tensors behind `keys`, as they are used in training. ValueError for a moment that is not there."""
        found = {}
        for key in keys:
            parameter = self.parameters[key.name]
            state = {WEIGHT: parameter.data} if key.slot == WEIGHT else inner.state[parameter]
            if key.slot not in state:
                raise ValueError(
                    f"{key.name} had no gradient for a whole round, so it has no {key.slot} that could travel: set "
                    'optimizer_state = "reset"'
                )
            found[key] = state[key.slot]
        return found
