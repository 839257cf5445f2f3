"""How far replicas are apart."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from isles.comm.codecs import codec
from isles.comm.group import Group
from isles.replicas.flat import FlatParameters


def replica_std(shares: Sequence[Tensor], group: Group, island: Group | None) -> float:
    """sqrt(sum over replicas and parameters of (p - mean p)^2 / (replicas * parameters)), on all workers of `group`.

    shares: this worker's part of its replica's parameters, the rest of which the others of `island` have. Costs one
    mean over the group on the channel "eval"; nothing is changed.
    """
    flat = FlatParameters(shares)
    if not flat.numel and island is None:
        return 0.0
    own = flat.read(flat.new())
    average = own.clone()
    group.mean(average, codec("none"), channel="eval")
    apart = [mine.sub_(mean) for mine, mean in zip(flat.parts(own), flat.parts(average), strict=True)]  # in place
    total = torch.stack([part.square_().sum(dtype=torch.float64) for part in apart]).sum()
    squares = torch.cat(group.all_gather(total.reshape(1), channel="eval")).sum()
    sums = torch.stack([squares, torch.tensor(group.size * flat.numel, dtype=torch.float64)])
    if island is not None:
        sums = torch.stack(island.all_gather(sums, channel="eval")).sum(0)
    return float(sums[0] / sums[1]) ** 0.5
