"""Where fake tensors go another way than real ones, and take other bytes."""

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
_NORMS = (torch.ops.aten.native_batch_norm.default, torch.ops.aten._native_batch_norm_legit.default)


class LikeReal(TorchDispatchMode):
    """Within a FakeTensorMode, so that a step without numbers takes the bytes of one with.

    Integers that come from no weight and no batch, such as positions, keep their numbers. Models look at them: one of
    transformers asks whether its positions are those of several texts in a row, and where it cannot know builds a mask
    for its attention. The statistics of a batch norm of bfloat16 with weights of float32 are float32, which the fake
    operation does not know.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _NORMS and args[1] is not None and args[0].dtype != args[1].dtype:
            made, *statistics = func(*args, **kwargs)
            return made, *(one.to(args[1].dtype) for one in statistics)
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
