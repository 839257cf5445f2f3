"""The address of a collective operation, and what a protocol may ask of the group that it runs in.

Protocols (`isles.comm.collectives.basic`) are written against these two alone, so that they know no group, and a
group is made of them.
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
from isles.comm.trust import PeerTrust


@dataclass(slots=True, eq=False)
class Ledger:
    """What all groups of one worker share, so that they never use one address twice."""

    meetings: Counter[tuple[int, Channel, int]] = field(default_factory=Counter)
    """Calls without a round so far, by view, channel and peer's rank: in a new view all begin anew."""
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
        """The rank of another member. ValueError for a position that is none."""
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

    Without a round, the calls that two ranks have in common are numbered in program order, channel by channel, as MPI
    does. The number is taken when a call first meets a rank, which a protocol does before its first yield (or says so
    with `meet`): then a call that is still under way, or that failed, does not shift the numbers of the next ones.
    """

    group: Members
    channel: Channel
    round: int | None = None
    fragment: int = 0
    leeway: float = 1.0
    """How many times more than `PeerTrust.ratio` a payload may be: gradients of single steps jump."""
    attempt: int = 0
    """Which try of the round this is."""
    numbers: dict[int, int] = field(default_factory=dict, repr=False)
    """This call's number among those with a peer, by its rank."""
    _tags: dict[int, Tag] = field(default_factory=dict, repr=False, compare=False)
    """Those of a round, by phase: to all peers the same."""

    def meet(self, *positions: int) -> None:
        """Take this call's number with `positions` now: for peers that hear of it only later in the protocol."""
        for position in positions:
            self._number(self.group.peer(position))

    def number(self, position: int) -> int:
        """This call's number among those with the member at `position`, which has the same."""
        return self._number(self.group.peer(position))

    def send(self, position: int, data: Tensor, phase: int = 0) -> Work:
        """Hand `data` (any contiguous tensor) to the transport for `position`, counted."""
        group = self.group
        peer, wire = group.peer(position), as_bytes(data)
        group.traffic.sent(self.channel, wire.numel())
        return group.transport.send(peer, wire, self._tag(peer, phase))

    def recv(self, position: int, out: Tensor, phase: int = 0) -> Work:
        """Post a receive of the bytes of `out` (any contiguous tensor) from `position`, counted."""
        group = self.group
        peer, wire = group.peer(position), as_bytes(out)
        group.traffic.received(self.channel, wire.numel())
        return group.transport.recv(peer, wire, self._tag(peer, phase))

    def own_every(self, kind: int) -> int:
        """How many-th block of the own share of a kind to look at."""
        return self.group.ledger.trust.own_every((self.channel, self.fragment, kind))

    def accept(self, kind: int, theirs: Mapping[int, float], own: float, entries: int) -> None:
        """Judge shares of so many entries by their mean squares, those of the others by position; see
        `isles.comm.trust`. kind: what is compared with each other, beside channel and fragment. Refused, by name.
        """
        group, trust = self.group, self.group.ledger.trust
        if trust.looks_at(self.channel):
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
