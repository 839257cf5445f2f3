"""Inner optimizers that do their work as late as they may: what a method must leave room for."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from isles.base.wrapping import Wrapping
from tests.replicas.workers import Net

Update = tuple[list[Tensor | None], list[dict[str, Any]]]


class LateUpdates(Wrapping):
    """Applies updates in `catch_up` alone, which it calls before the model's next forward pass. Keeps gradients and
    hyper-parameters of the time of `step`: users clear the ones and schedulers change the others.
    """

    def __init__(self, model: nn.Module, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner, [parameter for parameter in model.parameters() if parameter.requires_grad])
        self.waiting: list[Update] = []
        self.calls = Counter[str]()
        model.register_forward_pre_hook(lambda *_: self.before_forward())

    def before_forward(self) -> None:
        self.catch_up()

    def step(self, closure: Any = None) -> None:
        self.waiting.append(([None if p.grad is None else p.grad.clone() for p in self.parameters], self.settings()))

    def gradients(self) -> None:
        self.calls["gradients"] += 1

    def catch_up(self) -> None:
        waiting, self.waiting = self.waiting, []
        if not waiting:
            return
        self.calls["catch_up"] += 1
        now: Update = [parameter.grad for parameter in self.parameters], self.settings()
        for update in waiting:
            self.restore(update)
            self.inner.step()
        self.restore(now)

    def settings(self) -> list[dict[str, Any]]:
        return [{key: value for key, value in group.items() if key != "params"} for group in self.inner.param_groups]

    def restore(self, update: Update) -> None:
        gradients, settings = update
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient
        for group, own in zip(self.inner.param_groups, settings, strict=True):
            group.update(own)


class CopyingNet(Net):
    """Computes with copies of its parameters, as a model does whose weights are elsewhere: a backward pass leaves the
    gradients with the copies.
    """

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self.copies: list[dict[str, Tensor]] = []
        self.is_copying = False

    def forward(self, x: Tensor) -> Tensor:
        if self.is_copying or not torch.is_grad_enabled():
            return super().forward(x)
        copies = {name: own.detach().clone().requires_grad_() for name, own in self.named_parameters()}
        self.copies.append(copies)
        self.is_copying = True
        try:
            return functional_call(self, copies, x)
        finally:
            self.is_copying = False


class LateGradients(LateUpdates):
    """Late with gradients too: they reach `.grad` in `gradients` alone, by way of autograd, whose hooks run then."""

    def __init__(self, model: CopyingNet, inner: torch.optim.Optimizer) -> None:
        super().__init__(model, inner)
        self.model = model

    def before_forward(self) -> None:
        if not self.model.is_copying:
            self.catch_up()

    def gradients(self) -> None:
        super().gradients()
        ready, self.model.copies = self.model.copies, []
        own = dict(self.model.named_parameters())
        for copies in ready:
            found = {name: copy.grad for name, copy in copies.items() if copy.grad is not None}
            torch.autograd.backward([own[name] for name in found], list(found.values()))
