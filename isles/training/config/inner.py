"""The inner optimizer: AdamW, SGD without momentum, Muon or one's own; its learning rate over the run, and clipping.

    lr(s) = lr * s / w                                     s <= w: the warm-up, of all schedules
    cosine         lr * (f + (1 - f) (1 + cos(pi d)) / 2)  d: share of the steps after the warm-up that are done
    linear         lr * (f + (1 - f) (1 - d))
    wsd            lr * (f + (1 - f) (1 - e))              e: share of the decay's steps that are done; 0 before it
    inverse_sqrt   lr * max(f, sqrt(w / s))                with w = 0: lr * max(f, sqrt(1 / s))
    constant       lr

s: the inner step, from 1. w: warmup_steps. f: final_lr_fraction. wsd (warm-up, stable, decay) decays in the run's last
decay_fraction, or after the warm-up if that is later. After the last step the rate stays. The schedule counts inner
steps only; outer steps do not touch it. Loads no torch; the optimizer itself: `isles.training.optimizer`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from isles.base.errors import as_typed, demand
from isles.base.parts import names_code, one_of_or_code

_MUON = {
    "momentum": lambda x: isinstance(x, int | float) and 0 <= x < 1,
    "nesterov": lambda x: isinstance(x, bool),
    "ns_steps": lambda x: isinstance(x, int) and 1 <= x < 100,
    "adjust_lr_fn": lambda x: x in ("match_rms_adamw", "original"),
}
"""Options of torch.optim.Muon, and what they may be."""
Schedule = Literal["cosine", "wsd", "linear", "constant", "inverse_sqrt"]


@dataclass(frozen=True, kw_only=True)
class InnerConfig:
    """The inner optimizer, its schedule and clipping."""

    optimizer: str = "auto"
    """Which one: "adamw"; "sgd": without momentum, x - lr (g + weight_decay x); "muon": torch.optim.Muon for matrices
    of the blocks, AdamW for all others; package.module:Class for your own; "auto": what the method is made for, which
    is sgd for demo and adamw for all others.
    """
    lr: float = 6e-4
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's decay of its two moments."""
    weight_decay: float = 0.1
    """Weight decay of matrices; vectors (norm gains) have none."""
    max_norm: float = 1.0
    """Clip the (reduced) gradient to this 2-norm, 0 for no clipping."""
    schedule: Schedule = "cosine"
    """Learning rate after the warm-up: "cosine" and "linear" fall until the last step; "wsd" stays at the peak and
    falls linearly at the end; "inverse_sqrt" falls as 1/sqrt(step); "constant" stays.
    """
    warmup_steps: int = 1000
    """Inner steps of linear warm-up."""
    final_lr_fraction: float = 0.1
    """Share of the peak reached at the last step; of "inverse_sqrt" the least, of "constant" without effect."""
    decay_fraction: float = 0.2
    """Of "wsd": share of the run's steps, its last ones, in which the rate falls."""
    accumulation: int = 1
    """Batches a step whose gradients are averaged before the inner step."""
    options: dict[str, Any] | None = None
    """Keyword arguments of your own class, or of Muon (momentum, nesterov, ns_steps, adjust_lr_fn): [inner.options]."""

    def __post_init__(self) -> None:
        one_of_or_code("optimizer", self.optimizer, ("auto", "adamw", "sgd", "muon"))
        for key, value in (self.options or {}).items():
            if self.optimizer == "muon" and key not in _MUON:
                raise ValueError(f'options.{key}: with "muon", choose one of {", ".join(_MUON)}, or leave it out')
            if self.optimizer == "muon" and not _MUON[key](value):
                raise ValueError(f"options.{key} = {as_typed(value)} is no value of torch.optim.Muon: leave it out")
            if self.optimizer != "muon" and not names_code("optimizer", self.optimizer):
                raise ValueError(f'options.{key} is for your own optimizer or "muon", not for "{self.optimizer}"')
            if key in ("lr", "weight_decay"):
                raise ValueError(f"options.{key}: set inner.{key} instead")
        demand(self, "lr", lambda x: 0 < x < math.inf, "choose a positive rate, such as 6e-4")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas = {self.betas}: choose both in [0, 1), such as [0.9, 0.95]")
        demand(self, "weight_decay max_norm", lambda x: 0 <= x < math.inf, "choose 0 (off) or more")
        demand(self, "warmup_steps", lambda x: x >= 0, "choose 0 or more steps")
        demand(self, "final_lr_fraction", lambda x: 0 <= x <= 1, "choose a share in [0, 1]")
        demand(self, "decay_fraction", lambda x: 0 < x <= 1, 'choose a share in (0, 1], or schedule = "constant"')
        demand(self, "accumulation", lambda x: x >= 1, "choose 1 or more batches")


def lr_factor(step: int, steps: int, config: InnerConfig) -> float:
    """The learning rate of inner step `step` (1..steps) as a share of the peak; see the module."""
    begin, least = config.warmup_steps, config.final_lr_fraction
    if step <= begin:
        return step / begin
    if config.schedule == "constant":
        return 1.0
    if config.schedule == "inverse_sqrt":
        return max(least, math.sqrt(max(begin, 1) / step))
    if config.schedule == "wsd":
        begin = max(steps - max(round(config.decay_fraction * steps), 1), begin)
    done = min(max((step - begin) / max(steps - begin, 1), 0.0), 1.0)
    return least + (1 - least) * ((1 + math.cos(math.pi * done)) / 2 if config.schedule == "cosine" else 1 - done)


def inner_kind(config: InnerConfig, usual: Literal["adamw", "sgd"]) -> str:
    """Which optimizer it is; usual: what "auto" stands for."""
    return usual if config.optimizer == "auto" else config.optimizer


def most_moments(config: InnerConfig, usual: Literal["adamw", "sgd"]) -> int:
    """Vectors of the model's size in the optimizer's state, at most; for one's own as many as AdamW has."""
    return 0 if inner_kind(config, usual) == "sgd" else 2


def inner_notices(config: InnerConfig, usual: Literal["adamw", "sgd"], steps: int) -> list[str]:
    """What a user should know about the inner optimizer of a run of `steps`, and about its schedule."""
    notices = []
    unused = [] if config.schedule == "wsd" else ["decay_fraction"]
    for key in [*unused, "final_lr_fraction"] if config.schedule == "constant" else unused:
        if (value := getattr(config, key)) != getattr(InnerConfig, key):
            notices.append(f'inner.{key} = {value:g}: not used by inner.schedule = "{config.schedule}"')
    if (kind := inner_kind(config, usual)) not in ("adamw", "muon") and config.betas != InnerConfig.betas:
        notices.append(f"inner.betas = {list(config.betas)} are AdamW's, and the inner optimizer is {kind}: not used")
    if config.warmup_steps <= steps:
        return notices
    reached = config.lr * lr_factor(steps, steps, config)
    return [
        *notices,
        f"inner.warmup_steps = {config.warmup_steps} is more than the run's {steps} steps: the rate ends at "
        f"{reached:.2g} instead of {config.lr:g}; lower it",
    ]
