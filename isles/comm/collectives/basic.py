"""Collectives as generators over a `Call`, which yield the works that they wait for; and the headers that travel beside
the data of every exchange, so that a diverged member is noticed in the same round trip.

Receives are posted before sends: in the other order gloo halves the rate of a pair exchange.

`gather_ragged` is an all-gather of messages of unknown lengths. Every member's length travels in its header and its
message right behind it, so no extra round trip is needed; an empty message is not sent. Bytes sent: (size - 1) x (40 +
the message's).

A header is 32 bytes, little-endian; with a note, a number of the protocol's own, 40:

    bits   40      24                     32      32     64     64               64
           magic   digest of the form     round   view   step   anchor's hash    note
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from zlib import crc32

import torch
from torch import Tensor

from isles.comm.call import Call
from isles.comm.errors import Diverged, Elsewhere, Malformed
from isles.comm.transport import AnyOf, Steps, Work
from isles.network.exchange_plan import FEW, fed, fed_by

HEADER_BYTES = 32
NOTE_BYTES = 8
_PLAIN, _NOTED = struct.Struct("<QiIqq"), struct.Struct("<QiIqqq")
_MAGIC, _BROKEN = 0x49534C4553, 0x49534C4573  # "ISLES", "ISLEs"
_MAGIC_BITS = 40
_PART = (1 << 21) - 1


@dataclass(frozen=True, slots=True)
class Stamp:
    """The state of a member: its inner step and the 64-bit hash of its anchor, or of what else must be equal (0: not
    compared). broken: its share must not be used. parts: names of what the digest is `packed` from, for the error; ():
    an anchor.
    """

    step: int
    digest: int = 0
    broken: bool = False
    parts: tuple[str, ...] = ()

    def apart(self, theirs: int) -> str:
        """The text for another member's differing digest."""
        if not self.parts:
            return f"anchor hash {theirs:#x} against {self.digest:#x} here; weights or states of other runs were loaded"
        return " and ".join(
            part for index, part in enumerate(self.parts) if (theirs ^ self.digest) >> 21 * index & _PART
        )


def packed(*numbers: int) -> int:
    """A digest of 21 bits of each of up to three hashes."""
    return sum((number & _PART) << 21 * index for index, number in enumerate(numbers))


def form_digest(*what: object) -> int:
    """24 bits that differ if members are about to exchange different things: lengths, codecs, parts of a round."""
    return crc32(repr(what).encode()) & 0xFFFFFF


class Headers:
    """The stamps of all members, exchanged beside the data. form: see `form_digest`. note: a number for the others;
    either all members give one, or none.
    """

    def __init__(self, call: Call, stamp: Stamp, phase: int, form: int = 0, note: int | None = None) -> None:
        self.group, self.stamp, self.form = call.group, stamp, form
        self.round = -1 if call.round is None else call.round
        self._layout = _PLAIN if note is None else _NOTED
        magic = form << _MAGIC_BITS | (_BROKEN if stamp.broken else _MAGIC)
        notes = [] if note is None else [note]
        packed_header = self._layout.pack(magic, self.round, self.group.view, stamp.step, stamp.digest, *notes)
        mine = torch.frombuffer(bytearray(packed_header), dtype=torch.uint8)
        self._theirs = torch.zeros(self.group.size, len(packed_header), dtype=torch.uint8, device="cpu")
        rows = self._theirs.unbind()
        self.works: list[Work] = [call.recv(position, rows[position], phase) for position in self.group.others]
        self.works += [call.send(position, mine, phase) for position in self.group.others]

    def compare(self) -> Steps[tuple[int, ...]]:
        """Wait for the headers. Returns the positions with a usable share, ascending. Raises Elsewhere or Diverged for
        the first member that differs.
        """
        yield self.works
        usable = [] if self.stamp.broken else [self.group.rank]
        received = list(self._layout.iter_unpack(self._theirs.numpy().tobytes()))
        for position in self.group.others:
            tagged_magic, round, view, step, digest, *_ = received[position]
            magic, form = tagged_magic & (1 << _MAGIC_BITS) - 1, tagged_magic >> _MAGIC_BITS
            peer, here = self.group.ranks[position], self.stamp
            if magic not in (_MAGIC, _BROKEN):
                raise Diverged(peer, here.step, "it speaks another version of the protocol")
            if view != self.group.view:
                raise Elsewhere(peer, view, self.group.view)
            if (round, step) != (self.round, here.step):
                raise Diverged(
                    peer, here.step, f"it is at step {step}, round {round}; this worker at round {self.round}"
                )
            if form != self.form:
                raise Diverged(peer, here.step, "it exchanges something else: another length, codec or part")
            if digest != here.digest:
                raise Diverged(peer, here.step, here.apart(digest) or "it compares something else")
            if magic == _MAGIC:
                usable.append(position)
        return tuple(sorted(usable))

    def note(self, position: int) -> int:
        """Another member's note; after `compare`."""
        return self._layout.unpack(self._theirs[position].numpy().tobytes())[-1]


def all_gather(call: Call, data: Tensor) -> Steps[list[Tensor]]:
    """Every member's `data`, in group order. Bytes sent: (size - 1) * bytes of data; messages: size - 1 in small
    groups, with one latency, else log2(size), with as many latencies.
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
    gathered = data.new_empty((size, *data.shape))  # starting with this member's, cyclically
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
    """outgoing[p] to position p, incoming[p] from position p; contiguous tensors, whose sizes may differ by pair. Empty
    ones are not sent.
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
    call.meet(*([feeder] if index else []), *targets)  # later targets too: they must get the call's number now
    if index:
        yield call.recv(feeder, data)
    yield [call.send(position, data) for position in targets]


def all_done(works: Sequence[Work]) -> Steps[None]:
    """Wait for messages that the caller has posted before."""
    yield works


def any_done(works: Sequence[Work]) -> Steps[None]:
    """Wait for the first of them."""
    yield AnyOf(works)


_HEADER, _BODY = 0, 1  # phases


def ragged_bytes(nbytes: int, size: int) -> int:
    """Bytes that a member with a message of `nbytes` hands to the transport in a group of `size`."""
    return (size - 1) * (HEADER_BYTES + NOTE_BYTES + nbytes)


def gather_ragged(call: Call, wire: Tensor, stamp: Stamp, most: int) -> Steps[dict[int, Tensor]]:
    """The `wire` (flat uint8) of every member whose stamp is not `broken`, by position in ascending order. most: the
    most bytes of a message. Raises Diverged if a member's stamp differs, Malformed if a longer message is announced.
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
