"""Collectives as generators over a `Call`: each yields the works it waits for.

Receives are posted before sends: gloo halves the rate of a pair exchange done in the other order.

`gather_ragged` is an all-gather of messages whose lengths only the exchange itself shows. Every member's length travels
in its header and its message right behind it, so a receiver needs no extra round trip; an empty message does not
travel. Bytes sent: (size - 1) (40 + those of the message).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from isles.comm.call import Call
from isles.comm.collectives.headers import HEADER_BYTES, NOTE_BYTES, Headers, Stamp
from isles.comm.errors import Malformed
from isles.comm.transport import AnyOf, Steps, Work
from isles.network.exchange_plan import FEW, fed, fed_by


def all_gather(call: Call, data: Tensor) -> Steps[list[Tensor]]:
    """Every member's `data`, in group order. Bytes sent: (size - 1) * bytes of data; messages: size - 1 among few, for
    one latency, else log2(size), for as many latencies.
    """
    return (_gather_directly if call.group.size <= FEW else _gather_by_doubling)(call, data.contiguous())


def _gather_directly(call: Call, data: Tensor) -> Steps[list[Tensor]]:
    gathered = [data if position == call.group.rank else torch.empty_like(data) for position in range(call.group.size)]
    works = [call.recv(position, gathered[position]) for position in call.group.others]
    works += [call.send(position, data) for position in call.group.others]
    yield works
    return gathered


def _gather_by_doubling(call: Call, data: Tensor) -> Steps[list[Tensor]]:
    """Bruck et al. (1997): after k phases each member holds its own entry and those of the next 2^k - 1."""
    size, rank = call.group.size, call.group.rank
    gathered = data.new_empty((size, *data.shape))  # in order from this member on, round to the one before it
    gathered[0] = data
    reaches = [1 << phase for phase in range((size - 1).bit_length())]
    call.meet(*dict.fromkeys((rank + way * reach) % size for reach in reaches for way in (1, -1)))
    for phase, reach in enumerate(reaches):
        count = min(reach, size - reach)
        yield [
            call.recv((rank + reach) % size, gathered[reach : reach + count], phase),
            call.send((rank - reach) % size, gathered[:count], phase),
        ]
    return [gathered[(position - rank) % size] for position in range(size)]


def all_to_all(call: Call, outgoing: Sequence[Tensor], incoming: Sequence[Tensor]) -> Steps[None]:
    """outgoing[p] to position p, incoming[p] from position p; contiguous tensors, sizes may differ from pair to
    pair. Nothing is sent where one is empty.
    """
    works = [call.recv(position, incoming[position]) for position in call.group.others if incoming[position].numel()]
    works += [call.send(position, outgoing[position]) for position in call.group.others if outgoing[position].numel()]
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
    if not 0 <= source < size:
        raise ValueError(f"source {source}: a group of {size} has positions 0 to {size - 1}")
    index = (call.group.rank - source) % size  # 0 is the source
    targets = [(other + source) % size for other in fed(index, size)]
    feeder = (fed_by(index) + source) % size if index else source
    call.meet(*([feeder] if index else []), *targets)  # those fed later too: their number is that of the start
    if index:
        yield call.recv(feeder, data)
    yield [call.send(position, data) for position in targets]


def all_done(works: Sequence[Work]) -> Steps[None]:
    """Wait for messages that the caller handed over or posted before."""
    yield works


def any_done(works: Sequence[Work]) -> Steps[None]:
    """Wait for the first of them."""
    yield AnyOf(works)


_HEADER, _BODY = 0, 1  # phases


def ragged_bytes(nbytes: int, size: int) -> int:
    """Bytes that a member with a message of `nbytes` hands to the transport in a group of `size`."""
    return (size - 1) * (HEADER_BYTES + NOTE_BYTES + nbytes)


def gather_ragged(call: Call, wire: Tensor, stamp: Stamp, most: int) -> Steps[dict[int, Tensor]]:
    """The `wire` (flat uint8) of every member whose stamp does not say `broken`, by position in ascending order. most:
    bytes that no message may exceed. Raises Diverged when a member's stamp differs,
    Malformed where more is announced.
    """
    group = call.group
    headers = Headers(call, stamp, _HEADER, note=wire.numel())
    works = [call.send(position, wire, _BODY) for position in group.others if wire.numel()]
    usable = yield from headers.compare()
    gathered = {group.rank: wire}
    for position in group.others:
        nbytes = headers.note(position)
        if not 0 <= nbytes <= most:
            raise Malformed(group.ranks[position], f"it announces {nbytes} bytes, {most} are possible")
        gathered[position] = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        if nbytes:
            works.append(call.recv(position, gathered[position], _BODY))
    if works:
        yield works
    return {position: gathered[position] for position in usable}
