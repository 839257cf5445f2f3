"""What of an inner optimizer's state belongs to single entries of a parameter, and so can travel with them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

_SKETCHED: dict[type[Optimizer], tuple[str, ...]] = {
    torch.optim.AdamW: ("exp_avg", "exp_avg_sq"),
    torch.optim.SGD: (),
}  # as `isles train` makes them
_SIDE = 2  # entries a dimension of the stand-ins
_MEND = 'set optimizer_state = "reset", or take another inner optimizer'


def moments_of(inner: Optimizer) -> dict[int, dict[str, torch.dtype]]:
    """By parameter (its id), the names and dtypes of the state tensors that have its shape: Adam's two moments, SGD's
    momentum, nothing for plain SGD or for a frozen parameter. Found by one step of a copy of `inner` on small
    stand-ins; `inner` is not touched. ValueError: it cannot be copied, or has state of whole rows or columns.
    """
    owners = [parameter for group in inner.param_groups for parameter in group["params"]]
    if type(inner) in _SKETCHED and all(parameter.is_meta for parameter in owners):
        return {id(parameter): dict.fromkeys(_SKETCHED[type(inner)], parameter.dtype) for parameter in owners}
    stand_ins = {id(parameter): _stand_in(parameter) for parameter in owners}
    memo = {**stand_ins, id(inner.state): defaultdict(dict)}
    name = type(inner).__name__
    try:
        copy = deepcopy(inner, memo)
        copy.step()
    except Exception as error:  # an optimizer of the user's own may do anything here
        raise ValueError(
            f"what of {name}'s state could travel is found by a step of a copy of it, which failed "
            f"({type(error).__name__}: {error}): {_MEND}"
        ) from error
    return {own: _slots(copy.state[small], small, name) for own, small in stand_ins.items()}


def _slots(state: Mapping[str, Any], small: Tensor, name: str) -> dict[str, torch.dtype]:
    """Those of one stand-in."""
    tensors = {slot: value for slot, value in state.items() if isinstance(value, Tensor) and value.numel() > 1}
    for slot, value in tensors.items():
        if value.shape != small.shape:
            raise ValueError(f"{name}'s {slot} is of whole rows or columns and cannot travel with units: {_MEND}")
    return {slot: value.dtype for slot, value in tensors.items()}


def _stand_in(parameter: Tensor) -> nn.Parameter:
    device = "cpu" if parameter.is_meta else parameter.device
    small = nn.Parameter(torch.zeros((_SIDE,) * max(parameter.ndim, 1), dtype=parameter.dtype, device=device))
    small.grad = torch.zeros_like(small) if parameter.requires_grad else None
    return small
