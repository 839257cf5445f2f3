"""Whether what is about to be kept is made of numbers: looked at before a checkpoint counts and a model is saved.

A loss that is a number says nothing of the step that came of it, so weights are looked at by themselves. Parameters
must be finite; buffers may hold infinities (a causal mask does), and so may an optimizer's state; nothing may hold a
NaN.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

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
