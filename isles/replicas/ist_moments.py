"""What of an inner optimizer's state belongs to single entries of a parameter, and so can travel with them."""

from __future__ import annotations

from collections import defaultdict
from copy import deepcopy

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

_SIDE = 2  # entries a dimension of the stand-ins


def moments_of(inner: Optimizer) -> dict[int, dict[str, torch.dtype]]:
    """By parameter (its id), the names and dtypes of the state tensors that have its shape: Adam's two moments, SGD's
    momentum, nothing for plain SGD. Found by one step of a copy of `inner` on small stand-ins; `inner` is not touched.
    """
    owners = [parameter for group in inner.param_groups for parameter in group["params"]]
    stand_ins = {id(parameter): _stand_in(parameter) for parameter in owners}
    memo = {**stand_ins, id(inner.state): defaultdict(dict)}
    copy = deepcopy(inner, memo)
    with torch.no_grad():
        copy.step()
    return {
        own: {
            slot: value.dtype
            for slot, value in copy.state[small].items()
            if isinstance(value, Tensor) and value.shape == small.shape
        }
        for own, small in stand_ins.items()
    }


def _stand_in(parameter: Tensor) -> nn.Parameter:
    device = "cpu" if parameter.is_meta else parameter.device
    small = nn.Parameter(torch.zeros((_SIDE,) * max(parameter.ndim, 1), dtype=parameter.dtype, device=device))
    small.grad = torch.zeros_like(small)
    return small
