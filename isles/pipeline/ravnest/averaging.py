"""Averages over clusters that are cut at different blocks, segment by segment at the same time.

    w <- mean_c w_c            equal, or by the samples of each: mean_c (n_c w_c) / mean_c n_c

Bytes sent by a node and average: 2 (C - 1) / C times what it holds, for C clusters, and a header for each segment and
cluster: a ring's volume, by the two-shot mean (`isles.comm.collectives.mean`), which gives the same bits everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from isles.comm.codecs import codec
from isles.comm.collectives.basic import broadcast
from isles.comm.collectives.headers import Stamp
from isles.comm.collectives.mean import mean
from isles.comm.errors import WorkerFailed
from isles.comm.group import Group
from isles.pipeline.ravnest.quorum import WORDS, Attempt, Quorum
from isles.pipeline.ravnest.refinement import SharedSegment


@dataclass(frozen=True, slots=True)
class _Share:
    """This node's part in one segment. number: of the segment in the model."""

    number: int
    segment: SharedSegment
    parameters: tuple[nn.Parameter, ...]


class ClusterAverage:
    """One node's. stage: holds the parameters by their names in the whole model. segments: of the whole model, with
    positions of the quorum's world as holders. by_samples: clusters count by what they trained on. optimizer: its state
    is averaged too, where given.
    """

    def __init__(
        self,
        stage: nn.Module,
        quorum: Quorum,
        segments: Sequence[SharedSegment],
        *,
        by_samples: bool = False,
        optimizer: Optimizer | None = None,
    ) -> None:
        if len(segments) > WORDS:
            raise ValueError(f"{len(segments)} segments: {WORDS} at most; cut fewer clusters differently")
        self.quorum, self._by_samples, self._optimizer = quorum, by_samples, optimizer
        own, here = dict(stage.named_parameters()), quorum.world.rank
        self._shares = [
            _Share(number, segment, tuple(own[name] for name in segment.names))
            for number, segment in enumerate(segments)
            if here in segment.holders
        ]

    def begin(self) -> None:
        """All clusters take the first one's weights."""
        for share in self._shares:
            group = self._group(share, range(len(self.quorum.clusters)))
            flat = _flat(share.parameters)
            call = group.call("control", fragment=share.number)
            group.start(broadcast(call, flat), "control", nbytes=2 * flat.nbytes).wait()
            _put(flat, share.parameters)

    def average(self, step: int, samples: int) -> list[int]:
        """Replace the weights by their mean over the clusters that are whole, whose numbers are returned. All nodes
        ask together, nothing is in flight. step: updates so far, the same everywhere; samples: that this node's cluster
        has trained on since the last time.

        DeadlinePassed, Diverged or Refused, naming the worker, where another one is late, elsewhere or sends what
        cannot be.
        """
        tensors = [self._tensors(share) for share in self._shares]
        buffers = self.quorum.together(lambda number: self._attempt(tensors, number, step, samples))
        means = [buffer[:-1] / buffer[-1] if self._by_samples else buffer for buffer in buffers]
        for vector, own in zip(means, tensors, strict=True):
            _put(vector, own)
        return self.quorum.whole

    def _attempt(
        self, tensors: Sequence[Sequence[Tensor]], number: int, step: int, samples: int
    ) -> Attempt[list[Tensor]]:
        clusters = self.quorum.whole
        buffers, protocols = [], []
        for share, own in zip(self._shares, tensors, strict=True):
            group, buffer = self._group(share, clusters), self._weighed(_flat(own), samples)
            if not buffer.isfinite().all():
                told = "its weights are not finite: lower the learning rate (inner.lr)"
                raise WorkerFailed(self.quorum.world.transport.rank, told)
            call = group.call("outer", round=number, fragment=share.number)
            protocols.append(mean(call, buffer, codec("none"), Stamp(step=step)))
            buffers.append(buffer)
        return Attempt(buffers, protocols, 2 * sum(buffer.nbytes for buffer in buffers))

    def _weighed(self, flat: Tensor, samples: int) -> Tensor:
        if not self._by_samples:
            return flat
        return torch.cat([flat * samples, flat.new_tensor([samples])])

    def _group(self, share: _Share, clusters: Sequence[int]) -> Group:
        return self.quorum.world.among([share.segment.holders[cluster] for cluster in clusters], "outer")

    def _tensors(self, share: _Share) -> list[Tensor]:
        """Parameters, and what the optimizer keeps of them in their shape."""
        kept = [] if self._optimizer is None else [self._optimizer.state.get(p, {}) for p in share.parameters]
        states = [
            value
            for parameter, state in zip(share.parameters, kept, strict=False)
            for value in state.values()
            if isinstance(value, Tensor) and value.shape == parameter.shape
        ]
        return [*share.parameters, *states]


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().reshape(-1).cpu() for tensor in tensors])


@torch.no_grad()
def _put(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(part.view(tensor.shape))
