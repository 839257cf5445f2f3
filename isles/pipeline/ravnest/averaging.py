"""Averages over clusters that are cut at different blocks, all segments in parallel (Ravnest's parallel rings).

Segments are the common refinement of the clusters' cuts. Parameters that the same nodes hold are one segment, with
exactly one holder in each cluster:

    cluster 0     | a b c | d e f |           holders of a, b: (0, 2, 5)       of d: (1, 3, 5)
    cluster 1     | a b | c d e | f |                       c: (0, 3, 5)         e: (1, 3, 5)     f: (1, 4, 5)
    cluster 2     | a b c d e f |

    w <- mean_c w_c            equal, or by the samples of each: mean_c (n_c w_c) / mean_c n_c

Bytes sent per node and average: 2 (C - 1) / C times those that it holds, for C clusters, and a header for each segment
and cluster: a ring's volume, by the two-shot mean (`isles.comm.collectives.mean`), which gives all the same bits.

A cluster that is complete again loads the others' weights and optimizer state: each node gets its segments from their
holders in an intact cluster.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from isles.comm.codecs import codec
from isles.comm.collectives.basic import Stamp, broadcast
from isles.comm.collectives.mean import mean
from isles.comm.errors import Refused, WorkerFailed
from isles.comm.group import Group
from isles.comm.tags import MAX_FRAGMENTS
from isles.pipeline.ravnest.agreement import Attempt, ClusterAgreement


@dataclass(frozen=True, slots=True)
class SharedSegment:
    """holders: one node of each cluster, in the order of the clusters. names: of parameters, in the model's order."""

    holders: tuple[int, ...]
    names: tuple[str, ...]


def refinement(clusters: Sequence[Mapping[int, Sequence[str]]]) -> list[SharedSegment]:
    """The segments, ordered by their holders. clusters: for each, the parameter names of every node. ValueError if a
    cluster holds a parameter twice, or other parameters than the first one.
    """
    order = [name for names in clusters[0].values() for name in names]
    homes = [_homes(number, cluster) for number, cluster in enumerate(clusters)]
    for number, own in enumerate(homes):
        odd = own.keys() ^ homes[0].keys()
        if odd:
            raise ValueError(f"cluster {number} and cluster 0 do not hold the same parameters: {min(odd)!r} is in one")
    found: dict[tuple[int, ...], list[str]] = {}
    for name in order:
        found.setdefault(tuple(own[name] for own in homes), []).append(name)
    return [SharedSegment(holders, tuple(names)) for holders, names in sorted(found.items())]


def _homes(number: int, cluster: Mapping[int, Sequence[str]]) -> dict[str, int]:
    homes: dict[str, int] = {}
    for node, names in cluster.items():
        for name in names:
            if name in homes:
                raise ValueError(f"cluster {number} holds {name!r} at nodes {homes[name]} and {node}: name one holder")
            homes[name] = node
    return homes


@dataclass(frozen=True, slots=True)
class _Share:
    """This node's parameters of one segment. number: index of the segment in the model."""

    number: int
    segment: SharedSegment
    parameters: tuple[nn.Parameter, ...]


class ClusterAverage:
    """One node's part in the averages. segments: of the whole model; holders are stages, one of each cluster.
    by_samples: weight clusters by the samples they trained on. with_state: average the optimizer state too.
    """

    def __init__(
        self,
        agreement: ClusterAgreement,
        segments: Sequence[SharedSegment],
        *,
        by_samples: bool = False,
        with_state: bool = False,
    ) -> None:
        self.agreement = agreement
        self.recut(segments)
        self._by_samples, self._with_state = by_samples, with_state
        self._optimizer: Optimizer | None = None

    def recut(self, segments: Sequence[SharedSegment]) -> None:
        """Set the segments of the current clusters. Nodes that hold a stage call `serve` again."""
        if len(segments) > MAX_FRAGMENTS:
            raise ValueError(f"{len(segments)} segments: {MAX_FRAGMENTS} at most; cut fewer clusters differently")
        self._segments = list(enumerate(segments))
        self._shares = []

    def serve(self, stage: nn.Module, optimizer: Optimizer) -> None:
        """Set the `stage` that this node holds, by its current assignment or an open handover. Its parameters have
        their names in the whole model.
        """
        assignment, rank = self.agreement.assignment, self.agreement.world.rank
        coordinates = assignment.coordinates_of(
            next((taker for source, taker in assignment.handovers if source == rank), rank)
        )
        assert coordinates is not None
        cluster, here = coordinates
        own = dict(stage.named_parameters())
        self._optimizer = optimizer
        self._shares = [
            _Share(number, segment, tuple(own[name] for name in segment.names))
            for number, segment in self._segments
            if segment.holders[cluster] == here
        ]

    def begin(self) -> None:
        """Copy the first cluster's weights to all clusters. Standby nodes do nothing."""
        for share in self._shares:
            group = self._among(self.agreement.world, share, range(len(self.agreement.assignment.clusters)))
            flat = _flat(share.parameters)
            call = group.call("control", fragment=share.number)
            group.start(broadcast(call, flat), "control", nbytes=2 * flat.nbytes).wait()
            _put(flat, share.parameters)

    def average(self, step: int, samples: int) -> list[int]:
        """Replace the weights by their mean over the intact clusters; returns these clusters' indices. All nodes call
        it together, with nothing in flight. step: updates so far, the same at all; samples: that this node's cluster
        has trained on since the last average.

        DeadlinePassed, Diverged or Refused, naming the worker, if another one is late, at another step, or sends
        invalid values.
        """
        tensors = [self._tensors(share, self._with_state) for share in self._shares]
        buffers = self.agreement.together(lambda: self._mean(tensors, step, samples))
        for buffer, own in zip(buffers, tensors, strict=bool(buffers)):
            _put(buffer[:-1] / buffer[-1] if self._by_samples else buffer, own)
        return self.agreement.assignment.whole

    def load(self, step: int) -> None:
        """Load the others' weights, optimizer state and `step` at the nodes of completed clusters, and those of leaving
        nodes at their successors. All nodes call it together, the receivers after `serve`. Refused, naming the source,
        for weights that are not finite.
        """
        tensors = {share.number: self._tensors(share, True) for share in self._shares}
        found, joined = self.agreement.together(lambda: self._transfer_state(tensors))
        for number, (source, flat) in found.items():
            if not flat.isfinite().all():
                raise Refused(self.agreement.world.ranks[source], "weights that are not finite")
            _put(flat, tensors[number])
        if found and self._optimizer is not None:
            for state in self._optimizer.state.values():
                for value in state.values():
                    if isinstance(value, Tensor) and not value.ndim:
                        value.fill_(step)
        self.agreement.join(joined)

    def _mean(self, tensors: Sequence[Sequence[Tensor]], step: int, samples: int) -> Attempt[list[Tensor]]:
        clusters = self.agreement.assignment.whole
        buffers, protocols = [], []
        for share, own in zip(self._shares, tensors, strict=True) if self.agreement.trains else ():
            buffer = self._weighed(_flat(own), samples)
            if not buffer.isfinite().all():
                reason = "its weights are not finite: lower the learning rate (inner.lr)"
                raise WorkerFailed(self.agreement.world.transport.rank, reason)
            call = self._among(self.agreement.messages, share, clusters).call(fragment=share.number, round=0)
            protocols.append(mean(call, buffer, codec("none"), Stamp(step=step)))
            buffers.append(buffer)
        return Attempt(buffers, protocols, 2 * sum(buffer.nbytes for buffer in buffers))

    def _transfer_state(
        self, tensors: dict[int, list[Tensor]]
    ) -> Attempt[tuple[dict[int, tuple[int, Tensor]], list[int]]]:
        """The state transfers of this node: (source, received tensor) by segment, and the clusters that rejoin."""
        messages, joined = self.agreement.messages, self.agreement.assignment.complete
        found: dict[int, tuple[int, Tensor]] = {}
        protocols, nbytes = [], 0
        for fragment, source, takers in self._planned_transfers(joined):
            if takers and messages.rank in (source, *takers):
                flat = _flat(tensors[fragment])
                call = messages.among([source, *takers]).call(fragment=fragment, round=0)
                protocols.append(broadcast(call, flat))
                nbytes += 2 * flat.nbytes
                if messages.rank != source:
                    found[fragment] = source, flat
        return Attempt((found, joined), protocols, nbytes)

    def _planned_transfers(self, joined: Sequence[int]) -> Iterator[tuple[int, int, list[int]]]:
        """(segment, source, receivers): from the first intact cluster to `joined`, from leaving nodes to successors."""
        assignment = self.agreement.assignment
        first, successors = assignment.whole[0], dict(assignment.handovers)
        for fragment, segment in self._segments:
            takers = [assignment.clusters[cluster][segment.holders[cluster]] for cluster in joined]
            sources = {assignment.holder(first, segment.holders[first]): takers}
            for cluster in assignment.whole:
                source = assignment.holder(cluster, segment.holders[cluster])
                if source in successors:
                    sources[source] = [*sources.get(source, ()), successors[source]]
            for source, own in sources.items():
                yield fragment, source, own

    def _weighed(self, flat: Tensor, samples: int) -> Tensor:
        if not self._by_samples:
            return flat
        return torch.cat([flat * samples, flat.new_tensor([samples])])

    def _among(self, world: Group, share: _Share, clusters: Sequence[int]) -> Group:
        assignment = self.agreement.assignment.clusters
        return world.among([assignment[one][share.segment.holders[one]] for one in clusters], "outer")

    def _tensors(self, share: _Share, with_state: bool) -> list[Tensor]:
        """Parameters, and their optimizer state tensors of the same shape."""
        retained = self._optimizer.state if with_state and self._optimizer is not None else {}
        states = [
            value
            for parameter in share.parameters
            for value in retained.get(parameter, {}).values()
            if isinstance(value, Tensor) and value.shape == parameter.shape
        ]
        return [*share.parameters, *states]


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().reshape(-1).cpu() for tensor in tensors])


@torch.no_grad()
def _put(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(part.view(tensor.shape))
