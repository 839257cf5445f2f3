"""AdamW with one second moment a row, for matrices that must stay in a subspace (Protocol Models, arXiv 2506.01260).

    m <- b1 m + (1 - b1) g          v <- b2 v + (1 - b2) mean over the row of g^2
    w <- (1 - lr decay) w - lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)

A row of gradients in S is scaled as a whole, so it stays in S, and decoupled decay scales too. v is one number a row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from isles.models.subspace import InsideEmbedding, InsideLinear, held_inside


class RowwiseAdamW(Optimizer):
    """Groups say along which axis their rows run (`mean_axis`); None: v of every entry, as AdamW."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        mean_axis: int | None = None,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "mean_axis": mean_axis}
        super().__init__(params, defaults)

    @override
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step(parameter, parameter.grad, group)
        return loss

    def _step(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state, (first, second), axis = self.state[parameter], group["betas"], group["mean_axis"]
        square = gradient.square()
        square = square if axis is None else square.mean(dim=axis, keepdim=True)
        if not state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(square)
        state["step"] += 1
        done = int(state["step"])
        mean, spread = state["exp_avg"].lerp_(gradient, 1 - first), state["exp_avg_sq"].lerp_(square, 1 - second)
        size = (spread / (1 - second**done)).sqrt_().add_(group["eps"])
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.sub_(mean / size, alpha=group["lr"] / (1 - first**done))


def by_rows(groups: list[dict[str, Any]], model: nn.Module) -> list[dict[str, Any]] | None:
    """`groups` of `model`, with those parameters apart whose rows are to be scaled as a whole; None without any."""
    full = [writer for writer in held_inside(model) if isinstance(writer, InsideLinear | InsideEmbedding)]
    axes = {id(writer.weight): writer.mean_axis for writer in full if writer.form == "row-wise"}
    if not axes:
        return None
    found = []
    for group in groups:
        for axis in (None, 0, 1):
            own = [parameter for parameter in group["params"] if axes.get(id(parameter)) == axis]
            if own:
                found.append({**group, "params": own, "mean_axis": axis})
    return found


def settled(optimizer: Optimizer, model: nn.Module) -> Optimizer:
    """`optimizer`, with the weights of `model` that must lie in a subspace projected on it after every step."""
    if any(isinstance(writer, InsideLinear | InsideEmbedding) for writer in held_inside(model)):
        optimizer.register_step_post_hook(lambda *_: settle(model))
    return optimizer


@torch.no_grad()
def settle(model: nn.Module) -> None:
    """Project the weights of `model` that must lie in a subspace."""
    for writer in held_inside(model):
        if isinstance(writer, InsideLinear | InsideEmbedding):
            writer.settle()
