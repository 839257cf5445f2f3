"""What one worker holds of a replica that an island of several workers trains together.

    isles.DiLoCo(model, isles.DDP(model, AdamW(model.parameters()), world.inner), world.outer, sync_every=50)

Inside the island a method at gradient level (DDP, FSDP, DCT-DP) makes the workers one replica; across islands an outer
method exchanges parameters. Every worker of an island owns a share of each parameter, and exchanges, anchors and
outer momenta are of its shares alone: an island sends each entry once, so a worker of an island of R sends 1/R.

    Copies    every worker holds the whole replica (DDP): its shares are rows of it; what lands on them is sent to the
              others of the island (`SpreadRows`)
    Shards    every worker holds its shares only (FSDP)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from isles.base.modes import HostCopies, is_away, to_host
from isles.comm.collectives import basic as collectives
from isles.comm.group import Group
from isles.comm.tags import MAX_FRAGMENTS, Channel
from isles.network.exchange_plan import COMPARED, Groups, MemoryItem, PlannedExchange, Swap, by_size
from isles.replicas.flat import all_finite
from isles.replicas.island.fsdp import own_rows
from isles.replicas.replica import Holder, PeerQuestion, Replica, largest, refuse_shared, refuse_survivors, summed
from isles.replicas.sync import ReplicaSync
from isles.replicas.watch import Scaled


def spread_fragment(number: int) -> int:
    """Of the messages of list `number` of tensors: the last fragment is the island's own, the first are of buckets."""
    return MAX_FRAGMENTS - 2 - number


def planned_spreads(portions: Sequence[Sequence[int]], step: int, groups: Groups, flight: int) -> list[PlannedExchange]:
    """After inner step `step`, before the next forward pass. portions: bytes of each worker, by list of tensors."""
    return [
        PlannedExchange(
            step,
            step + 1,
            spread_fragment(number),
            "weights",
            groups,
            by_size(groups, lambda _, sizes=tuple(sizes): Swap(sizes)),
            flight,
        )
        for number, sizes in enumerate(portions)
    ]


class SpreadRows:
    """Under way from when it is made. rows[k][p]: what position p answers for of tensor k, live; formats may differ.
    Bytes sent: (R - 1) times the own rows; one latency.
    """

    def __init__(
        self, group: Group, rows: Sequence[Sequence[Tensor]], channel: Channel, *, round: int, fragment: int
    ) -> None:
        self._group, self._rows = group, rows
        own, pinned = _flat([row[group.rank] for row in rows]), is_away([row[group.rank] for row in rows])
        sizes = [sum(row[position].nbytes for row in rows) for position in range(group.size)]
        self._theirs = [
            own if position == group.rank else torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=pinned)
            for position, nbytes in enumerate(sizes)
        ]
        call = group.call(channel, round=round, fragment=fragment)
        protocol = collectives.all_to_all(call, [own] * group.size, self._theirs)
        self._transfer = group.start(protocol, channel, nbytes=(group.size - 1) * own.nbytes)

    def done(self) -> bool:
        return self._transfer.done()

    def land(self) -> None:
        """Wait for the others' rows, and write them to the tensors."""
        self._transfer.wait()
        for position in self._group.others:
            rows = [row[position] for row in self._rows]
            parts = self._theirs[position].split([row.nbytes for row in rows])
            HostCopies([_typed(part, row) for part, row in zip(parts, rows, strict=True)]).up(rows)


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    own = to_host([tensor.detach().contiguous().view(-1) for tensor in tensors])
    return torch.cat([one.view(torch.uint8) for one in own])


def _typed(part: Tensor, like: Tensor) -> Tensor:
    aligned = part if part.storage_offset() % like.itemsize == 0 else part.clone()
    return aligned.view(like.dtype).view(like.shape)


_FRAGMENT = MAX_FRAGMENTS - 1  # of the island's messages; the buckets of its gradients have lower ones


class Together(Replica):
    """The workers of an island are one replica by a method of their own, `inside`. Its whole step is `apply`: it
    reduces, unscales, clips and charges, so that the method across islands does none of that.
    """

    charged = True

    def __init__(self, inside: ReplicaSync) -> None:
        self.inside, self.model, self.inner = inside, inside.model, inside
        self.parameters = list(inside.parameters)
        self._group = inside.group

    def refuse(self, holder: Holder) -> None:
        if not holder.spans_islands:
            raise ValueError(
                f"{type(holder).__name__} takes an optimizer of one worker: across islands use an outer method, such "
                "as DiLoCo"
            )
        refuse_shared(self._group, holder.group, "give world.inner and world.outer of isles.mesh(outer=..., inner=...)")
        refuse_survivors(holder)
        if holder.max_norm is not None:
            raise ValueError("max_norm clips the island's gradient: give it to the method inside the island")
        self.inside.replica.refuse(holder)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        with self.inside.no_sync():
            yield

    def unscale(self, scaled: Scaled) -> None:
        """In the step of `inside`."""

    def apply(self, scaled: Scaled | None) -> None:
        self.inside.step(scaler=scaled)  # with its hooks

    def catch_up(self) -> None:
        self.inside.catch_up()

    def forget_moments(self) -> None:
        self.inside.replica.forget_moments()

    def total(self, own: Tensor, channel: Channel) -> Tensor:
        return self.inside.replica.total(summed(self._group, own, channel), channel)

    def largest(self, number: int) -> int:
        return self.inside.replica.largest(largest(self._group, number))

    @contextmanager
    def for_evaluation(self) -> Iterator[nn.Module]:
        with self.inside.evaluation_weights() as model:
            yield model

    def whole(self) -> nn.Module:
        return self.inside.consolidate()

    def weights(self) -> dict[str, Tensor]:
        return self.inside.weights()

    def load_weights(self, weights: dict[str, Tensor]) -> None:
        self.inside.load_weights(weights)

    def inner_state(self) -> Any:
        return self.inside.copied_state()

    def sent(self, steps: int, questions: Sequence[PeerQuestion]) -> tuple[int, bool]:
        outline = self.inside.outline(steps)
        return outline.sent[self._group.rank], outline.about

    def opening(self) -> int:
        return super().opening() + self.inside.opening()[self._group.rank]

    def memory(self) -> list[MemoryItem]:
        held = [one for one in self.inside.memory() if one.what != COMPARED]
        return held + (
            [MemoryItem("shares of the island", self.working_bytes, "exchange")] if self.working_bytes else []
        )


class Shards(Together):
    """Worker i of R holds nothing but the rows that it owns."""

    def __init__(self, inside: ReplicaSync) -> None:
        super().__init__(inside)
        self.shares = [self.own(parameter) for parameter in self.parameters]

    def own(self, tensor: Tensor) -> Tensor:
        return own_rows(tensor)


class Copies(Together):
    """Worker i of R owns the i-th of R nearly equal runs of rows of every parameter."""

    def __init__(self, inside: ReplicaSync) -> None:
        super().__init__(inside)
        self._rows = [_rows(parameter.detach(), self._group.size) for parameter in self.parameters]
        self.shares = [rows[self._group.rank] for rows in self._rows]
        self._spread = 0

    def is_sound(self) -> bool:
        """They are the same on all workers of the island, who so come to the same answer."""
        return all_finite(self.parameters)

    def spread(self, indexes: Sequence[int], channel: Channel = "inner") -> None:
        """Everyone's shares to everyone. Bytes sent: (R - 1) times the own ones; one latency."""
        group = self._group
        for index in indexes:
            if _memory(self._rows[index][0]) != _memory(self.parameters[index]):
                raise ValueError("the model was moved after its optimizer was made: move it before")
        if group.size == 1 or not indexes:
            return
        rows = [self._rows[index] for index in indexes]
        SpreadRows(group, rows, channel, round=self._spread, fragment=_FRAGMENT).land()
        self._spread += 1

    def spread_bytes(self, indexes: Sequence[int]) -> int:
        return (self._group.size - 1) * sum(self.shares[index].nbytes for index in indexes)

    @property
    def working_bytes(self) -> int:
        return sum(parameter.nbytes for parameter in self.parameters) if self._group.size > 1 else 0


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _rows(parameter: Tensor, size: int) -> tuple[Tensor, ...]:
    return parameter.reshape(-1).tensor_split(size) if parameter.dim() == 0 else parameter.tensor_split(size)
