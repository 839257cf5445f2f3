"""Agreement of the remaining members on who they are and on each member's vote.

Votes are flooded in rounds. In each, every member sends every other all votes that it knows, and waits for those of
every member that it does not know to be lost:

    votes of the same members in two rounds     every member knows all known votes: decide, and send the decision
    a decision arrives                          adopt it and pass it on
    otherwise                                   another round

Guarantee. However many members are lost, at any moment, all that remain reach the same decision, and it holds the vote
of each of them. This relies on closed connections: a member that counts as lost cannot send any more. A member that
only one other has lost, because it sent an invalid message, is removed as well; of two that lost each other, the one of
higher position. Without a loss it takes one round, of one message to each other member, and one message with the
decision. A vote begins with the set of members that its sender has lost.

Why: a member that saw votes of the same members in two rounds knows what any of them knew when the second began, and
no other member can still send. Early-deciding flooding, as in Raynal, Fault-tolerant Agreement in Synchronous
Message-passing Systems (2010).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from functools import cached_property

import torch
from torch import Tensor

from isles.comm.collectives.message_queue import HEAD, MessageHeader
from isles.comm.errors import CommError, DeadlinePassed, Malformed, PeerLost, RoundClosed
from isles.comm.group import numbers
from isles.comm.tags import Channel
from isles.pipeline.peers.inbox import VOTE, PeerInbox
from isles.pipeline.peers.transport import MessageTransport
from isles.pipeline.swarm.ledger import as_words, from_words, words_for

_DECIDED = 1


def row_bytes(members: int, values: int) -> int:
    """Bytes of one member's row in a vote: a number, the set of lost ones among `members`, and `values` numbers."""
    return 8 * (1 + words_for(members) + values)


def agreed_bytes(members: int, values: int) -> int:
    """Bytes that each of `members` sends in an agreement without a loss, with votes of `values` numbers."""
    return (members - 1) * (2 * HEAD + (1 + members) * row_bytes(members, values))


class Agreement:
    """The members of a swarm, equal at all that remain. patience: seconds of silence of a member that is not known to
    be lost, after which DeadlinePassed names it: a fixed world has no lighthouse that could decide whether it is lost.
    channel: the channel of that deadline.
    """

    def __init__(
        self, inbox: PeerInbox, patience: float, members: Sequence[int], channel: Channel = "pipeline"
    ) -> None:
        self.inbox, self.patience, self._channel = inbox, patience, channel
        self.me = inbox.queue.group.rank
        self.members = tuple(members)
        """Positions of the remaining members, as of the last agreement: the same at all of them."""
        self._undecided: set[int] = set()
        """Members whose copy of the last decision has not arrived yet."""
        self.missed: list[int] = []
        """Positions of lost members that have not been reported yet."""

    @cached_property
    def transport(self) -> MessageTransport:
        """Transport for exchanges among the members."""
        return MessageTransport(self.inbox, lambda: self.past)

    @property
    def lost(self) -> set[int]:
        """Members that this one has lost since the last agreement."""
        return set(self.members) & self.inbox.queue.lost.keys()

    @property
    def is_due(self) -> bool:
        """Whether this member must stop its work and agree now: it has refused another member's message, which no other
        can know, or a member that has lost one has begun the next agreement.
        """
        lost, count = self.inbox.queue.lost, words_for(len(self.members))
        if not all(isinstance(lost[position], PeerLost) for position in self.lost):
            return True
        return any(body[8 : 8 + 8 * count].any() for _, body in self.inbox.calls())

    @property
    def past(self) -> dict[int, CommError]:
        """Members that send nothing more before the next agreement, with the reason: those that have begun it, and
        those that one of these has lost.
        """
        ranks, past = self.inbox.queue.group.ranks, dict[int, CommError]()
        for sender, body in self.inbox.calls():
            past[sender] = RoundClosed(ranks[sender])
            for position in self._lost_by(body.view(torch.int64)[1:].tolist()):
                past.setdefault(position, PeerLost(ranks[position], f"as worker {ranks[sender]} reports"))
        return past

    def add_members(self, positions: Collection[int]) -> None:
        """Add members. All members call it with the same `positions`."""
        for position in positions:
            self.inbox.queue.meet(position)
        self.members = tuple(sorted({*self.members, *positions}))

    def remove_members(self, positions: Collection[int]) -> None:
        """Remove members. All members call it with the same `positions`."""
        self.members = tuple(position for position in self.members if position not in positions)
        for position in positions:
            if position != self.me:
                self.inbox.queue.give_up(position, PeerLost(self.inbox.queue.group.ranks[position], "it has left"))

    def agree(self, own: Sequence[int]) -> dict[int, tuple[int, ...]]:
        """The votes of the remaining members, by position. own: this one's vote, 8-byte integers, as many at each
        member. A member may be lost while the agreement ends. PeerLost if the others have removed this member.
        """
        self.inbox.epoch += 1
        self._undecided = {*self.members} - {self.me}
        indices = {position: index for index, position in enumerate(self.members)}
        lost = as_words([indices[position] for position in self.lost], len(self.members))
        known = self._flood([*lost, *own])
        self._settle_members(known.keys() - self._accused(known))
        return {position: known[position][len(lost) :] for position in self.members}

    def drain(self) -> None:
        """Receive all messages of the last agreement, so that none is in flight."""
        with suppress(DeadlinePassed):
            self.inbox.wait_for(self._is_drained, self.patience)

    def _is_drained(self) -> bool:
        self._undecided -= {message.sender for message in self.inbox.of_epoch(VOTE) if message.header.extra == _DECIDED}
        return self._undecided.isdisjoint({*self.members} - self.inbox.queue.lost.keys())

    def _flood(self, own: Sequence[int]) -> dict[int, tuple[int, ...]]:
        known = {self.me: tuple(own)}
        before = set(self.members) - {self.me}
        barred, number = set[int](), 1
        while True:
            self._send_votes(number, known)
            votes, decision = self._collect_votes(number, len(own), barred)
            if decision is not None:
                known = decision
                break
            for vote in votes.values():
                known |= vote
            if votes.keys() == before:
                break
            before, number = set(votes), number + 1
            barred = self._accused(known) - {self.me}
        self._send_votes(number + 1, known, _DECIDED)
        return known

    def _send_votes(self, number: int, known: Mapping[int, Sequence[int]], extra: int = 0) -> None:
        rows = numbers(*(each for position, values in sorted(known.items()) for each in (position, *values)))
        note = MessageHeader(VOTE, 0, self.inbox.epoch, number, extra=extra)
        for position in self.members:
            if position != self.me:
                self.inbox.queue.send(position, note, rows.view(torch.uint8))

    def _collect_votes(
        self, number: int, width: int, barred: Collection[int]
    ) -> tuple[dict[int, dict[int, tuple[int, ...]]], dict[int, tuple[int, ...]] | None]:
        """The votes of round `number` by sender, or a decision. barred: members whose messages are ignored."""
        votes: dict[int, dict[int, tuple[int, ...]]] = {}
        decision: dict[int, tuple[int, ...]] | None = None
        now = self.inbox.queue.group.transport.now
        until = now() + self.patience
        while True:
            self.inbox.sort()
            for message in (each for each in self.inbox.of_epoch(VOTE) if each.sender not in barred):
                vote = self._read(message.sender, message.body, width)
                if vote is None:
                    continue
                if message.header.extra == _DECIDED:
                    self._undecided.discard(message.sender)
                    decision = decision or vote
                elif message.header.number == number:
                    votes[message.sender] = vote
                elif message.header.number > number:
                    self.inbox.requeue(message)
            if decision is not None:
                return votes, decision
            missing = set(self.members) - {self.me} - votes.keys() - self.lost - set(barred)
            for vote in votes.values():  # a member that another one has lost may send nothing here either
                missing -= {each for values in vote.values() for each in self._lost_by(values)}
            if not missing:
                return votes, None
            if now() >= until:
                rank = self.inbox.queue.group.ranks[min(missing)]
                raise DeadlinePassed(rank, self._channel, self.patience)
            self.inbox.queue.wait(until - now())

    def _read(self, sender: int, body: Tensor, width: int) -> dict[int, tuple[int, ...]] | None:
        """Decode a message of votes; None if it is invalid, and its sender is refused."""
        numbers = body.view(torch.int64).tolist() if body.numel() % 8 == 0 else []
        rows = [numbers[begin : begin + width + 1] for begin in range(0, len(numbers), width + 1)]
        vote = {row[0]: tuple(row[1:]) for row in rows}
        fits = len(numbers) % (width + 1) == 0 and len(vote) == len(rows) and sender in vote
        if fits and vote.keys() <= set(self.members) and all(map(self._names_members, vote.values())):
            return vote
        rank = self.inbox.queue.group.ranks[sender]
        self.inbox.queue.refuse(sender, Malformed(rank, "an invalid vote"))
        return None

    def _accused(self, known: Mapping[int, Sequence[int]]) -> set[int]:
        """Members to remove because another one has lost them; of two that lost each other, the higher position."""
        lost = {position: self._lost_by(values) for position, values in known.items()}
        return {
            position
            for accuser, theirs in lost.items()
            for position in theirs & known.keys()
            if not (accuser in lost[position] and accuser > position)
        }

    def _lost_by(self, values: Sequence[int]) -> set[int]:
        """Decode the set of lost members at the start of a vote (bits are indices into `members`)."""
        count = len(self.members)
        return {self.members[index] for index in from_words(values[: words_for(count)], count)}

    def _names_members(self, values: Sequence[int]) -> bool:
        count = len(self.members)
        lost = list(values[: words_for(count)])
        return as_words(from_words(lost, count), count) == lost

    def _settle_members(self, left: Collection[int]) -> None:
        before, self.members = self.members, tuple(sorted(left))
        for position in sorted(set(before) - set(self.members) - {self.me}):
            self.missed.append(position)
            rank = self.inbox.queue.group.ranks[position]
            self.inbox.queue.give_up(position, PeerLost(rank, "as the others report"))
        if self.me not in self.members:
            raise PeerLost(self.inbox.queue.group.ranks[self.me], "the others have removed it")
