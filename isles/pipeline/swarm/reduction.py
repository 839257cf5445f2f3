"""The sum of a stage's gradients over its peers, by messages: a loss fails it, and nothing else happens.

Each peer adds up one share of the vector, in the order of positions, and tells the others: all hold the same bits. A
sum goes on wherever this peer looks at its messages, behind whatever it does.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from isles.comm.collectives.message_queue import MessageHeader, QueuedMessage
from isles.comm.errors import Malformed, Refused
from isles.pipeline.peers.agreement import Agreement
from isles.pipeline.peers.inbox import MEAN, SHARD


class StageSum:
    """The sums of one peer, one at a time; all peers of a stage begin one in the same epoch, which is its name. Refused
    shares end their sender's queue.
    """

    def __init__(self, agreement: Agreement) -> None:
        self._agreement, self._inbox = agreement, agreement.inbox
        self._me = agreement.me
        self._epoch = -1
        self._early: list[QueuedMessage] = []
        self._inbox.answers[SHARD] = self._inbox.answers[MEAN] = self._take

    def begin(self, peers: Sequence[int], own: Tensor) -> None:
        """The sum of `own` (n,) over positions `peers`, this one among them. Bytes sent: 2 (p - 1) / p times own's."""
        self._peers, self._epoch, count = list(peers), self._inbox.epoch, len(peers)
        self._bounds = [own.numel() * at // count for at in range(count + 1)]
        self._place = self._peers.index(self._me)
        self._parts: dict[int, Tensor] = {}
        self._done: set[int] = set()
        self._is_finite = bool(own.isfinite().all())  # a run that diverges does so everywhere
        self._total = torch.empty_like(own)
        for at, peer in enumerate(self._peers):
            share = own[self._bounds[at] : self._bounds[at + 1]]
            if peer == self._me:
                self._parts[peer] = share
            else:
                self._inbox.queue.send(peer, MessageHeader(SHARD, 0, self._epoch), share.view(torch.uint8))
        self._add_up()
        early, self._early = self._early, []
        for message in early:
            self._take(message)

    def result(self) -> Tensor | None:
        """The sum begun last; None where it is not complete and one of the peers is lost, here or to another one: what
        is missing may be missing elsewhere too, and nobody would send it. DeadlinePassed where nothing comes at all.
        """
        agreement, peers = self._agreement, set(self._peers)
        while True:
            self._inbox.sort()
            missing = peers - self._done - {self._me} | peers - self._parts.keys()
            if not missing:
                return self._total
            if self._inbox.queue.lost.keys() & peers or agreement.is_due:
                return None
            self._inbox.wait_for_news(agreement.patience, agreement.patience, min(missing))

    def _take(self, message: QueuedMessage) -> None:
        """Of a sum that this peer begins later it is kept; of one that failed it is too late."""
        if message.header.attempt > self._epoch:
            self._early.append(message)
        elif message.header.attempt == self._epoch:
            self._read(message)

    def _read(self, message: QueuedMessage) -> None:
        """A share that is to be added up here, or one that was elsewhere."""
        sender, is_sum = message.sender, message.header.kind == MEAN
        if sender not in self._peers:
            return
        at = self._peers.index(sender) if is_sum else self._place
        begin, end = self._bounds[at], self._bounds[at + 1]
        if message.body.numel() != (end - begin) * self._total.dtype.itemsize:
            rank = self._inbox.queue.group.ranks[sender]
            self._inbox.queue.refuse(sender, Malformed(rank, f"a share of {message.body.numel()} bytes"))
            return
        share = message.body.view(self._total.dtype)
        if self._is_finite and not share.isfinite().all():
            rank = self._inbox.queue.group.ranks[sender]
            self._inbox.queue.refuse(sender, Refused(rank, "a share that is not finite"))
            return
        if is_sum:
            self._total[begin:end] = share
            self._done.add(sender)
        else:
            self._parts[sender] = share
            self._add_up()

    def _add_up(self) -> None:
        if self._me in self._done or len(self._parts) < len(self._peers):
            return
        added = self._parts[self._peers[0]].clone()
        for peer in self._peers[1:]:
            added += self._parts[peer]
        self._total[self._bounds[self._place] : self._bounds[self._place + 1]] = added
        self._done.add(self._me)
        for peer in self._peers:
            if peer != self._me:
                self._inbox.queue.send(peer, MessageHeader(MEAN, 0, self._epoch), added.view(torch.uint8))
