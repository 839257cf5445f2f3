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

from isles.base.wrapping import evaluated
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
        loss = evaluated(closure)
        for group in self.param_groups:
            own = [parameter for parameter in group["params"] if parameter.grad is not None]
            if own:
                self._step(own, group)
        return loss

    def _step(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        gradients: list[Any] = [parameter.grad for parameter in parameters]
        states, (first, second), axis = [self.state[own] for own in parameters], group["betas"], group["mean_axis"]
        squares = torch._foreach_mul(gradients, gradients)
        if axis is not None:
            squares = [square.mean(dim=axis, keepdim=True) for square in squares]
        for parameter, square, state in zip(parameters, squares, states, strict=True):
            if not state:
                state["step"] = torch.tensor(0.0, dtype=torch.float32, device="cpu")
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(square)
        steps, means, moments = ([state[key] for state in states] for key in ("step", "exp_avg", "exp_avg_sq"))
        torch._foreach_add_(steps, 1)
        done = [int(step) for step in steps]
        torch._foreach_lerp_(means, gradients, 1 - first)
        torch._foreach_lerp_(moments, squares, 1 - second)
        sizes = torch._foreach_div(moments, [1 - second**step for step in done])
        torch._foreach_sqrt_(sizes)
        torch._foreach_add_(sizes, group["eps"])
        moves = torch._foreach_div(means, sizes)
        torch._foreach_mul_(moves, [-group["lr"] / (1 - first**step) for step in done])
        torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_add_(parameters, moves)


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
