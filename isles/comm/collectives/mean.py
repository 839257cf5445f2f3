"""The mean of a group: the same bits on every member and on every backend.

Two-shot, with each buffer cut into one shard per member:

    scatter   everyone sends shard p to position p                       encode once
    reduce    position p decodes, sums in group order, divides
    gather    position p sends its shard of the mean to everyone         encode once more, in the form of
              `codec.back`; p uses its own decoded value too

All-gather: each sends the whole encoded buffer to each, decodes all, sums in group order and divides: one latency, one
encoding. The variant that sends fewer bytes is chosen: two-shot sends 2 (N-1)/N times the encoded buffer, a ring's
volume; all-gather N - 1 times it, which is equal for a pair, and less for sparse codes, whose sum is dense. A single
member gets its own, as decoded. One header per peer is added. Sums are taken in the buffer's dtype (float32 or
float64).

Large buffers are cut into segments that follow each other in a pipeline of two, so the memory beyond the buffer is two
segments and the reduction of one hides behind the transfer of the next.

The header (view, round, step, hash of the anchor, a digest of what is averaged) travels beside the data, so that a
diverged member is noticed in the same round trip. On gloo a message that is longer than its receive ends the process,
perhaps before its header is read. So lengths are agreed on when an optimizer is made, and in rounds with adaptive
lengths by headers that are compared before anything else.

Each peer's data is checked while it is decoded, block by block while it is in cache (`isles.comm.trust`).
"""

from __future__ import annotations

import contextlib
import struct
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor
from typing_extensions import override

from isles.comm.call import Call
from isles.comm.codecs.base import Codec
from isles.comm.collectives.basic import HEADER_BYTES, Headers, Stamp, form_digest
from isles.comm.collectives.robust import robust_mean
from isles.comm.errors import CommError, Malformed, Refused, sent_by
from isles.comm.tags import MAX_FRAGMENTS
from isles.comm.transport import Steps, Work, native_collectives
from isles.comm.trust import BLOCK, Squares
from isles.network.exchange_plan import MOST_SEGMENTS, Mean, Segment, ShardSizes
from isles.network.exchange_plan import SEGMENT as _SEGMENT

PARTS = 4  # the most buffers of one round
_NAME = struct.Struct("<iI")  # the rank in a refusal
_LEAST = 24  # the shortest wire with a rank in a refusal: a scale before and one behind it stay ones
_SECOND = 1 << 20  # offset of kinds for second payloads: more than there are phases


def cuts(elements: int, parts: int, block: int) -> list[tuple[int, int]]:
    """`elements` cut into `parts` runs of nearly equal length, each but the last a multiple of `block`."""
    share = -(-elements // (parts * block)) * block
    return [(min(part * share, elements), min((part + 1) * share, elements)) for part in range(parts)]


def _blocks(flat: Tensor) -> Sequence[Tensor]:
    """Flat (n,) in pieces that fit in cache; most shards are one piece."""
    return (flat,) if 0 < flat.numel() <= BLOCK else flat.split(BLOCK)


class Wires:
    """A pool of receive buffers: allocating large ones for each segment would fragment the heap."""

    def __init__(self) -> None:
        self._spare: dict[int, list[Tensor]] = {}

    def take(self, nbytes: int) -> Tensor:
        """A buffer of exactly `nbytes`, with undefined content."""
        spare = self._spare.get(nbytes)
        return spare.pop() if spare else torch.empty(nbytes, dtype=torch.uint8, device="cpu")

    def give(self, wire: Tensor) -> None:
        """Return a buffer that is not in use any more."""
        self._spare.setdefault(wire.numel(), []).append(wire)


class MeanPart(ABC):
    """One segment in progress: made when its first messages leave, finished when the mean is in the buffer."""

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
        robust: str = "none",
    ) -> None:
        self.robust = robust
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
        """Wait for the messages, and compute the mean. usable: the positions that it is of."""

    def receive(self, position: int, codec: Codec, elements: int, phase: int) -> Work:
        wire = self.wires.take(codec.wire_bytes(elements, self.buffer.dtype))
        self.inbox[position] = wire
        return self.call.recv(position, wire, phase)

    def release(self) -> None:
        """Return the receive buffers to the pool after decoding."""
        for wire in self.inbox.values():
            self.wires.give(wire)
        self.inbox.clear()

    def decode(self, wire: Tensor, elements: int) -> Tensor:
        return self.codec.decode(wire, elements, self.buffer.dtype)

    def note(self, wire: Tensor, first: int, last: int) -> None:
        """Update `own` and `residual` with what the others decode of entries [first, last)."""
        if self.own is None and self.residual is None:
            return
        decoded = self.decode(wire, last - first)
        if self.own is not None:
            self.own[first:last].copy_(decoded)
        if self.residual is not None:
            self.residual[first:last].sub_(decoded)

    def reduce(self, wire: Tensor, out: Tensor, usable: Sequence[int]) -> None:
        """Write the mean of the shares of positions `usable` into `out`, summed in group order. wire: this member's own
        share, of which `out` may be the memory. Refused or Malformed for an invalid share.
        """
        wires = [wire if position == self.call.group.rank else self.inbox[position] for position in usable]
        if not wires:
            out.zero_()
            return
        own, looks = self.call.group.rank, {position: Squares() for position in usable}
        if own in looks:
            looks[own] = Squares(self.call.own_every(self.phase))
        if self.robust != "none" and len(wires) > 2:
            shares = [self.decode_of(*each, out.numel()) for each in zip(looks, wires, strict=True)]
            for look, share in zip(looks.values(), shares, strict=True):
                for block in _blocks(share):
                    look.take(block)
            robust_mean(self.robust, shares, out)
        elif self.codec.lossless:
            self._add_up(wires, looks, out)
        else:
            self._add_decoded(wires, looks, out)
        means = {position: look.mean() for position, look in looks.items()}
        self.call.accept(self.phase, means, means.pop(own, 0.0), out.numel())

    def _add_up(self, wires: Sequence[Tensor], looks: Mapping[int, Squares], out: Tensor) -> None:
        """For codecs that decode to views: sum the received shares where they are, and check them while in cache. A
        pair is checked after the sum, because a sum reads two vectors faster than a check reads one.
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
            own.take((first, second)[mine])  # before the sum overwrites it
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
        """The decoded share of `position`. Malformed names it."""
        with sent_by(self.call.group.ranks[position]):
            return self.decode(wire, elements)


class Alone(MeanPart):
    """The mean of a single member."""

    def start(self) -> None:
        self.wire = self.codec.encode(self.buffer)

    @override
    def finish(self, usable: Sequence[int]) -> Steps[None]:
        yield self.works
        self.note(self.wire, 0, self.buffer.numel())
        if not usable:
            self.buffer.zero_()
            return
        mine = self.decode(self.wire, self.buffer.numel())  # with the codec's loss
        if mine.data_ptr() != self.buffer.data_ptr():
            self.buffer.copy_(mine)


class AllGather(MeanPart):
    """Each member sends everything to each."""

    def start(self) -> None:
        elements = self.buffer.numel()
        self.wire = self.codec.encode(self.buffer)
        for position in self.call.group.others:
            self.works.append(self.receive(position, self.codec, elements, self.phase))
        self.works += [self.call.send(position, self.wire, self.phase) for position in self.call.group.others]

    @override
    def finish(self, usable: Sequence[int]) -> Steps[None]:
        yield self.works  # the sends too: the reduction may overwrite memory of which the wire is a view
        self.note(self.wire, 0, self.buffer.numel())
        self.reduce(self.wire, self.buffer, usable)


class TwoShot(MeanPart):
    """Each member sends shard p to position p, which sends its mean to each."""

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
        shard = self.buffer[first:last]  # the other members have received theirs, so this memory is free
        refused: Refused | Malformed | None = None
        try:
            self.reduce(self.wire, shard, usable)
        except (Refused, Malformed) as error:
            refused = error
        self.release()
        if refused is None:
            wire = back.encode(shard)
        else:
            wire = refusal_wire(group.ranks, refused.peer, back.wire_bytes(last - first, shard.dtype))
        works = []
        for position in group.others:
            start, stop = self.shards[position]
            works.append(self.receive(position, back, stop - start, self.phase + PARTS))
        sends = [self.call.send(position, wire, self.phase + PARTS) for position in group.others]
        if refused is not None:
            with contextlib.suppress(CommError):
                yield sends
            raise refused
        decoded = back.decode(wire, last - first, shard.dtype)
        if self.residual is not None:  # the second encoding's loss of all members' shares
            self.residual[first:last].add_(shard - decoded, alpha=len(usable))
        shard.copy_(decoded)
        yield works + sends
        for position in group.others:
            self._land(position)

    def _land(self, position: int) -> None:
        """Copy the mean shard of `position` into the buffer. It is checked against this member's own share there."""
        start, stop = self.shards[position]
        back, wire, shard = self.codec.back, self.inbox[position], self.buffer[start:stop]
        kind, ranks = PARTS * position + self.phase + _SECOND, self.call.group.ranks
        own, theirs = Squares(self.call.own_every(kind)), Squares()
        try:
            with sent_by(ranks[position]):
                if back.lossless:
                    received = back.decode(wire, stop - start, shard.dtype)
                    for here, there in zip(_blocks(shard), _blocks(received), strict=True):
                        own.take(here)
                        theirs.take(there)
                        here.copy_(there)
                else:
                    for block in shard.split(BLOCK):
                        own.take(block)
                    back.decode_into(wire, shard)
                    for block in shard.split(BLOCK):
                        theirs.take(block)
            self.call.accept(kind, {position: theirs.mean()}, own.mean(), stop - start)
        except (Refused, Malformed):
            culprit = refused_rank(wire, ranks)
            if culprit is None:
                raise
            check = ranks[position]
            raise Refused(culprit, f"so says worker {check}, which reduces a part of it", check) from None


def refusal_wire(ranks: Sequence[int], culprit: int, nbytes: int) -> Tensor:
    """The wire (nbytes,) uint8 of a refusal: it names the rank of the group whose share was refused, or -1. The owner
    of a shard sends it instead of its mean, so that all members end with the same error.

    A wire of ones is not a number in any form, so a receiver rejects it as a mean, and only then checks whether it is a
    refusal: the normal case costs nothing. The rank is in its middle:

        ones ... | rank, its complement (4 bytes each) | ... ones        without a rank below 24 bytes
    """
    wire = torch.full((nbytes,), 0xFF, dtype=torch.uint8, device="cpu")
    if nbytes >= _LEAST and culprit in ranks:
        name = bytearray(_NAME.pack(culprit, ~culprit & 0xFFFFFFFF))
        begin = _middle(nbytes)
        wire[begin : begin + _NAME.size] = torch.frombuffer(name, dtype=torch.uint8)
    return wire


def refused_rank(wire: Tensor, ranks: Sequence[int]) -> int | None:
    """The rank that `wire` names if it is a refusal (-1: none of the group); None if it is not."""
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


def segments(elements: int, block: int) -> list[tuple[int, int]]:
    """The pipeline's segments: at most 4 Mi elements each, at most 60 of them, at least one."""
    count = min(max(-(-elements // _SEGMENT), 1), MOST_SEGMENTS)
    return cuts(elements, count, block)


def gathers(elements: int, dtype: torch.dtype, codec: Codec, size: int) -> bool:
    """Whether a segment is all-gathered, instead of averaged in two shots: the variant with fewer bytes in total."""
    there, back = (_shards(elements, dtype, form, codec.block, size).total for form in (codec, codec.back))
    return size * codec.wire_bytes(elements, dtype) <= there + back


def _shards(elements: int, dtype: torch.dtype, form: Codec, block: int, size: int) -> ShardSizes:
    """The shards of a segment, see `cuts`."""
    share = -(-elements // (size * block)) * block
    full, rest = divmod(elements, share) if share else (0, 0)
    runs = (full, share), (min(rest, 1), rest), (size - full - min(rest, 1), 0)
    return ShardSizes(tuple((count, form.wire_bytes(entries, dtype)) for count, entries in runs if count))


def phases(elements: int) -> int:
    """Phases of the means of one round: for each part the header, then scatter and gather of every segment."""
    return PARTS * (1 + 2 * len(segments(elements, block=1)))


def pattern(elements: int, dtype: torch.dtype, codec: Codec, size: int) -> Mean:
    """The message pattern of one mean in a group of `size`."""
    lengths = [stop - start for start, stop in segments(elements, codec.block)]
    made = {length: _segment(length, dtype, codec, size) for length in set(lengths)}
    return Mean(tuple(made[length] for length in lengths), HEADER_BYTES)


def _segment(elements: int, dtype: torch.dtype, codec: Codec, size: int) -> Segment:
    if gathers(elements, dtype, codec, size):
        return Segment(None, ShardSizes(((size, codec.wire_bytes(elements, dtype)),)))
    there, back = (_shards(elements, dtype, form, codec.block, size) for form in (codec, codec.back))
    return Segment(there, back)


def sent_bytes(elements: int, dtype: torch.dtype, codec: Codec, size: int, position: int) -> int:
    """Bytes that `position` of a group of `size` hands to the transport for one mean, headers included."""
    return int(pattern(elements, dtype, codec, size).sent(position, size))


def working_bytes(elements: int, dtype: torch.dtype, codec: Codec, size: int, robust: str = "none") -> int:
    """Bytes, beyond the buffer, that one mean in a group of `size` takes at its peak: the receive buffers of two
    segments, and encoded and decoded data unless the codec returns views; with a `robust` rule all decoded shares of
    one shard, and a clipped mean's centre and one difference from it.
    """
    total = 0
    if robust != "none" and size > 2:
        longest = max(stop - start for start, stop in segments(elements, codec.block))
        shard = longest if gathers(longest, dtype, codec, size) else cuts(longest, size, codec.block)[0][1]
        total += ((0 if codec.lossless else size) + (2 if robust == "clip" else 0)) * shard * dtype.itemsize
    for start, stop in segments(elements, codec.block)[:2]:
        whole = codec.wire_bytes(stop - start, dtype)
        largest = max(int(_shards(stop - start, dtype, form, codec.block, size)[0]) for form in (codec, codec.back))
        total += (size - 1) * (whole if gathers(stop - start, dtype, codec, size) else largest)
        total += 0 if codec.lossless else whole + (stop - start) * dtype.itemsize
    return total


def mean(
    call: Call,
    buffer: Tensor,
    codec: Codec,
    stamp: Stamp | None = None,
    own: Tensor | None = None,
    residual: Tensor | None = None,
    part: int = 0,
    agree_first: bool = False,
    robust: str = "none",
) -> Steps[tuple[int, ...]]:
    """Replace flat `buffer` (n,) by the mean over the call's group, without the members whose stamp says `broken`. The
    positions of those that it is the mean of, ascending; where there are none it is zero.

    own: if given (n,), filled with this member's contribution as the others decode it. residual: if given (n,), reduced
    by what of this member's buffer got into the mean: with the buffer itself in it, the encodings' error is left, and
    over the members of use residuals + their number * mean = sum of buffers (but what the second encoding of a broken
    member's shard loses). part: tells apart several buffers of one round (0 to 3).
    robust: the rule by which shares become a mean (`isles.comm.collectives.robust`), in each shard by itself.
    agree_first: wait for the headers before anything else is posted, a latency more: where members may come to other
    lengths by themselves.
    Raises Elsewhere for a member of another view, Diverged when a member's stamp differs or it averages something else,
    Refused or Malformed for what cannot be a share (`isles.comm.trust`): in two shots its shard's owner finds that and
    tells all others instead of a mean.
    After any error, do not write to `buffer`: parts of it may still be on their way to members that are late.
    """
    form = form_digest(buffer.numel(), str(buffer.dtype), codec.name, part, robust)
    headers = Headers(call, stamp or Stamp(step=-1), part, form)
    codec = codec.salted(salt(call.round, call.fragment), call.group.transport.rank)
    wires = Wires()
    pending: MeanPart | None = None
    usable: tuple[int, ...] = ()
    if agree_first:
        usable = yield from headers.compare()
    for index, (start, stop) in enumerate(segments(buffer.numel(), codec.block)):
        pieces = [None if vector is None else vector[start:stop] for vector in (own, residual)]
        phase = part + PARTS * (1 + 2 * index)
        segment = _scheme(stop - start, buffer.dtype, codec, call.group.size)(
            call, buffer[start:stop], codec, *pieces, phase=phase, wires=wires, robust=robust
        )
        if pending is None and not agree_first:
            usable = yield from headers.compare()  # the first segment is already on its way behind them
        elif pending is not None:
            yield from pending.finish(usable)
            pending.release()
        pending = segment
    assert pending is not None
    yield from pending.finish(usable)
    return usable


def as_decoded(buffer: Tensor, codec: Codec, round: int, fragment: int, member: int, out: Tensor) -> None:
    """Fill `out` (n,) with what others decode of rank `member`'s `buffer` in the mean of that round and fragment."""
    codec = codec.salted(salt(round, fragment), member)
    for start, stop in segments(buffer.numel(), codec.block):  # as large as what is encoded there
        codec.decode_into(codec.encode(buffer[start:stop]), out[start:stop])


def salt(round: int | None, fragment: int) -> int:
    """What random codecs draw from: the same on all members, another one for each exchange."""
    return (0 if round is None else round) * MAX_FRAGMENTS + fragment


def _scheme(elements: int, dtype: torch.dtype, codec: Codec, size: int) -> type[MeanPart]:
    if size == 1:
        return Alone
    return AllGather if gathers(elements, dtype, codec, size) else TwoShot


def native_mean(call: Call, buffer: Tensor) -> Steps[None]:
    """Replace `buffer` (CPU or CUDA) by the mean over the call's group with the backend's own collective.

    Fast inside an island (NCCL); the order of its sums is the backend's, so bits may differ from `mean`'s. Counted as a
    ring: `native_bytes`.
    """
    group = call.group
    for count in (group.traffic.sent, group.traffic.received):
        count(call.channel, native_bytes(buffer.numel(), buffer.dtype, group.size))
    # What comes after the wait runs in another thread, whose stream is another one than the caller's may be.
    caller = torch.cuda.stream(torch.cuda.current_stream(buffer.device)) if buffer.is_cuda else nullcontext()
    yield native_collectives(group.transport).native_sum(buffer, group.ranks)
    with caller:
        buffer.div_(group.size)


def native_bytes(elements: int, dtype: torch.dtype, size: int) -> int:
    """Bytes that each member of a ring all-reduce sends: 2 (N-1)/N times the buffer, rounded up."""
    return -(-2 * (size - 1) * elements * dtype.itemsize // size)
