"""What travels beside the data of every exchange, so that a member that is elsewhere is noticed in the same round trip.

A header is 32 bytes: magic, round, step, hash of the anchor; with a note, a number of the protocol's own, 40.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from isles.comm.call import Call
from isles.comm.errors import Diverged
from isles.comm.transport import Steps, Work

HEADER_BYTES = 32
NOTE_BYTES = 8
_MAGIC, _BROKEN = 0x49534C4553, 0x49534C4573  # "ISLES", "ISLEs"


@dataclass(frozen=True, slots=True)
class Stamp:
    """Where a member is: its inner step and the 64-bit hash of its anchor (0: not compared). broken: what it sends is
    not to be used by anyone.
    """

    step: int
    digest: int = 0
    broken: bool = False


class Headers:
    """The stamps of all members, swapped beside the data. note: a number for the others; all members give one, or
    nobody.
    """

    def __init__(self, call: Call, stamp: Stamp, phase: int, note: int | None = None) -> None:
        self.group, self.stamp = call.group, stamp
        self.turn = -1 if call.round is None else call.round
        words = [_BROKEN if stamp.broken else _MAGIC, self.turn, stamp.step, stamp.digest]
        words += [] if note is None else [note]
        mine = torch.tensor(words)
        self.theirs = torch.zeros(self.group.size, len(words), dtype=torch.int64)
        self.works: list[Work] = [call.recv(position, self.theirs[position], phase) for position in self.group.others]
        self.works += [call.send(position, mine, phase) for position in self.group.others]

    def compare(self) -> Steps[bool]:
        """Wait for the headers; raise Diverged for the first that differs. False if a member is broken."""
        yield self.works
        whole = not self.stamp.broken
        for position in self.group.others:
            magic, turn, step, digest = self.theirs[position, :4].tolist()
            peer = self.group.ranks[position]
            if magic not in (_MAGIC, _BROKEN):
                raise Diverged(peer, self.stamp.step, "it speaks another version of the protocol")
            if (turn, step) != (self.turn, self.stamp.step):
                raise Diverged(
                    peer, self.stamp.step, f"it is at step {step}, round {turn}; this worker at round {self.turn}"
                )
            if digest != self.stamp.digest:
                raise Diverged(peer, self.stamp.step, f"anchor hash {digest:#x} against {self.stamp.digest:#x} here")
            whole = whole and magic == _MAGIC
        return whole

    def note(self, position: int) -> int:
        """What another member noted; after `compare`."""
        return int(self.theirs[position, 4])
