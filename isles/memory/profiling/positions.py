"""Numbers that models ask for while they are profiled without any."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    unset_fake_temporarily,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_MOST = 2**24  # entries


class KnownPositions(TorchDispatchMode):
    """Within a FakeTensorMode: integers that come from no weight and no batch, such as positions, keep their numbers.

    Models look at them: one of transformers asks whether its positions are those of several texts in a row, and builds
    a mask for its attention where it cannot know, which takes other bytes than the run does.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if any(isinstance(one, FakeTensor) for one in given) or torch.Tag.nondeterministic_seeded in func.tags:
            return func(*args, **kwargs)
        try:
            made = func(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException):
            made = None
        else:
            tensors = [leaf for leaf in tree_leaves(made) if isinstance(leaf, Tensor)]
            if any(one.is_floating_point() or one.is_complex() or one.numel() > _MOST for one in tensors):
                return made
        with unset_fake_temporarily():
            return func(*args, **kwargs)
