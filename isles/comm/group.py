"""A group: an ordered set of ranks over a transport. Creating a group sends nothing.

Positions inside a group are 0..size-1; only the group knows ranks. `among(positions)` selects a pair, a stage column,
an island or the survivors. Collectives come in two forms: the generators of `collectives` (`start` runs them behind the
computation), and the blocking methods here, which start the same generators and wait. `same_text` and `odd_one` compare
values of all members and name the member that differs.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from isles.base.modes import own_modes
from isles.comm.call import Call, Members
from isles.comm.codecs.base import Codec
from isles.comm.collectives import basic as collectives
from isles.comm.collectives.basic import Stamp
from isles.comm.collectives.mean import mean
from isles.comm.errors import DeadlinePassed, Diverged, PeerLost
from isles.comm.tags import Channel
from isles.comm.transport import Steps, Transfer


class Group(Members):
    """The `ranks` of `transport`, in this order. channel: default channel of its collectives."""

    def among(self, positions: Sequence[int], channel: Channel | None = None) -> Group:
        """The group of the members at `positions`, in that order. Must include this worker. Sends nothing."""
        ranks = tuple(self.ranks[position] for position in positions)
        return Group(self.transport, ranks, channel or self.channel, self.deadlines, self.ledger, self.view)

    def call(
        self,
        channel: Channel | None = None,
        round: int | None = None,
        fragment: int = 0,
        leeway: float = 1.0,
        attempt: int = 0,
    ) -> Call:
        """The address of one operation, for the generators of `collectives` and `mean`."""
        return Call(self, channel or self.channel, round, fragment, leeway, attempt)

    def start(
        self, protocol: Steps[Any], channel: Channel | None = None, deadline: float | None = None, nbytes: int = 0
    ) -> Transfer[Any]:
        """Run a generator behind the computation. deadline: seconds; default: the channel's, for `nbytes` to send."""
        channel = channel or self.channel
        seconds = self.deadlines.of(channel, nbytes) if deadline is None else deadline
        with own_modes():  # the generator's first steps run in this thread
            return self.transport.run(protocol, channel, seconds)

    # The blocking methods. Default channel: control, so that they never collide with a transfer in progress.

    def mean(
        self,
        buffer: Tensor,
        codec: Codec,
        channel: Channel = "control",
        stamp: Stamp | None = None,
        robust: str = "none",
    ) -> None:
        """Replace flat `buffer` (n,) by its mean over the group, with the same bits on every member. robust: as in
        `isles.comm.collectives.mean`.
        """
        work = mean(self.call(channel), buffer, codec, stamp, robust=robust)
        self.start(work, channel, nbytes=2 * buffer.nbytes).wait()

    def all_gather(self, data: Tensor, channel: Channel = "control") -> list[Tensor]:
        """Every member's `data` (same shape everywhere) in group order."""
        return self.start(collectives.all_gather(self.call(channel), data), channel).wait()

    def all_to_all(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor], channel: Channel = "control") -> None:
        """Send outgoing[p] to position p, and fill incoming[p] from position p. This worker's own entry is copied."""
        self.start(collectives.all_to_all(self.call(channel), outgoing, incoming), channel).wait()

    def exchange(self, position: int, data: Tensor, channel: Channel = "control") -> Tensor:
        """Exchange `data` (same shape on both sides) with one member, and return the member's data."""
        return self.start(collectives.exchange(self.call(channel), position, data), channel).wait()

    def broadcast(self, data: Tensor, source: int = 0, channel: Channel = "control") -> None:
        """Overwrite contiguous `data` with that of position `source`."""
        self.start(collectives.broadcast(self.call(channel), data, source), channel, nbytes=2 * data.nbytes).wait()

    def barrier(self) -> None:
        """Return once every member has called this."""
        self.all_gather(torch.zeros(1, dtype=torch.uint8, device="cpu"))

    def answering(self, channel: Channel = "control") -> Group:
        """The group after losses: this worker and the members that answer within the deadline, in group order. All
        remaining members must call this together. A member that calls after the deadline finds no group.
        """
        token = torch.zeros(1, dtype=torch.uint8, device="cpu")
        calls = {
            position: self.start(collectives.exchange(self.call(channel), position, token), channel)
            for position in self.others
        }
        return self.among(
            [position for position in range(self.size) if position not in calls or _answers(calls[position])]
        )


def _answers(exchange: Transfer[Tensor]) -> bool:
    try:
        exchange.wait()
    except (PeerLost, DeadlinePassed):
        return False
    return True


_H = TypeVar("_H", bound=Hashable)


def same_text(group: Group, text: str, detail: str, step: int = 0) -> None:
    """Raise Diverged with `detail`, naming the worker that differs, unless `text` is the same on all members."""
    odd, _ = odd_one([int(theirs) for theirs in group.all_gather(numbers(hashed(text)))])
    if odd is not None:
        raise Diverged(group.ranks[odd], step, detail)


def hashed(text: str) -> int:
    """A 64-bit hash of `text`."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little", signed=True)


def odd_one(values: Sequence[_H]) -> tuple[int | None, int]:
    """Compare all members' values: (the first position that differs from the most common value, or None; the first
    position that has the most common value). All members thus name the same one; of two, the first counts as right.
    """
    usual = Counter(values).most_common(1)[0][0]
    return next((position for position, theirs in enumerate(values) if theirs != usual), None), values.index(usual)


def numbers(*values: int) -> Tensor:
    """The values as int64 (n,) on the CPU, whatever the user's default dtype and device are."""
    return torch.tensor(values, dtype=torch.int64, device="cpu")
