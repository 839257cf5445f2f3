"""Agreement of all who are left on who that is, and on what each of them says.

Rounds of words. In each, everybody tells everybody all that it knows, and waits for the word of everybody whom it does
not know to be lost:

    heard the same ones twice running   what is known then is what everybody knows: decided, and all are told
    told of a decision                  that is it, and it is handed on
    else                                another round

Guarantee. Whoever is lost, as many as there are and at any moment, all who are left come to the same answer, and it
holds what each of them said. That needs what a closed connection gives: who is taken for lost sends nothing any more.
Who is lost to somebody alone, for it sent what cannot be, leaves as well; of two who lost each other, the higher.
Without a loss it is one round, of one letter to each of the others, and the word of the decision.
A word begins with whom its sender has lost.

Why: who heard the same ones in two rounds knows what any of them knew when the second began, and nobody else can still
speak. Early-deciding flooding, as in Raynal, Fault-tolerant Agreement in Synchronous Message-passing Systems (2010).
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
from isles.pipeline.peers.inbox import WORD, Post
from isles.pipeline.peers.transport import LetterTransport
from isles.pipeline.swarm.ledger import as_words, from_words, words_for

_DECIDED = 1


def agreed_bytes(members: int, said: int) -> int:
    """That each of them sends in an agreement without a loss, in which everybody says so many numbers."""
    row = 8 * (1 + words_for(members) + said)
    return (members - 1) * (2 * HEAD + (1 + members) * row)


class Agreement:
    """The members of a swarm, as all who are left know them. patience: seconds without a word of somebody who is not
    known to be lost, after which DeadlinePassed names it: a fixed world has nobody who could say what became of it.
    channel: whose deadline that is.
    """

    def __init__(self, post: Post, patience: float, members: Sequence[int], channel: Channel = "pipeline") -> None:
        self.post, self.patience, self._channel = post, patience, channel
        self.me = post.mail.group.rank
        self.members = tuple(members)
        """Positions of those who are left, as of the last agreement: the same at all of them."""
        self._owing: set[int] = set()
        """Members whose word of the last decision is still to come."""
        self.missed: list[int] = []
        """Those who were lost, until somebody has been told."""

    @cached_property
    def letters(self) -> LetterTransport:
        """For exchanges of its members."""
        return LetterTransport(self.post, lambda: self.past)

    @property
    def lost(self) -> set[int]:
        """Members that this one has lost since."""
        return set(self.members) & self.post.mail.lost.keys()

    @property
    def is_due(self) -> bool:
        """Whether all are to agree now, whatever they do: this peer has refused what a member sent, which nobody else
        can know, or somebody who has lost a member has begun the next agreement.
        """
        lost, count = self.post.mail.lost, words_for(len(self.members))
        if not all(isinstance(lost[position], PeerLost) for position in self.lost):
            return True
        return any(body[8 : 8 + 8 * count].any() for _, body in self.post.calls())

    @property
    def past(self) -> dict[int, CommError]:
        """Members from whom nothing more comes before the next agreement, and why: who has begun it, and whom one of
        those has lost and does not wait for either.
        """
        ranks, past = self.post.mail.group.ranks, dict[int, CommError]()
        for sender, body in self.post.calls():
            past[sender] = RoundClosed(ranks[sender])
            for position in self._lost_by(body.view(torch.int64)[1:].tolist()):
                past.setdefault(position, PeerLost(ranks[position], f"as worker {ranks[sender]} says"))
        return past

    def let_in(self, positions: Collection[int]) -> None:
        """These are members as well, as all know."""
        for position in positions:
            self.post.mail.meet(position)
        self.members = tuple(sorted({*self.members, *positions}))

    def let_go(self, positions: Collection[int]) -> None:
        """These leave, as all know."""
        self.members = tuple(position for position in self.members if position not in positions)
        for position in positions:
            if position != self.me:
                self.post.mail.give_up(position, PeerLost(self.post.mail.group.ranks[position], "it has left"))

    def agree(self, own: Sequence[int]) -> dict[int, tuple[int, ...]]:
        """What every member says, by position: numbers of 8 bytes, of all as many. Only of those who are left, but for
        who is lost right now. PeerLost where the others do not count this one any more.
        """
        self.post.turn += 1
        self._owing = {*self.members} - {self.me}
        places = {position: place for place, position in enumerate(self.members)}
        lost = as_words([places[position] for position in self.lost], len(self.members))
        known = self._flood([*lost, *own])
        self._settle_members(known.keys() - self._accused(known))
        return {position: known[position][len(lost) :] for position in self.members}

    def drain(self) -> None:
        """Take in what is still to come of the last agreement: nothing of it is under way then."""
        with suppress(DeadlinePassed):
            self.post.wait_for(self._is_drained, self.patience)

    def _is_drained(self) -> bool:
        self._owing -= {letter.sender for letter in self.post.of_turn(WORD) if letter.header.extra == _DECIDED}
        return self._owing.isdisjoint({*self.members} - self.post.mail.lost.keys())

    def _flood(self, own: Sequence[int]) -> dict[int, tuple[int, ...]]:
        known = {self.me: tuple(own)}
        before = set(self.members) - {self.me}
        barred, number = set[int](), 1
        while True:
            self._tell(number, known)
            heard, decision = self._listen(number, len(own), barred)
            if decision is not None:
                known = decision
                break
            for word in heard.values():
                known |= word
            if heard.keys() == before:
                break
            before, number = set(heard), number + 1
            barred = self._accused(known) - {self.me}
        self._tell(number + 1, known, _DECIDED)
        return known

    def _tell(self, number: int, known: Mapping[int, Sequence[int]], extra: int = 0) -> None:
        rows = numbers(*(each for position, said in sorted(known.items()) for each in (position, *said)))
        note = MessageHeader(WORD, 0, self.post.turn, number, extra=extra)
        for position in self.members:
            if position != self.me:
                self.post.mail.send(position, note, rows.view(torch.uint8))

    def _listen(
        self, number: int, width: int, barred: Collection[int]
    ) -> tuple[dict[int, dict[int, tuple[int, ...]]], dict[int, tuple[int, ...]] | None]:
        """The words of this round by who said them; or a decision. barred: who is not listened to any more."""
        heard: dict[int, dict[int, tuple[int, ...]]] = {}
        decision: dict[int, tuple[int, ...]] | None = None
        now = self.post.mail.group.transport.now
        until = now() + self.patience
        while True:
            self.post.sort()
            for letter in (each for each in self.post.of_turn(WORD) if each.sender not in barred):
                word = self._read(letter.sender, letter.body, width)
                if word is None:
                    continue
                if letter.header.extra == _DECIDED:
                    self._owing.discard(letter.sender)
                    decision = decision or word
                elif letter.header.number == number:
                    heard[letter.sender] = word
                elif letter.header.number > number:
                    self.post.keep(letter)
            if decision is not None:
                return heard, decision
            missing = set(self.members) - {self.me} - heard.keys() - self.lost - set(barred)
            for word in heard.values():  # who is lost to somebody may be silent here for that
                missing -= {each for said in word.values() for each in self._lost_by(said)}
            if not missing:
                return heard, None
            if now() >= until:
                rank = self.post.mail.group.ranks[min(missing)]
                raise DeadlinePassed(rank, self._channel, self.patience)
            self.post.mail.wait(until - now())

    def _read(self, sender: int, body: Tensor, width: int) -> dict[int, tuple[int, ...]] | None:
        """A word, or None where it is none: then its sender is not read any more."""
        numbers = body.view(torch.int64).tolist() if body.numel() % 8 == 0 else []
        rows = [numbers[begin : begin + width + 1] for begin in range(0, len(numbers), width + 1)]
        word = {row[0]: tuple(row[1:]) for row in rows}
        fits = len(numbers) % (width + 1) == 0 and len(word) == len(rows) and sender in word
        if fits and word.keys() <= set(self.members) and all(map(self._names_members, word.values())):
            return word
        rank = self.post.mail.group.ranks[sender]
        self.post.mail.refuse(sender, Malformed(rank, "a word that is none of this agreement"))
        return None

    def _accused(self, known: Mapping[int, Sequence[int]]) -> set[int]:
        """Who is to leave, as somebody has lost it. Of two who have lost each other it is the higher one."""
        lost = {position: self._lost_by(said) for position, said in known.items()}
        return {
            position
            for accuser, theirs in lost.items()
            for position in theirs & known.keys()
            if not (accuser in lost[position] and accuser > position)
        }

    def _lost_by(self, said: Sequence[int]) -> set[int]:
        """Whom it has lost who says that: it begins with a set of members, by their place among them."""
        count = len(self.members)
        return {self.members[place] for place in from_words(said[: words_for(count)], count)}

    def _names_members(self, said: Sequence[int]) -> bool:
        count = len(self.members)
        lost = list(said[: words_for(count)])
        return as_words(from_words(lost, count), count) == lost

    def _settle_members(self, left: Collection[int]) -> None:
        before, self.members = self.members, tuple(sorted(left))
        for position in sorted(set(before) - set(self.members) - {self.me}):
            self.missed.append(position)
            rank = self.post.mail.group.ranks[position]
            self.post.mail.give_up(position, PeerLost(rank, "as the others say"))
        if self.me not in self.members:
            raise PeerLost(self.post.mail.group.ranks[self.me], "the others do not count on it any more")
