"""The sum of a stage's gradients over its peers, by letters: a loss fails it, and nothing else happens.

Each peer adds up one share of the vector, in the order of positions, and tells the others: all hold the same bits. A
sum goes on wherever this peer looks at its letters, behind whatever it does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from isles.comm.collectives.mail import MailLetter, MailNote
from isles.comm.errors import Malformed, Refused
from isles.pipeline.swarm.post import MEAN, SHARD, Post


class StageSums:
    """The sums of one peer, one at a time; all peers of a stage begin one in the same turn, which is its name."""

    def __init__(self, post: Post) -> None:
        self._post = post
        self._open: StageSum | None = None
        self._early: list[MailLetter] = []
        post.answers[SHARD] = post.answers[MEAN] = self._take

    def begin(self, peers: Sequence[int], own: Tensor) -> StageSum:
        """The sum of `own` (n,) over positions `peers`, this one among them. Bytes sent: 2 (p - 1) / p times own's."""
        self._open = StageSum(self._post, peers, own)
        early, self._early = self._early, []
        for letter in early:
            self._take(letter)
        return self._open

    def _take(self, letter: MailLetter) -> None:
        """Of a sum that this peer begins later it is kept; of one that failed it is too late."""
        turn = -1 if self._open is None else self._open.turn
        if letter.note.attempt > turn:
            self._early.append(letter)
        elif letter.note.attempt == turn and self._open is not None:
            self._open.read(letter)


class StageSum:
    """One sum under way. Refused shares end their sender's mail."""

    def __init__(self, post: Post, peers: Sequence[int], own: Tensor) -> None:
        self.post, self.peers, self.turn = post, list(peers), post.turn
        me, count = post.mail.group.rank, len(peers)
        self._bounds = [own.numel() * at // count for at in range(count + 1)]
        self._me, self._place = me, self.peers.index(me)
        self._parts: dict[int, Tensor] = {}
        self._done: set[int] = set()
        self._is_finite = bool(own.isfinite().all())  # a run that diverges does so everywhere
        self.total = torch.empty_like(own)
        """(n,), once nothing is `missing`."""
        for at, peer in enumerate(self.peers):
            share = own[self._bounds[at] : self._bounds[at + 1]]
            if peer == me:
                self._parts[me] = share
            else:
                post.mail.send(peer, MailNote(SHARD, 0, self.turn), share.view(torch.uint8))
        self._add_up()

    @property
    def missing(self) -> set[int]:
        """Positions from which something is still to come."""
        return set(self.peers) - self._done - {self._me} | set(self.peers) - self._parts.keys()

    def result(self, wait: Callable[[set[int]], None], is_due: Callable[[], bool]) -> Tensor | None:
        """The sum; None where it is not complete and one of the peers is lost, here or, as `is_due` says, to another
        one: what is missing may be missing elsewhere too, and nobody would send it. wait: for news from some of them.
        """
        while True:
            self.post.sort()
            if not self.missing:
                return self.total
            if self.post.mail.lost.keys() & set(self.peers) or is_due():
                return None
            wait(self.missing)

    def read(self, letter: MailLetter) -> None:
        """A share that is to be added up here, or one that was elsewhere."""
        sender, is_sum = letter.sender, letter.note.kind == MEAN
        if sender not in self.peers:
            return
        at = self.peers.index(sender) if is_sum else self._place
        begin, end = self._bounds[at], self._bounds[at + 1]
        if letter.body.numel() != (end - begin) * self.total.dtype.itemsize:
            rank = self.post.mail.group.ranks[sender]
            self.post.mail.refuse(sender, Malformed(rank, f"a share of {letter.body.numel()} bytes"))
            return
        share = letter.body.view(self.total.dtype)
        if self._is_finite and not share.isfinite().all():
            rank = self.post.mail.group.ranks[sender]
            self.post.mail.refuse(sender, Refused(rank, "a share that is not finite"))
            return
        if is_sum:
            self.total[begin:end] = share
            self._done.add(sender)
        else:
            self._parts[sender] = share
            self._add_up()

    def _add_up(self) -> None:
        if self._me in self._done or len(self._parts) < len(self.peers):
            return
        added = self._parts[self.peers[0]].clone()
        for peer in self.peers[1:]:
            added += self._parts[peer]
        self.total[self._bounds[self._place] : self._bounds[self._place + 1]] = added
        self._done.add(self._me)
        for peer in self.peers:
            if peer != self._me:
                self.post.mail.send(peer, MailNote(MEAN, 0, self.turn), added.view(torch.uint8))
