"""The mean of a group, written once: the same bits on every member and on every backend.

Two-shot, each buffer cut into one shard a member:

    scatter   everyone sends shard p to position p                       encode once
    reduce    position p decodes, sums in group order, divides
    gather    position p sends its shard of the mean to everyone         encode once more, in the form of
              `codec.back`; p uses its own decoded value too

All-gather: everyone sends the whole encoded buffer to everyone, who decode, sum in group order and divide: one
latency, one encoding. Whatever sends fewer bytes is taken: two-shot 2 (N-1)/N times the encoded buffer, a ring's
volume; all-gather N - 1 times it, which is the same for a pair, and less for sparse codes, whose sum is dense. A member
alone has its own, as decoded. One header a peer comes on top. Sums are taken in the buffer's dtype (float32, or
float64).

Large buffers are cut into segments that follow each other in a pipeline of two, so the memory beyond the buffer is two
segments and the reduction of one hides behind the transfer of the next.

The header (view, round, step, hash of the anchor, a digest of what is averaged) travels beside the data, so that a
member that is elsewhere is noticed in the same round trip. On gloo a message that is longer than its receive ends the
process, perhaps before its header is read: that is why lengths are agreed on when an optimizer is made, and by the
headers before anything else in rounds whose lengths members adapt by themselves.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor

from isles.comm.call import Call
from isles.comm.codecs.base import Codec
from isles.comm.collectives.headers import HEADER_BYTES, Headers, Stamp, form_digest
from isles.comm.collectives.shots import PARTS, AllGather, Alone, MeanPart, TwoShot, Wires, cuts
from isles.comm.tags import MAX_FRAGMENTS
from isles.comm.transport import Steps, native_collectives
from isles.network.planner.memory import MOST_SEGMENTS
from isles.network.planner.memory import SEGMENT as _SEGMENT
from isles.network.planner.planned import Mean, Segment, ShardSizes


def segments(elements: int, block: int) -> list[tuple[int, int]]:
    """The pipeline's segments: at most 4 Mi elements each, at most 60 of them, at least one."""
    count = min(max(-(-elements // _SEGMENT), 1), MOST_SEGMENTS)
    return cuts(elements, count, block)


def gathers(elements: int, dtype: torch.dtype, codec: Codec, size: int) -> bool:
    """Whether a segment is all-gathered, not averaged in two shots: whatever takes fewer bytes over all members."""
    there, back = (_shards(elements, dtype, form, codec.block, size).total for form in (codec, codec.back))
    return size * codec.wire_bytes(elements, dtype) <= there + back


def _shards(elements: int, dtype: torch.dtype, form: Codec, block: int, size: int) -> ShardSizes:
    """Of a segment: see `cuts`."""
    share = -(-elements // (size * block)) * block
    full, rest = divmod(elements, share) if share else (0, 0)
    runs = (full, share), (min(rest, 1), rest), (size - full - min(rest, 1), 0)
    return ShardSizes(tuple((count, form.wire_bytes(entries, dtype)) for count, entries in runs if count))


def phases(elements: int) -> int:
    """Phases that the means of one round take: of each part the header, then scatter and gather of every segment."""
    return PARTS * (1 + 2 * len(segments(elements, block=1)))


def pattern(elements: int, dtype: torch.dtype, codec: Codec, size: int) -> Mean:
    """What one mean in a group of `size` puts on the wire."""
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


def working_bytes(elements: int, dtype: torch.dtype, codec: Codec, size: int) -> int:
    """Memory in bytes, beyond the buffer, that one mean in a group of `size` takes at its peak: what two segments
    receive, and where the codec is no mere view, what it encodes and decodes.
    """
    total = 0
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
) -> Steps[tuple[int, ...]]:
    """Replace flat `buffer` (n,) by the mean over the call's group, without the members whose stamp says `broken`. The
    positions of those that it is the mean of, ascending; where there are none it is zero.

    own: if given (n,), filled with this member's contribution as the others decode it. residual: if given (n,), reduced
    by what of this member's buffer got into the mean: with the buffer itself in it, the encodings' error is left, and
    over the members of use residuals + their number * mean = sum of buffers (but what the second encoding of a broken
    member's shard loses). part: tells apart several buffers of one round (0 to 3).
    agree_first: wait for the headers before anything else is posted, a latency more: where members may come to other
    lengths by themselves.
    Raises Elsewhere for a member of another view, Diverged when a member's stamp differs or it averages something else,
    Refused or Malformed for what cannot be a share (`isles.comm.trust`): in two shots its shard's owner finds that and
    tells all others instead of a mean.
    After any error, do not write to `buffer`: parts of it may still be on their way to members that are late.
    """
    form = form_digest(buffer.numel(), str(buffer.dtype), codec.name, part)
    headers = Headers(call, stamp or Stamp(step=-1), part, form)
    codec = codec.salted(salt(call.round, call.fragment), call.group.transport.rank)
    wires = Wires()
    waiting: MeanPart | None = None
    usable: tuple[int, ...] = ()
    if agree_first:
        usable = yield from headers.compare()
    for index, (start, stop) in enumerate(segments(buffer.numel(), codec.block)):
        pieces = [None if vector is None else vector[start:stop] for vector in (own, residual)]
        phase = part + PARTS * (1 + 2 * index)
        segment = _scheme(stop - start, buffer.dtype, codec, call.group.size)(
            call, buffer[start:stop], codec, *pieces, phase=phase, wires=wires
        )
        if waiting is None and not agree_first:
            usable = yield from headers.compare()  # the first segment is already on its way behind them
        elif waiting is not None:
            yield from waiting.finish(usable)
            waiting.release()
        waiting = segment
    assert waiting is not None
    yield from waiting.finish(usable)
    return usable


def as_decoded(buffer: Tensor, codec: Codec, round: int, fragment: int, member: int, out: Tensor) -> None:
    """Fill `out` (n,) with what the others will decode of rank `member`'s `buffer` in the mean of that round and
    fragment.
    """
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
