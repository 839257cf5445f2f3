"""Whether the optimizers of several workers, or one inside another, may train one model."""

from __future__ import annotations

import hashlib
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from isles.replicas.legal import DEMO_OUTER


def inner_settings(inner: Optimizer) -> list[Any]:
    """The hyper-parameters that are plain numbers: objects may print differently on every worker."""
    items = [item for group in inner.param_groups for item in group.items() if item[0] != "params"]
    plain = [(key, float(value) if isinstance(value, Tensor) else value) for key, value in items]
    return [type(inner).__name__, [item for item in plain if isinstance(item[1], int | float | tuple)]]


def fingerprint(text: str) -> int:
    """64 bits of a hash, the same on every machine."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little", signed=True)


def refuse_nested(outer: Optimizer, inner: Optimizer) -> None:
    """ValueError for a method around one at optimizer level."""
    if getattr(inner, "level", "") == "optimizer":
        when, because = DEMO_OUTER
        raise ValueError(f"{type(outer).__name__} around {type(inner).__name__} ({when}): {because}")


def refuse_scaler(optimizer: Any) -> None:
    """ValueError for a gradient scaler at optimizer level."""
    if optimizer.level == "optimizer":
        raise ValueError(
            f"{type(optimizer).__name__} takes no gradient scaler: a worker whose gradient overflows would leave out a "
            "step that all others take; train in bfloat16 or float32, which need none"
        )
