"""Parts of one optimizer: each updates some of its parameters, with the whole one's settings and state."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

Settings = list[dict[str, Any]]


def settings_of(optimizer: Optimizer) -> Settings:
    """A copy of all groups' settings (learning rate, betas, ...), as they are now."""
    return [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]


def same_settings(one: Settings, other: Settings) -> bool:
    """Whether all groups have equal ones."""
    return all(
        a.keys() == b.keys() and all(_equal(a[key], b[key]) for key in a) for a, b in zip(one, other, strict=True)
    )


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return bool(torch.equal(torch.as_tensor(one), torch.as_tensor(other)))
    return one == other


class PartialOptimizer:
    """The share of `whole` that updates `parameters`. State is the whole one's, made when it first updates."""

    def __init__(self, whole: Optimizer, parameters: Iterable[nn.Parameter]) -> None:
        self.parameters = list(parameters)
        wanted = {id(parameter) for parameter in self.parameters}
        self.whole = whole
        self._groups: list[tuple[int, list[nn.Parameter]]] = []
        for number, group in enumerate(whole.param_groups):
            own = [parameter for parameter in group["params"] if id(parameter) in wanted]
            if own:
                self._groups.append((number, own))
        # Its class and attributes without its constructor, whose arguments are not known.
        self._optimizer: Optimizer = object.__new__(type(whole))
        attributes: Mapping[str, Any] = whole.__dict__
        self._optimizer.__dict__.update({key: value for key, value in attributes.items() if key != "step"})
        for hooks in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):  # those are of the whole step
            self._optimizer.__dict__[hooks] = OrderedDict()

    @property
    def empty(self) -> bool:
        """Whether it has nothing to update."""
        return not self._groups

    def update(self, settings: Settings, gradients: Sequence[Tensor | None], state: Any = None) -> None:
        """Update by these gradients of the parameters, in their order; none is left on them. state: as in `step`."""
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient
        self.step(settings, state)
        for parameter in self.parameters:
            parameter.grad = None

    def step(
        self,
        settings: Sequence[Mapping[str, Any]],
        state: Any = None,
        instead: Mapping[nn.Parameter, nn.Parameter] | None = None,
    ) -> None:
        """Update by the parameters' gradients, with these settings of all groups of the whole optimizer. state: None
        for the whole one's. instead: what stands for each parameter, with gradient and state of its own.
        """
        if self.empty:
            return
        self._optimizer.state = self.whole.state if state is None else state
        self._optimizer.param_groups = [
            {**settings[number], "params": own if instead is None else [instead[parameter] for parameter in own]}
            for number, own in self._groups
        ]
        self._optimizer.step()
        self._optimizer.state, self._optimizer.param_groups = (
            defaultdict(dict),
            [],
        )  # it holds neither states nor stand-ins
