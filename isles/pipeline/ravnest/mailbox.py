"""What one neighbour sends, one message after another: `[number, flag | body]`.

A mailbox has one receive posted at most. The flag `LAST` says that nothing comes after this microbatch until the
cluster has drained: Ravnest's FLUSH, which rides with the last message here, down and back up. `BROKEN` says that
nothing comes at all, for a node of the cluster is lost.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from isles.comm.errors import Malformed, PeerLost
from isles.comm.group import Group
from isles.comm.transport import Work
from isles.network.routing.routes import Task
from isles.pipeline.wire import phase

HEADER = 16  # bytes: two int64
MORE, LAST, BROKEN = range(3)


@dataclass(frozen=True, slots=True)
class StageMessage:
    """One message. number: of its microbatch in the run. is_last: nothing follows until the cluster has drained. body:
    as `StageForm.pack` and `pack_back` make it.
    """

    number: int
    is_last: bool
    body: Tensor


def pack_message(number: int, flag: int, body: Tensor) -> Tensor:
    """The bytes of a message, (16 + n,) uint8. flag: `MORE`, `LAST` or `BROKEN`."""
    wire = torch.empty(HEADER + body.numel(), dtype=torch.uint8, device="cpu")
    wire[:HEADER] = torch.tensor([number, flag], dtype=torch.int64, device="cpu").view(torch.uint8)
    wire[HEADER:] = body
    return wire


class Mailbox:
    """Messages from position `source` of a cluster, one awaited at a time. task: of the kind and hop that begins with
    such a message. nbytes: of a body.
    """

    def __init__(self, group: Group, source: int, task: Task, nbytes: int) -> None:
        self._group, self._source, self._task = group, source, task
        self._length = HEADER + nbytes
        self._posted: tuple[int, Work, Tensor] | None = None

    @property
    def work(self) -> Work | None:
        """The receive that is posted; None where there is none."""
        return None if self._posted is None else self._posted[1]

    @property
    def nbytes(self) -> int:
        """Bytes of a whole message."""
        return self._length

    def expect(self, number: int) -> None:
        """Take the message about microbatch `number` of the run when it comes, unless another one is awaited."""
        if self._posted is None:
            buffer = torch.empty(self._length, dtype=torch.uint8, device="cpu")
            call = self._group.call("pipeline", round=number)
            self._posted = number, call.recv(self._source, buffer, phase(self._task)), buffer

    def is_here(self) -> bool:
        """Whether a message can be taken."""
        return self._posted is not None and self._posted[1].done()

    def take(self) -> StageMessage:
        """The message that is here. What it failed with is raised; PeerLost where the neighbour says that somebody is;
        Malformed, naming the neighbour, where it is about something else.
        """
        assert self._posted is not None
        expected, work, wire = self._posted
        self._posted = None
        if work.error is not None:
            raise work.error
        number, flag = wire[:HEADER].view(torch.int64).tolist()
        rank = self._group.ranks[self._source]
        if number != expected or flag not in (MORE, LAST, BROKEN):
            raise Malformed(rank, f"microbatch {number}, flag {flag}, where microbatch {expected} was due")
        if flag == BROKEN:
            raise PeerLost(-1, f"of this cluster, as worker {rank} says")
        return StageMessage(number, flag == LAST, wire[HEADER:])
