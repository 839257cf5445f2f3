"""All-gather of messages of any length: for what finds out only in the exchange itself how much there is to say.

Every member's length travels in its header and its message right behind it, so a receiver knows what to expect without
a round trip of its own; an empty message does not travel. Bytes sent: (size - 1) (40 + those of the message).
"""

from __future__ import annotations

import torch
from torch import Tensor

from isles.comm.call import Call
from isles.comm.collectives.headers import HEADER_BYTES, NOTE_BYTES, Headers, Stamp
from isles.comm.errors import Malformed
from isles.comm.transport import Steps

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
