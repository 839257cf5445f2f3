"""A worker whose numbers are no numbers any more: which ones, since when, and what to change."""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from isles.comm.errors import WorkerFailed
from isles.training.config.sections import Config
from isles.training.records.finite import first_nan, not_finite


def refuse_losses(config: Config, rank: int, last: int, losses: Sequence[Tensor]) -> None:
    """WorkerFailed where a loss of the inner steps up to `last` is no number any more."""
    values = torch.stack(list(losses)).tolist() if losses else []
    for step, loss in enumerate(values, last - len(values) + 1):
        if not math.isfinite(loss):
            raise _diverged(config, rank, f"its loss is {loss} at inner step {step}")


def refuse_state(config: Config, rank: int, step: int, state: Mapping[str, Any], parameters: Container[str]) -> None:
    """WorkerFailed where weights, or what the next steps make of them, are no numbers after `step`. state: "model", the
    weights by name, and more. parameters: names of those that must be finite.
    """
    broken = not_finite(state["model"], parameters) or first_nan(state)
    if broken is not None:
        raise _diverged(config, rank, f"its weights are not finite after inner step {step} ({broken})")


def _diverged(config: Config, rank: int, what: str) -> WorkerFailed:
    mend = f"lower inner.lr (now {config.inner.lr:g}), or replicas.outer_lr where the method has one"
    return WorkerFailed(rank, f"{what}: {mend}")
