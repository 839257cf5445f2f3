"""How good the weights are."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn


@torch.no_grad()
def validation_loss(model: nn.Module, batches: Iterable[Tensor], autocast: AbstractContextManager[object]) -> float:
    """Mean next-token cross-entropy in nats over all rows of `batches` (each (b, T+1), int64; the last may be
    shorter).
    """
    device = next(model.parameters()).device
    was_training = model.training
    model.eval()
    total, rows = 0.0, 0
    with autocast:
        for batch in batches:
            total += float(model(batch.to(device)).loss) * len(batch)
            rows += len(batch)
    model.train(was_training)
    return total / rows if rows else float("nan")
