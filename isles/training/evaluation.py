"""How good the weights are."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn


@torch.no_grad()
def validation_loss(
    model: nn.Module,
    batches: Iterable[Tensor],
    autocast: AbstractContextManager[object],
    loss: Callable[[Tensor], Tensor] | None = None,
) -> float:
    """Mean next-token cross-entropy in nats over all rows of `batches` (each (b, T+1), int64; the last may be
    shorter); NaN without rows. loss: of a batch; None: the model's own.
    """
    device = next(model.parameters()).device
    was_training = model.training
    model.eval()
    total, rows = 0.0, 0
    with autocast:
        for batch in batches:
            tokens = batch.to(device)
            total += float(model(tokens).loss if loss is None else loss(tokens)) * len(batch)
            rows += len(batch)
    model.train(was_training)
    return total / rows if rows else float("nan")
