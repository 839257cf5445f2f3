"""Collectives as generators over a `Call`: each yields the works it waits for.

Receives are posted before sends: gloo halves a pair exchange done in the other order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from isles.comm.codecs.base import as_bytes
from isles.comm.tags import Tag
from isles.comm.transport import Steps

if TYPE_CHECKING:
    from isles.comm.group import Call, Group

_MAIL_LENGTH, _MAIL_BODY = 1, 2  # phases of round -1, which no numbered control message uses
_MAIL_ROUND = -1


def all_gather(call: Call, data: Tensor) -> Steps[list[Tensor]]:
    """Every member's `data`, in group order; own entry is `data` itself. Bytes sent: (size - 1) * bytes of data."""
    data = data.contiguous()
    gathered = [data if position == call.group.rank else torch.empty_like(data) for position in range(call.group.size)]
    works = [call.recv(position, gathered[position]) for position in call.group.others]
    works += [call.send(position, data) for position in call.group.others]
    yield works
    return gathered


def all_to_all(call: Call, outgoing: Sequence[Tensor], incoming: Sequence[Tensor]) -> Steps[None]:
    """outgoing[p] to position p, incoming[p] from position p; contiguous tensors, sizes may differ from pair to
    pair.
    """
    works = [call.recv(position, incoming[position]) for position in call.group.others]
    works += [call.send(position, outgoing[position]) for position in call.group.others]
    incoming[call.group.rank].copy_(outgoing[call.group.rank])
    yield works


def exchange(call: Call, position: int, data: Tensor) -> Steps[Tensor]:
    """Swap `data` with one member."""
    data = data.contiguous()
    theirs = torch.empty_like(data)
    yield [call.recv(position, theirs), call.send(position, data)]
    return theirs


def broadcast(call: Call, data: Tensor, source: int = 0) -> Steps[None]:
    """Contiguous `data` of position `source` to everyone, along a binomial tree: log2(size) latencies."""
    size = call.group.size
    place = (call.group.rank - source) % size  # 0 is the source
    reach = 1
    while reach < size:
        if reach <= place < 2 * reach:
            yield call.recv((place - reach + source) % size, data)
        reach *= 2
    # A member that got the data when `first` members had it feeds place + first, place + 2 * first, ...
    step = 1
    while step <= place:
        step *= 2
    works = []
    while place + step < size:
        works.append(call.send((place + step + source) % size, data))
        step *= 2
    yield works


def post(group: Group, position: int, payload: bytes, topic: int) -> Steps[None]:
    """Send the length, then the payload, under `topic`."""
    peer = group.ranks[position]
    length = as_bytes(torch.tensor([len(payload)]))
    body = torch.frombuffer(bytearray(payload), dtype=torch.uint8) if payload else torch.empty(0, dtype=torch.uint8)
    works = []
    for phase, data in ((_MAIL_LENGTH, length), (_MAIL_BODY, body)):
        group.traffic.sent("control", data.numel())
        works.append(group.transport.send(peer, data, Tag("control", _MAIL_ROUND, topic, phase)))
    yield works


def receive(group: Group, position: int | None, topic: int) -> Steps[tuple[int, bytes]]:
    """The next message under `topic`: its length from whoever comes first, then its body from the same sender."""
    length = torch.zeros(1, dtype=torch.int64)
    peer = None if position is None else group.ranks[position]
    work = group.transport.recv(peer, as_bytes(length), Tag("control", _MAIL_ROUND, topic, _MAIL_LENGTH))
    yield work
    sender = work.peer
    assert sender is not None
    body = torch.empty(int(length), dtype=torch.uint8)
    yield group.transport.recv(sender, body, Tag("control", _MAIL_ROUND, topic, _MAIL_BODY))
    group.traffic.received("control", 8)
    group.traffic.received("control", body.numel())
    return group.ranks.index(sender), body.numpy().tobytes()
