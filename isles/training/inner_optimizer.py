"""The inner optimizer that `[inner]` asks for, the course of its learning rate, and what its state weighs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from inspect import signature
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from isles.pipeline.rowwise import RowwiseAdamW, by_rows, settled
from isles.training.config.inner import InnerConfig, inner_kind, lr_factor
from isles.training.config.sections import Config


def inner_optimizer(model: nn.Module, config: InnerConfig, usual: Literal["adamw", "sgd"]) -> Optimizer:
    """The configured optimizer over the trainable parameters; no weight decay on vectors (norm gains). usual: what
    "auto" stands for. Full-size weights in a subspace stay there, see `isles.pipeline.rowwise`.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    rows, sgd = by_rows(groups, model), inner_kind(config, usual) == "sgd"
    if any(parameter.is_meta for parameter in trained):
        kind = torch.optim.SGD if sgd else torch.optim.AdamW if rows is None else RowwiseAdamW
        return _sketched(kind, groups if sgd or rows is None else rows, config.lr)
    if sgd:
        return settled(torch.optim.SGD(groups, lr=config.lr, fused=True), model)
    if rows is not None:
        return RowwiseAdamW(rows, lr=config.lr, betas=config.betas)
    return settled(torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, fused=True), model)


def _sketched(kind: type[Optimizer], groups: list[dict[str, Any]], lr: float) -> Optimizer:
    """One that takes no step, of parameters without numbers. Torch's own constructor would load its compiler: a second
    of computing.
    """
    made = kind.__new__(kind)
    usual = {key: one.default for key, one in signature(kind).parameters.items() if one.default is not one.empty}
    if kind is torch.optim.AdamW:
        usual["decoupled_weight_decay"] = True  # as torch has it behind the signature
    if "fused" in usual:
        usual["fused"] = False
    made.defaults, made.state = usual | {"lr": lr}, defaultdict(dict)
    made.param_groups = [made.defaults | group for group in groups]
    return made


def inner_bytes(parameters: Iterable[Tensor], optimizer: Literal["adamw", "sgd"]) -> int:
    """Memory of its state in bytes. AdamW: two moments of each trainable parameter, and a float32 step count. SGD:
    none.
    """
    if optimizer == "sgd":
        return 0
    return sum(2 * parameter.nbytes + 4 for parameter in parameters if parameter.requires_grad)


def rate_schedule(optimizer: Optimizer, config: Config) -> LambdaLR:
    """Stepped after each inner step. An update that is taken steps later has the rate of its own step."""
    late = config.pipeline.swarm.delay_updates
    return LambdaLR(optimizer, lambda done: lr_factor(max(done + 1 - late, 1), config.run.steps, config.inner))
