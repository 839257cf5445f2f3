"""The message of one worker's step of DeMo: a fixed number of bytes, known from the shapes of the model.

    header    16   inner step, hash of the weights (0: not compared), int64 each
    values         all kept coefficients, group by group, in the form of a codec
    places         group by group, where not all coefficients are kept: 1 byte each in blocks of up to 256 entries,
                   12 bits (two in three bytes) up to 4096, 2 bytes beyond; where all are kept they need none

pairs of a group = blocks * min(k, entries of a block).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from isles.comm.codecs import codec
from isles.comm.codecs.base import Codec
from isles.comm.codecs.sign import Sign
from isles.comm.codecs.topk import pack_places, unpack_places
from isles.comm.collectives.same import numbers
from isles.comm.errors import Malformed
from isles.replicas.methods.demo.blocks import BlockGroup, Blocks
from isles.replicas.methods.demo.config import Values

HEADER_BYTES = 16


class Bits(Codec):
    """One bit a value: decoded as +1 where it is >= 0, else -1."""

    name = "bits"

    @override
    def wire_bytes(self, elements: int, dtype: torch.dtype) -> int:
        return -(-elements // 8)

    @override
    def encode(self, x: Tensor) -> Tensor:
        wire = torch.empty(self.wire_bytes(len(x), x.dtype), dtype=torch.uint8, device="cpu")
        Sign().pack(x, wire)
        return wire

    @override
    def decode(self, wire: Tensor, elements: int, dtype: torch.dtype) -> Tensor:
        self.refuse_other_length(wire, elements, dtype)
        out = torch.empty(8 * len(wire), dtype=torch.float32, device="cpu")
        Sign().unpack(wire, out)
        return out[:elements].to(dtype)


@dataclass(frozen=True, slots=True)
class Sent:
    """One worker's step as the others decode it. values: float32 (pairs,). places: within their blocks,
    int64 (pairs,); those of groups that are sent whole mean nothing.
    """

    step: int
    digest: int
    values: Tensor
    places: Tensor


class Packing:
    """The form of the messages of a model laid out in `blocks`, k coefficients of each block."""

    def __init__(self, blocks: Blocks, k: int, values: Values) -> None:
        self.kept = [min(k, group.entries) for group in blocks.groups]
        """Coefficients kept of a block, by group."""
        self.groups = blocks.groups
        counts = [group.blocks * kept for group, kept in zip(self.groups, self.kept, strict=True)]
        self.firsts = [sum(counts[:index]) for index in range(len(counts))]
        """The first pair of each group."""
        self.counts, self.pairs = counts, sum(counts)
        self.codec = Bits() if values == "sign" else codec("none" if values == "fp32" else values)
        self.exact = values in ("fp32", "sign")
        """True if a sender takes from its momentum what it held, not what the others decode: of a bit, the size is not
        known to them.
        """

    @property
    def nbytes(self) -> int:
        """Length of a message."""
        places = sum(_places_bytes(group, count) for group, count in self._listed())
        return HEADER_BYTES + self.codec.wire_bytes(self.pairs, torch.float32) + places

    @property
    def sent_whole(self) -> int:
        """Coefficients of the blocks of which all are kept."""
        return sum(count for index, count in enumerate(self.counts) if not self.is_listed(index))

    def pack(self, step: int, digest: int, values: Tensor, places: Tensor) -> Tensor:
        """The message, uint8 (nbytes,), of CPU tensors as in `Sent`."""
        parts = [numbers(step, digest).view(torch.uint8), self.codec.encode(values)]
        for index, group in enumerate(self.groups):
            if self.is_listed(index):
                parts.append(_pack(group, places[self._of(index)]))
        return torch.cat(parts)

    def unpack(self, wire: Tensor) -> Sent:
        """The inverse. Malformed for a message of another length, or with a place beyond the end of its block."""
        if len(wire) != self.nbytes:
            raise Malformed(-1, f"{len(wire)} bytes for a step of {self.nbytes}")
        if wire.storage_offset() % 8:  # numbers begin where numbers may
            wire = wire.clone()
        step, digest = wire[:HEADER_BYTES].view(torch.int64).tolist()
        front = HEADER_BYTES + self.codec.wire_bytes(self.pairs, torch.float32)
        values = self.codec.decode(wire[HEADER_BYTES:front], self.pairs, torch.float32)
        places = torch.empty(self.pairs, dtype=torch.int64, device="cpu")
        for index, group in enumerate(self.groups):
            if self.is_listed(index):
                last = front + _places_bytes(group, self.counts[index])
                own = places[self._of(index)]
                _unpack(group, wire[front:last], own)
                if len(own) and int(own.max()) >= group.entries:
                    raise Malformed(-1, f"place {int(own.max())} in a block of {group.entries} entries")
                front = last
        return Sent(step, digest, values, places)

    def is_listed(self, index: int) -> bool:
        """Whether the places of a group travel: not all of its coefficients are kept."""
        return self.kept[index] < self.groups[index].entries

    def of(self, index: int, start: int, stop: int) -> slice:
        """The pairs of blocks [start, stop) of a group."""
        first, kept = self.firsts[index], self.kept[index]
        return slice(first + start * kept, first + stop * kept)

    def _of(self, index: int) -> slice:
        return self.of(index, 0, self.groups[index].blocks)

    def _listed(self) -> Sequence[tuple[BlockGroup, int]]:
        return [(group, self.counts[index]) for index, group in enumerate(self.groups) if self.is_listed(index)]


def _places_bytes(group: BlockGroup, count: int) -> int:
    if group.entries <= 256:
        return count
    return -(-count // 2) * 3 if group.entries <= 4096 else 2 * count


def _pack(group: BlockGroup, places: Tensor) -> Tensor:
    if group.entries <= 256:
        return places.to(torch.uint8)
    if group.entries <= 4096:
        return pack_places(torch.nn.functional.pad(places, (0, len(places) % 2)))
    return places.to(torch.int16).view(torch.uint8)  # wraps around: read back as unsigned


def _unpack(group: BlockGroup, packed: Tensor, out: Tensor) -> None:
    if group.entries <= 256:
        out.copy_(packed)
    elif group.entries <= 4096:
        out.copy_(unpack_places(packed)[: len(out)])
    else:
        out.copy_(packed.clone().view(torch.int16)).bitwise_and_(0xFFFF)  # as above
