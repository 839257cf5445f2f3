"""What travels beside the data of every exchange, so that a member that is elsewhere is noticed in the same round trip.

A header is 32 bytes, little-endian; with a note, a number of the protocol's own, 40:

    bits   40      24                     32      32     64     64               64
           magic   digest of the form     round   view   step   anchor's hash    note
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from zlib import crc32

import torch

from isles.comm.call import Call
from isles.comm.errors import Diverged, Elsewhere
from isles.comm.transport import Steps, Work

HEADER_BYTES = 32
NOTE_BYTES = 8
_PLAIN, _NOTED = struct.Struct("<QiIqq"), struct.Struct("<QiIqqq")
_MAGIC, _BROKEN = 0x49534C4553, 0x49534C4573  # "ISLES", "ISLEs"
_MAGIC_BITS = 40
_PART = (1 << 21) - 1


@dataclass(frozen=True, slots=True)
class Stamp:
    """Where a member is: its inner step and the 64-bit hash of its anchor, or of what else must be equal (0: not
    compared). broken: what it sends is not to be used by anyone. parts: what the digest is `packed` from, named where
    it differs; (): an anchor's.
    """

    step: int
    digest: int = 0
    broken: bool = False
    parts: tuple[str, ...] = ()

    def apart(self, theirs: int) -> str:
        """What another member's digest says of it."""
        if not self.parts:
            return f"anchor hash {theirs:#x} against {self.digest:#x} here; weights or states of other runs were loaded"
        return " and ".join(
            part for index, part in enumerate(self.parts) if (theirs ^ self.digest) >> 21 * index & _PART
        )


def packed(*numbers: int) -> int:
    """A digest of 21 bits of each of up to three hashes."""
    return sum((number & _PART) << 21 * index for index, number in enumerate(numbers))


def form_digest(*what: object) -> int:
    """24 bits that differ where members are about to exchange different things: lengths, codecs, parts of a round."""
    return crc32(repr(what).encode()) & 0xFFFFFF


class Headers:
    """The stamps of all members, swapped beside the data. form: see `form_digest`. note: a number for the others; all
    members give one, or nobody.
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
        """Wait for the headers; the positions of those whose share is of use, ascending. Raises Elsewhere or Diverged
        for the first that differs.
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
        """What another member noted; after `compare`."""
        return self._layout.unpack(self._theirs[position].numpy().tobytes())[-1]
