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
    for found in gc.get_objects():
        if issubclass(type(found), DistributedDataParallel) and own.intersection(map(id, found.parameters())):
            ranks = dist.get_process_group_ranks(found.process_group)
            if len(set(ranks) & set(group.ranks)) > 1:
                return True
    return False
