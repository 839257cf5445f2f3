"""The pieces of a mean under way: alone, all-gathered or in two shots (`isles.comm.collectives.mean` says which).

What each peer sends is judged where it is decoded, block by block while it is in cache (`isles.comm.trust`).
"""

from __future__ import annotations

import contextlib
import struct
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from typing_extensions import override

from isles.comm.call import Call
from isles.comm.codecs.base import Codec
from isles.comm.errors import CommError, Malformed, Refused, sent_by
from isles.comm.transport import Steps, Work
from isles.comm.trust import BLOCK, Squares

PARTS = 4  # buffers that one round may exchange
_NAME = struct.Struct("<iI")  # of a verdict
_LEAST = 24  # bytes of a verdict that has it: a scale in front and one behind stay ones
_SECOND = 1 << 20  # kinds of payloads: more than there are phases


def cuts(elements: int, parts: int, block: int) -> list[tuple[int, int]]:
    """`elements` cut into `parts` runs of nearly equal length, each but the last a multiple of `block`."""
    share = -(-elements // (parts * block)) * block
    return [(min(part * share, elements), min((part + 1) * share, elements)) for part in range(parts)]


def _blocks(flat: Tensor) -> Sequence[Tensor]:
    """Flat (n,) in pieces that stay in cache; most shards are one."""
    return (flat,) if 0 < flat.numel() <= BLOCK else flat.split(BLOCK)


class Wires:
    """Buffers to receive into, used again by later segments: large ones made anew each time fragment the heap."""

    def __init__(self) -> None:
        self._spare: dict[int, list[Tensor]] = {}

    def take(self, nbytes: int) -> Tensor:
        """A buffer of exactly `nbytes`, its content undefined."""
        spare = self._spare.get(nbytes)
        return spare.pop() if spare else torch.empty(nbytes, dtype=torch.uint8, device="cpu")

    def give(self, wire: Tensor) -> None:
        """Take back a buffer that nothing is received into or read from any more."""
        self._spare.setdefault(wire.numel(), []).append(wire)


class MeanPart(ABC):
    """One segment under way: made when its first messages leave, finished when the mean is in place."""

    def __init__(
        self,
        call: Call,
        buffer: Tensor,
        codec: Codec,
        own: Tensor | None,
        residual: Tensor | None,
        *,
        phase: int,
        wires: Wires,
    ) -> None:
        self.call, self.buffer, self.codec, self.phase, self.wires = call, buffer, codec, phase, wires
        self.own, self.residual = own, residual
        self.works: list[Work] = []
        self.inbox: dict[int, Tensor] = {}
        self.start()

    @abstractmethod
    def start(self) -> None:
        """Post the first receives and sends."""

    @abstractmethod
    def finish(self, usable: Sequence[int]) -> Steps[None]:
        """Wait for them, do the rest. usable: the positions that the mean is of."""

    def receive(self, position: int, codec: Codec, elements: int, phase: int) -> Work:
        """Post the receive of an encoded run of `elements` entries."""
        wire = self.wires.take(codec.wire_bytes(elements, self.buffer.dtype))
        self.inbox[position] = wire
        return self.call.recv(position, wire, phase)

    def release(self) -> None:
        """Give back what was received, once it is decoded."""
        for wire in self.inbox.values():
            self.wires.give(wire)
        self.inbox.clear()

    def decode(self, wire: Tensor, elements: int) -> Tensor:
        return self.codec.decode(wire, elements, self.buffer.dtype)

    def note(self, wire: Tensor, first: int, last: int) -> None:
        """Tell `own` and `residual` what the others decode of entries [first, last)."""
        if self.own is None and self.residual is None:
            return
        decoded = self.decode(wire, last - first)
        if self.own is not None:
            self.own[first:last].copy_(decoded)
        if self.residual is not None:
            self.residual[first:last].sub_(decoded)

    def reduce(self, wire: Tensor, out: Tensor, usable: Sequence[int]) -> None:
        """Write the mean of what came from the positions `usable`, the own `wire` being one of this member's, summed in
        group order, into `out`: it may be what `wire` is a view of. Refused or Malformed for what cannot be a share.
        """
        wires = [wire if position == self.call.group.rank else self.inbox[position] for position in usable]
        if not wires:
            out.zero_()
            return
        own, looks = self.call.group.rank, {position: Squares() for position in usable}
        if own in looks:
            looks[own] = Squares(self.call.own_every(self.phase))
        if self.codec.lossless:
            self._add_up(wires, looks, out)
        else:
            self._add_decoded(wires, looks, out)
        means = {position: look.mean() for position, look in looks.items()}
        self.call.accept(self.phase, means, means.pop(own, 0.0), out.numel())

    def _add_up(self, wires: Sequence[Tensor], looks: Mapping[int, Squares], out: Tensor) -> None:
        """Views: what is received is added up where it lies, and looked at while it is in cache: in a pair once it has
        been added, for a sum fetches two vectors faster than a look fetches one.
        """
        parts = [_blocks(self.decode_of(*each, out.numel())) for each in zip(looks, wires, strict=True)]
        if len(parts) == 2 and self.call.group.rank in looks:
            return self._add_pair(parts, looks, out)
        for *blocks, room in zip(*parts, _blocks(out), strict=True):
            for look, block in zip(looks.values(), blocks, strict=True):
                look.take(block)
            total = blocks[0]
            for other in blocks[1:]:
                total.add_(other)
            torch.div(total, len(wires), out=room)

    def _add_pair(self, parts: Sequence[Sequence[Tensor]], looks: Mapping[int, Squares], out: Tensor) -> None:
        mine = list(looks).index(self.call.group.rank)
        own, theirs = looks[self.call.group.rank], list(looks.values())[1 - mine]
        for first, second, room in zip(*parts, out.split(BLOCK), strict=True):
            other = (second, first)[mine]
            own.take((first, second)[mine])  # before the sum takes its place
            torch.add(first, second, out=room)
            theirs.take(other)
            room.div_(2)

    def _add_decoded(self, wires: Sequence[Tensor], looks: Mapping[int, Squares], out: Tensor) -> None:
        room = out
        for (position, look), wire in zip(looks.items(), wires, strict=True):
            with sent_by(self.call.group.ranks[position]):
                self.codec.decode_into(wire, room)
            for block in room.split(BLOCK):
                look.take(block)
            if room is not out:
                out.add_(room)
            elif len(wires) > 1:
                room = torch.empty_like(out)
        out.div_(len(wires))

    def decode_of(self, position: int, wire: Tensor, elements: int) -> Tensor:
        """What came from `position`. Malformed, by name."""
        with sent_by(self.call.group.ranks[position]):
            return self.decode(wire, elements)


class Alone(MeanPart):
    """Nobody else is there."""

    def start(self) -> None:
        self.wire = self.codec.encode(self.buffer)

    @override
    def finish(self, usable: Sequence[int]) -> Steps[None]:
        yield self.works
        self.note(self.wire, 0, self.buffer.numel())
        if not usable:
            self.buffer.zero_()
            return
        mine = self.decode(self.wire, self.buffer.numel())  # what a lossy codec leaves of it
        if mine.data_ptr() != self.buffer.data_ptr():
            self.buffer.copy_(mine)


class AllGather(MeanPart):
    """Everyone sends everything to everyone."""

    def start(self) -> None:
        elements = self.buffer.numel()
        self.wire = self.codec.encode(self.buffer)
        for position in self.call.group.others:
            self.works.append(self.receive(position, self.codec, elements, self.phase))
        self.works += [self.call.send(position, self.wire, self.phase) for position in self.call.group.others]

    @override
    def finish(self, usable: Sequence[int]) -> Steps[None]:
        yield self.works  # the sends too: the reduction may write over what the wire is a view of
        self.note(self.wire, 0, self.buffer.numel())
        self.reduce(self.wire, self.buffer, usable)


class TwoShot(MeanPart):
    """Everyone sends shard p to position p, who sends its mean to everyone."""

    def start(self) -> None:
        group = self.call.group
        self.shards = cuts(self.buffer.numel(), group.size, self.codec.block)
        first, last = self.shards[group.rank]
        for position in group.others:
            self.works.append(self.receive(position, self.codec, last - first, self.phase))
        for position in group.others:
            self.works.append(self.call.send(position, self._encode(position), self.phase))
        self.wire = self._encode(group.rank)

    def _encode(self, position: int) -> Tensor:
        first, last = self.shards[position]
        wire = self.codec.encode(self.buffer[first:last])
        self.note(wire, first, last)
        return wire

    @override
    def finish(self, usable: Sequence[int]) -> Steps[None]:
        yield self.works
        group, back = self.call.group, self.codec.back
        first, last = self.shards[group.rank]
        shard = self.buffer[first:last]  # the others have theirs: nothing is sent from this one any more
        refused: Refused | Malformed | None = None
        try:
            self.reduce(self.wire, shard, usable)
        except (Refused, Malformed) as error:
            refused = error
        self.release()
        wire = back.encode(shard) if refused is None else verdict(group.ranks, refused.peer, self._back_bytes())
        works = []
        for position in group.others:
            start, stop = self.shards[position]
            works.append(self.receive(position, back, stop - start, self.phase + PARTS))
        sends = [self.call.send(position, wire, self.phase + PARTS) for position in group.others]
        if refused is not None:
            with contextlib.suppress(CommError):
                yield sends
            raise refused
        told = back.decode(wire, last - first, shard.dtype)
        if self.residual is not None:  # what the second encoding lost of all members' shares
            self.residual[first:last].add_(shard - told, alpha=len(usable))
        shard.copy_(told)
        yield works + sends
        for position in group.others:
            self._land(position)

    def _back_bytes(self) -> int:
        first, last = self.shards[self.call.group.rank]
        return self.codec.back.wire_bytes(last - first, self.buffer.dtype)

    def _land(self, position: int) -> None:
        """Put the shard of the mean that came from `position` in its place. It is judged beside this member's own share
        of it, which lies there.
        """
        start, stop = self.shards[position]
        back, wire, place = self.codec.back, self.inbox[position], self.buffer[start:stop]
        kind, ranks = PARTS * position + self.phase + _SECOND, self.call.group.ranks
        own, theirs = Squares(self.call.own_every(kind)), Squares()
        try:
            with sent_by(ranks[position]):
                if back.lossless:
                    given = back.decode(wire, stop - start, place.dtype)
                    for here, there in zip(_blocks(place), _blocks(given), strict=True):
                        own.take(here)
                        theirs.take(there)
                        here.copy_(there)
                else:
                    for block in place.split(BLOCK):
                        own.take(block)
                    back.decode_into(wire, place)
                    for block in place.split(BLOCK):
                        theirs.take(block)
            self.call.accept(kind, {position: theirs.mean()}, own.mean(), stop - start)
        except (Refused, Malformed):
            culprit = condemned(wire, ranks)
            if culprit is None:
                raise
            judge = ranks[position]
            raise Refused(culprit, f"so says worker {judge}, which reduces a part of it", judge) from None


def verdict(ranks: Sequence[int], culprit: int, nbytes: int) -> Tensor:
    """The wire (nbytes,) uint8 that tells whose share was refused: a rank of the group, or -1. The owner of a shard
    says it in the place of its mean, so that all end with the one error that names who sent the share.

    A wire of ones is no number in any form, so whoever reads it as a mean refuses it and looks then whether it is a
    verdict: the right way costs nothing. In its middle stands whose share it was:

        ones ... | rank, its complement (4 bytes each) | ... ones        not told in wires below 24 bytes
    """
    wire = torch.full((nbytes,), 0xFF, dtype=torch.uint8, device="cpu")
    if nbytes >= _LEAST and culprit in ranks:
        name = bytearray(_NAME.pack(culprit, ~culprit & 0xFFFFFFFF))
        begin = _middle(nbytes)
        wire[begin : begin + _NAME.size] = torch.frombuffer(name, dtype=torch.uint8)
    return wire


def condemned(wire: Tensor, ranks: Sequence[int]) -> int | None:
    """The rank that `wire` names if it is a verdict (-1: nobody of the group); else None."""
    begin, rest = _middle(wire.numel()), wire
    culprit = -1
    if wire.numel() >= _LEAST:
        named, check = _NAME.unpack(wire[begin : begin + _NAME.size].numpy().tobytes())
        if named in ranks and check == ~named & 0xFFFFFFFF:
            culprit = named
            rest = torch.cat((wire[:begin], wire[begin + _NAME.size :]))
    return culprit if bool((rest == 0xFF).all()) else None


def _middle(nbytes: int) -> int:
    return nbytes // 2 - _NAME.size // 2
