"""The mailbox: messages of any length that a receiver may take from whoever comes first.

A message is its length (8 bytes), then its payload. A `Letter` is a message that was asked for: where its deadline
passes, its receive stays posted and the next call takes up where this one stopped, so that no message is lost.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from isles.comm.codecs.base import as_bytes
from isles.comm.tags import Tag
from isles.comm.transport import Steps, Work

if TYPE_CHECKING:
    from isles.comm.group import Group

_ROUND, _LENGTH, _BODY = -1, 254, 255  # phases that no mean uses


def post(group: Group, position: int, payload: bytes, topic: int) -> Steps[None]:
    """Send the length, then the payload, under `topic`."""
    peer = group.peer(position)
    length = as_bytes(torch.tensor([len(payload)]))
    body = torch.frombuffer(bytearray(payload), dtype=torch.uint8) if payload else torch.empty(0, dtype=torch.uint8)
    works = []
    for phase, data in ((_LENGTH, length), (_BODY, body)):
        group.traffic.sent("control", data.numel())
        works.append(group.transport.send(peer, data, Tag("control", _ROUND, topic, phase)))
    yield works


class Letter:
    """The next message under `topic`, from rank `peer` or (None) from anyone, being received.

    Its receives are posted outside of transfers: what a transfer has asked for ends with its deadline.
    """

    def __init__(self, group: Group, peer: int | None, topic: int) -> None:
        self.topic = topic
        self.length = torch.zeros(1, dtype=torch.int64)
        self.work = group.transport.recv(peer, as_bytes(self.length), Tag("control", _ROUND, topic, _LENGTH))
        self.body: torch.Tensor | None = None

    def read(self, group: Group, seconds: float) -> tuple[int, bytes]:
        """Wait for it at most `seconds`: (rank of the sender, payload)."""
        ends_at = group.transport.now() + seconds
        if self.body is None:
            group.start(_arrival(self.work), "control", seconds).wait()
            sender = self.work.peer
            assert sender is not None, "a receive from anyone names its sender when it is done"
            self.body = torch.empty(int(self.length), dtype=torch.uint8)
            self.work = group.transport.recv(sender, self.body, Tag("control", _ROUND, self.topic, _BODY))
        group.start(_arrival(self.work), "control", max(ends_at - group.transport.now(), 0.0)).wait()
        group.traffic.received("control", 8)
        group.traffic.received("control", self.body.numel())
        assert self.work.peer is not None
        return self.work.peer, self.body.numpy().tobytes()


def _arrival(work: Work) -> Steps[None]:
    yield work
