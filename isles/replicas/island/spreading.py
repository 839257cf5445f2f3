"""Shares of tensors that every worker of a group answers for, sent to all others: what each lacks of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from isles.comm.collectives import basic as collectives
from isles.comm.group import Group
from isles.comm.tags import MAX_FRAGMENTS, Channel
from isles.network.planner.planned import Groups, PlannedExchange, Swap, by_size
from isles.staging import HostCopies, is_away, to_host


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
        """Whether `land` would not wait."""
        return self._transfer.done()

    def land(self) -> None:
        """Wait for the others' rows, and write them to the tensors."""
        self._transfer.wait()
        for position in self._group.others:
            rows = [row[position] for row in self._rows]
            parts = self._theirs[position].split([row.nbytes for row in rows])
            HostCopies([_typed(part, row) for part, row in zip(parts, rows, strict=True)]).up(rows)


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    """Their bytes in one buffer on the CPU."""
    own = to_host([tensor.detach().contiguous().view(-1) for tensor in tensors])
    return torch.cat([one.view(torch.uint8) for one in own])


def _typed(part: Tensor, like: Tensor) -> Tensor:
    aligned = part if part.storage_offset() % like.itemsize == 0 else part.clone()
    return aligned.view(like.dtype).view(like.shape)
