"""The address of a collective operation, and what a protocol may use of its group.

Protocols (`isles.comm.collectives.basic`) depend on these two classes alone, not on groups; a group is built from them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from torch import Tensor

from isles.comm.codecs.base import as_bytes
from isles.comm.tags import Channel, Tag
from isles.comm.traffic import Traffic
from isles.comm.transport import Deadlines, Transport, Work
from isles.comm.trust import CHECKED, PeerTrust


@dataclass(slots=True, eq=False)
class Ledger:
    """State that all groups of one worker share, so that no address is ever used twice."""

    meetings: Counter[tuple[int, Channel, int]] = field(default_factory=Counter)
    """Calls without a round so far, by view, channel and peer's rank; a new view starts counting anew."""
    trust: PeerTrust = field(default_factory=PeerTrust)
    """What was accepted from peers so far."""


@dataclass(frozen=True, eq=False)
class Members:
    """An ordered set of workers, this one among them, over a transport, as the protocols of a `Group` see it."""

    transport: Transport
    """This worker's end of the backend."""
    ranks: tuple[int, ...]
    """The members' ranks, in order."""
    channel: Channel = "outer"
    deadlines: Deadlines = field(default_factory=Deadlines)
    ledger: Ledger = field(default_factory=Ledger, repr=False)
    view: int = 0
    """Number of the view of the world (`isles.membership.messages`) that the members are in."""

    def __post_init__(self) -> None:
        if len(set(self.ranks)) != len(self.ranks):
            raise ValueError(f"group ranks {self.ranks}: name every rank once")
        if self.transport.rank not in self.ranks:
            raise ValueError(
                f"rank {self.transport.rank} is not in the group {self.ranks}: make groups that hold their maker"
            )

    @cached_property
    def rank(self) -> int:
        """This worker's position."""
        return self.ranks.index(self.transport.rank)

    @property
    def size(self) -> int:
        """Number of members."""
        return len(self.ranks)

    @cached_property
    def others(self) -> list[int]:
        """Positions of the other members, starting behind this one, so that no member is everyone's first target."""
        return [(self.rank + shift) % self.size for shift in range(1, self.size)]

    def peer(self, position: int) -> int:
        """The rank of another member. ValueError for this worker's own or an impossible position."""
        if not 0 <= position < self.size or position == self.rank:
            raise ValueError(
                f"position {position} is not another member: this worker is {self.rank} of 0..{self.size - 1}"
            )
        return self.ranks[position]

    @property
    def traffic(self) -> Traffic:
        """Bytes, messages and blocked seconds of this worker (shared by all its groups)."""
        return self.transport.traffic


@dataclass(frozen=True, slots=True)
class Call:
    """The address of one collective operation: whose messages, on which channel, in which round.

    Without a round, the calls that two ranks have in common are numbered in program order, channel by channel, as in
    MPI. A call takes its number when it first uses a rank, which a protocol does before its first yield (or with
    `meet`). So a call that is still in progress, or that failed, does not shift the numbers of later ones.
    """

    group: Members
    channel: Channel
    round: int | None = None
    fragment: int = 0
    leeway: float = 1.0
    """Multiplies `PeerTrust.ratio`, the tolerated size of a share: gradients of single steps vary more."""
    attempt: int = 0
    """Which try of the round this is."""
    numbers: dict[int, int] = field(default_factory=dict, repr=False)
    """By peer's rank, this call's number among the calls with it."""
    _tags: dict[int, Tag] = field(default_factory=dict, repr=False, compare=False)
    """By phase, the tags of a call with a round: equal for all peers."""

    def meet(self, *positions: int) -> None:
        """Take this call's number with `positions` now, for peers that the protocol uses only later."""
        for position in positions:
            self._number(self.group.peer(position))

    def number(self, position: int) -> int:
        """This call's number among those with the member at `position`, which counts the same."""
        return self._number(self.group.peer(position))

    def send(self, position: int, data: Tensor, phase: int = 0) -> Work:
        """Send `data` (any contiguous tensor) to `position`, and count it."""
        group = self.group
        peer, wire = group.peer(position), as_bytes(data)
        group.traffic.sent(self.channel, wire.numel())
        return group.transport.send(peer, wire, self._tag(peer, phase))

    def recv(self, position: int, out: Tensor, phase: int = 0) -> Work:
        """Post a receive into `out` (any contiguous tensor) from `position`, and count it."""
        group = self.group
        peer, wire = group.peer(position), as_bytes(out)
        group.traffic.received(self.channel, wire.numel())
        return group.transport.recv(peer, wire, self._tag(peer, phase))

    def own_every(self, kind: int) -> int:
        """Every how many blocks of the own share to measure, for this kind of payload."""
        return self.group.ledger.trust.own_every((self.channel, self.fragment, kind))

    def accept(self, kind: int, theirs: Mapping[int, float], own: float, entries: int) -> None:
        """Check shares of `entries` entries by their mean squares, `theirs` by position; see `isles.comm.trust`. kind:
        payloads to compare with each other, within a channel and fragment. Raises Refused with the peer.
        """
        group, trust = self.group, self.group.ledger.trust
        if self.channel in CHECKED:
            ranked = {group.ranks[position]: square for position, square in theirs.items()}
            trust.check((self.channel, self.fragment, kind), ranked, own, entries, self.leeway)

    def _tag(self, peer: int, phase: int) -> Tag:
        if self.round is None:
            return Tag(self.channel, self._number(peer), self.fragment, phase, self.group.view)
        tag = self._tags.get(phase)
        if tag is None:
            tag = self._tags[phase] = Tag(self.channel, self.round, self.fragment, phase, attempt=self.attempt)
        return tag

    def _number(self, peer: int) -> int:
        if peer not in self.numbers:
            meetings, key = self.group.ledger.meetings, (self.group.view, self.channel, peer)
            self.numbers[peer] = meetings[key]
            meetings[key] += 1
        return self.numbers[peer]
