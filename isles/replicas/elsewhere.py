"""Whether gradients are averaged by somebody else too: torch's DistributedDataParallel around our parameters, as
transformers' Trainer and accelerate's `prepare(model)` put it there.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from isles.comm.group import Group


def warn_if_averaged_by_torch(parameters: Sequence[Tensor], group: Group) -> None:
    """A warning on the group's first worker where a method is not the only one that makes these parameters equal."""
    if averaged_by_torch(parameters, group) and group.rank == 0:
        warnings.warn(
            "the model is inside a DistributedDataParallel: torch averages all gradients over these workers in every "
            "backward pass, outside of what is counted, and this method exchanges on top of it. Give accelerate's "
            "prepare() the optimizer and the loader alone, and call the model itself",
            stacklevel=4,
        )


def averaged_by_torch(parameters: Sequence[Tensor], group: Group) -> bool:
    """Whether a DistributedDataParallel that is alive averages their gradients with other workers of `group`. It may
    have been made at any time, and its model knows nothing of it, so all objects are looked through: some 50 ms.
    """
    if group.size == 1 or not (dist.is_available() and dist.is_initialized()):
        return False
    own = set(map(id, parameters))
    for wrapped in _wrapped_by_torch():
        ranks = dist.get_process_group_ranks(wrapped.process_group)
        if own.intersection(map(id, wrapped.parameters())) and len(set(ranks) & set(group.ranks)) > 1:
            return True
    return False


def _wrapped_by_torch() -> list[DistributedDataParallel]:
    """All that are alive. Asking every object whether it is one takes seconds, for the class is an abstract one: so
    their types are asked, a few thousand.
    """
    objects = gc.get_objects()
    kinds = {kind for kind in set(map(type, objects)) if DistributedDataParallel in type.mro(kind)}
    return [found for found in objects if type(found) in kinds] if kinds else []
