"""The inner optimizer: AdamW, or SGD without momentum, with linear warm-up and cosine decay over the whole run, and
clipping.

    lr(step) = lr * step / warmup_steps                                        for step <= warmup_steps
             = lr * (f + (1 - f) (1 + cos(pi * done)) / 2)                      done: share of the steps after the
             warm-up

f: final_lr_fraction. The schedule counts inner steps only; outer steps do not touch it. Loads no torch; the optimizer
itself: `isles.training.optimizer`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from isles.base.errors import demand


@dataclass(frozen=True, kw_only=True)
class InnerConfig:
    """The inner optimizer, its schedule and clipping."""

    optimizer: Literal["auto", "adamw", "sgd"] = "auto"
    """Which one: "adamw"; "sgd": without momentum, x - lr (g + weight_decay x); "auto": what the method is made for,
    which is sgd for demo and adamw for all others.
    """
    lr: float = 6e-4
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's decay of its two moments."""
    weight_decay: float = 0.1
    """Weight decay of matrices; vectors (norm gains) have none."""
    max_norm: float = 1.0
    """Clip the (reduced) gradient to this 2-norm, 0 for no clipping."""
    warmup_steps: int = 1000
    """Inner steps of linear warm-up."""
    final_lr_fraction: float = 0.1
    """Share of the peak reached at the last step."""
    accumulation: int = 1
    """Batches a step whose gradients are averaged before the inner step."""

    def __post_init__(self) -> None:
        demand(self, "lr", lambda x: 0 < x < math.inf, "choose a positive rate, such as 6e-4")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas = {self.betas}: choose both in [0, 1), such as [0.9, 0.95]")
        demand(self, "weight_decay max_norm", lambda x: 0 <= x < math.inf, "choose 0 (off) or more")
        demand(self, "warmup_steps", lambda x: x >= 0, "choose 0 or more steps")
        demand(self, "final_lr_fraction", lambda x: 0 <= x <= 1, "choose a share in [0, 1]")
        demand(self, "accumulation", lambda x: x >= 1, "choose 1 or more batches")


def lr_factor(step: int, steps: int, config: InnerConfig) -> float:
    """The learning rate of inner step `step` (1..steps) as a share of the peak; see the module."""
    if step <= config.warmup_steps:
        return step / config.warmup_steps
    done = (step - config.warmup_steps) / max(steps - config.warmup_steps, 1)
    return config.final_lr_fraction + (1 - config.final_lr_fraction) * (1 + math.cos(math.pi * min(done, 1.0))) / 2


def inner_kind(config: InnerConfig, usual: Literal["adamw", "sgd"]) -> Literal["adamw", "sgd"]:
    """Which optimizer it is; usual: what "auto" stands for."""
    return usual if config.optimizer == "auto" else config.optimizer


def inner_notices(config: InnerConfig, usual: Literal["adamw", "sgd"], steps: int) -> list[str]:
    """What a user should know about the inner optimizer of a run of `steps`, and about its schedule."""
    notices = []
    if inner_kind(config, usual) == "sgd" and config.betas != InnerConfig.betas:
        notices.append(f"inner.betas = {list(config.betas)} are AdamW's, and the inner optimizer is SGD: not used")
    if config.warmup_steps <= steps:
        return notices
    reached = config.lr * lr_factor(steps, steps, config)
    return [
        *notices,
        f"inner.warmup_steps = {config.warmup_steps} is more than the run's {steps} steps: the rate ends at "
        f"{reached:.2g} instead of {config.lr:g}; lower it",
    ]
