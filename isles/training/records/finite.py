"""Whether what is about to be kept is made of numbers: looked at before a checkpoint counts and a model is saved.

A loss that is a number says nothing of the step that came of it, so weights are looked at by themselves. Parameters
must be finite; buffers may hold infinities (a causal mask does), and so may an optimizer's state; nothing may hold a
NaN. A worker whose numbers are no numbers any more says which ones, since when, and what to change.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from isles.comm.errors import WorkerFailed
from isles.training.config.sections import Config

_UNDER_WAY = ("flights", "ahead")  # what a round that is skipped has left there is never used


def not_finite(weights: Mapping[str, Tensor], parameters: Container[str]) -> str | None:
    """The first of the named weights that is not to be kept. parameters: the names of those that must be finite, the
    others may be infinite.
    """
    for name, tensor in weights.items():
        if tensor.is_floating_point() and not (tensor.isfinite().all() if name in parameters else _has_no_nan(tensor)):
            return name
    return None


def first_nan(state: Any) -> str | None:
    """Path of the first tensor with a NaN in a worker's state (`Trainer.state_dict`), of what its next steps use."""
    return next((path for path, tensor in _tensors(state, ()) if not _has_no_nan(tensor)), None)


def _has_no_nan(tensor: Tensor) -> bool:
    return not tensor.isnan().any()


def _tensors(state: Any, path: tuple[str, ...]) -> Iterator[tuple[str, Tensor]]:
    if isinstance(state, Tensor):
        if state.is_floating_point():
            yield ".".join(path), state
    elif isinstance(state, Mapping):
        for key, entry in state.items():
            if key not in _UNDER_WAY:
                yield from _tensors(entry, (*path, str(key)))
    elif isinstance(state, Sequence) and not isinstance(state, str):
        for index, entry in enumerate(state):
            yield from _tensors(entry, (*path, str(index)))


def refuse_losses(config: Config, rank: int, last: int, losses: Sequence[Tensor], each: int = 1) -> None:
    """WorkerFailed where a loss of the inner steps up to `last` is no number any more. each: losses of a step."""
    values = torch.stack(list(losses)).tolist() if losses else []
    for number, loss in enumerate(values):
        if not math.isfinite(loss):
            step = last - (len(values) - 1 - number) // each
            raise _diverged(config, rank, f"its loss is {loss} at inner step {step}")


def refuse_state(config: Config, rank: int, step: int, state: Mapping[str, Any], parameters: Container[str]) -> None:
    """WorkerFailed where weights, or what the next steps make of them, are no numbers after `step`. state: "model", the
    weights by name where they are apart, and more. parameters: names of those that must be finite.
    """
    broken = not_finite(state.get("model", {}), parameters) or first_nan(state)
    if broken is not None:
        raise _diverged(config, rank, f"its weights are not finite after inner step {step} ({broken})")


class NotFinite(WorkerFailed):
    """Numbers of the run left the range of floats: its rates are too high."""


def _diverged(config: Config, rank: int, what: str) -> NotFinite:
    mend = f"lower inner.lr (now {config.inner.lr:g}), or replicas.outer_lr where the method has one"
    return NotFinite(rank, f"{what}: {mend}")
