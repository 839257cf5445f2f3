"""How a peer comes to a swarm that is at work: it asks everybody, and is told where and when to begin.

ASK        to all, once it is here; they name it when they agree on the step under way
WELCOME    from all who were there before, at the border of the step that it takes part in
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from isles.comm.collectives.mail import MailLetter, MailNote
from isles.comm.errors import DeadlinePassed, PeerLost
from isles.pipeline.swarm.arrangement import NOWHERE, StageChange
from isles.pipeline.swarm.post import ASK, WELCOME, as_bits, as_number
from isles.pipeline.swarm.swarm import Swarm


class Welcome(NamedTuple):
    """step: that it begins with; change: its own."""

    step: int
    change: StageChange


def welcome(swarm: Swarm, step: int) -> None:
    """Tell those who have just come where they are, right after `Swarm.arrange`."""
    comers = [change.peer for change in swarm.changes if change.before == NOWHERE]
    if not comers:
        return
    arrangement, members = swarm.arrangement, swarm.agreement.members
    look = 0.0 if arrangement.balance is None else arrangement.balance.next_look
    fresh = {change.peer for change in swarm.changes}
    rows = [
        [stage, as_bits(arrangement.seconds.get(peer, 0.0)), peer in members, peer in fresh]
        for peer, stage in enumerate(swarm.stages)
    ]
    head = [swarm.agreement.post.turn, step, as_bits(look)]
    body = torch.tensor([*head, *(int(each) for row in rows for each in row)], dtype=torch.int64).view(torch.uint8)
    for peer in comers:
        swarm.agreement.post.mail.send(peer, MailNote(WELCOME, 0), body)


def enter(swarm: Swarm, others: Sequence[int]) -> Welcome:
    """Ask `others`, some of whom are there, and wait until told. PeerLost where all are lost first; DeadlinePassed
    where nobody answers.
    """
    post, agreement = swarm.agreement.post, swarm.agreement
    came: list[MailLetter] = []
    post.answers[WELCOME] = came.append
    for other in others:
        post.mail.send(other, MailNote(ASK, 0))
    until = swarm.peer.now() + 100 * agreement.patience  # steps take their time
    while not came:
        post.sort()
        if came:
            break
        if set(others) <= post.mail.lost.keys():
            raise PeerLost(-1, "everybody who was asked to let this peer in")
        if swarm.peer.now() >= until:
            raise DeadlinePassed(-1, "pipeline", 100 * agreement.patience)
        post.mail.wait(until - swarm.peer.now())
    del post.answers[WELCOME]
    turn, step, look, *rest = came[0].body.view(torch.int64).tolist()
    rows = [rest[begin : begin + 4] for begin in range(0, len(rest), 4)]
    post.begin_at(turn)
    agreement.members = tuple(peer for peer, row in enumerate(rows) if row[2])
    arrangement = swarm.arrangement
    stages = arrangement.stages
    stages[:] = [row[0] for row in rows]
    arrangement.seconds = {peer: own for peer, row in enumerate(rows) if (own := as_number(row[1]))}
    if arrangement.balance is not None:
        arrangement.balance.next_look = as_number(look)
    swarm.changes = [StageChange(peer, NOWHERE, stages[peer]) for peer, row in enumerate(rows) if row[3]]
    swarm.place()
    return Welcome(step, StageChange(swarm.me, NOWHERE, stages[swarm.me]))
