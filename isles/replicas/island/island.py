"""What one worker owns of a replica that an island of several workers trains together.

    isles.DiLoCo(model, isles.DDP(model, AdamW(model.parameters()), world.inner), world.outer, sync_every=50)

Inside the island a method at gradient level (DDP, FSDP, DCT-DP) makes the workers one replica; across islands an outer
method exchanges parameters. Every worker of an island owns a share of each parameter, and exchanges, anchors and
outer momenta are of its shares alone: an island sends each entry once, so a worker of an island of R sends 1/R.

    Alone     no island: the shares are the parameters
    Copies    every worker holds the whole replica (DDP): its shares are rows of it; what lands on them is `spread`
    Shards    every worker holds its shares only (FSDP)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from isles.comm.collectives import basic as collectives
from isles.comm.group import Group
from isles.comm.tags import MAX_FRAGMENTS, Channel
from isles.replicas.island.sharded import own_rows

_FRAGMENT = MAX_FRAGMENTS - 1  # of the island's messages; the buckets of its gradients have lower ones


class Island(ABC):
    """`shares`: of each trainable parameter, in their order, what this worker owns: views of live memory, of 0 entries
    where there are fewer rows than workers.
    """

    shares: list[Tensor]

    @abstractmethod
    def largest(self, number: int) -> int:
        """Of the numbers that the workers of the island give: for what depends on a worker's shares and must be the
        same for all of the island. Bytes sent: 8 times the others.
        """

    def own(self, tensor: Tensor) -> Tensor:
        """What this worker holds of a parameter, live."""
        return tensor

    @abstractmethod
    def spread(self, indexes: Sequence[int], channel: Channel = "inner") -> None:
        """The shares of the parameters `indexes` have changed on all workers of the island: make it whole again."""

    @abstractmethod
    def spread_bytes(self, indexes: Sequence[int]) -> int:
        """Bytes that this worker sends for `spread`."""

    @property
    def working_bytes(self) -> int:
        """Memory that `spread` of everything takes on the host."""
        return 0


class Alone(Island):
    """A replica of one worker."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self.shares = [self.own(parameter) for parameter in parameters]

    def largest(self, number: int) -> int:
        """The number itself."""
        return number

    def spread(self, indexes: Sequence[int], channel: Channel = "inner") -> None:
        """Nothing to do."""

    def spread_bytes(self, indexes: Sequence[int]) -> int:
        """None."""
        return 0


class Shards(Alone):
    """The other workers of the island hold nothing of what this one owns."""

    def __init__(self, parameters: Sequence[Tensor], group: Group) -> None:
        super().__init__(parameters)
        self._group = group

    def own(self, tensor: Tensor) -> Tensor:
        """Its own rows."""
        return own_rows(tensor)

    def largest(self, number: int) -> int:
        """See Island.largest."""
        return _largest(self._group, number)


class Copies(Island):
    """Worker i of R owns the i-th of R nearly equal runs of rows of every parameter."""

    def __init__(self, parameters: Sequence[Tensor], group: Group) -> None:
        self._parameters, self._group = list(parameters), group
        self._rows = [_rows(parameter.detach(), group.size) for parameter in parameters]
        self.shares = [rows[group.rank] for rows in self._rows]
        self._spread = 0

    def largest(self, number: int) -> int:
        """See Island.largest."""
        return _largest(self._group, number)

    def spread(self, indexes: Sequence[int], channel: Channel = "inner") -> None:
        """Everyone's shares to everyone. Bytes sent: (R - 1) times the own ones; one latency."""
        group = self._group
        for index in indexes:
            if _memory(self._rows[index][0]) != _memory(self._parameters[index]):
                raise ValueError("the model was moved after its optimizer was made: move it before")
        if group.size == 1 or not indexes:
            return
        own = _flat([self.shares[index] for index in indexes])
        sizes = [sum(self._rows[index][position].nbytes for index in indexes) for position in range(group.size)]
        call = group.call(channel, round=self._spread, fragment=_FRAGMENT)
        self._spread += 1
        theirs = [
            own if position == group.rank else torch.empty(nbytes, dtype=torch.uint8)
            for position, nbytes in enumerate(sizes)
        ]
        group.start(
            collectives.all_to_all(call, [own] * group.size, theirs), channel, nbytes=(group.size - 1) * own.nbytes
        ).wait()
        for position in group.others:
            rows = [self._rows[index][position] for index in indexes]
            parts = theirs[position].split([row.nbytes for row in rows])
            torch._foreach_copy_(rows, [_typed(part, row) for part, row in zip(parts, rows, strict=True)])

    def spread_bytes(self, indexes: Sequence[int]) -> int:
        """(R - 1) times the own shares."""
        return (self._group.size - 1) * sum(self.shares[index].nbytes for index in indexes)

    @property
    def working_bytes(self) -> int:
        """Everyone's shares once."""
        return sum(parameter.nbytes for parameter in self._parameters) if self._group.size > 1 else 0


def _largest(group: Group, number: int) -> int:
    return max(int(theirs) for theirs in group.all_gather(torch.tensor([number])))


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    """Their bytes in one buffer on the CPU; formats may differ."""
    return torch.cat([tensor.detach().contiguous().view(-1).view(torch.uint8).cpu() for tensor in tensors])


def _typed(part: Tensor, like: Tensor) -> Tensor:
    aligned = part if part.storage_offset() % like.itemsize == 0 else part.clone()
    return aligned.view(like.dtype).view(like.shape)


def _rows(parameter: Tensor, size: int) -> tuple[Tensor, ...]:
    return parameter.reshape(-1).tensor_split(size) if parameter.dim() == 0 else parameter.tensor_split(size)
