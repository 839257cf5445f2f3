"""How a peer comes to a swarm that is at work: it asks everybody, and is told where and when to begin.

ASK        to all, once it is here; they name it when they agree on the step under way
WELCOME    from all who were there before, at the border of the step that it takes part in
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from isles.comm.collectives.mail import MailLetter, MailNote
from isles.comm.collectives.same import numbers
from isles.comm.errors import DeadlinePassed, Malformed, PeerLost
from isles.pipeline.swarm.arrangement import NOWHERE, StageChange
from isles.pipeline.swarm.post import ASK, ROW, WELCOME, as_bits, as_number
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
    fresh = {change.peer for change in swarm.changes}
    rows = [
        [peer, stage, as_bits(arrangement.seconds.get(peer, 0.0)), peer in members, peer in fresh]
        for peer, stage in enumerate(swarm.stages)
        if stage != NOWHERE
    ]
    head = [swarm.agreement.post.turn, step, as_bits(arrangement.next_look)]
    body = numbers(*head, *(int(each) for row in rows for each in row)).view(torch.uint8)
    for peer in comers:
        swarm.agreement.post.mail.send(peer, MailNote(WELCOME, 0), body)


def enter(swarm: Swarm, others: Sequence[int], wish: int = NOWHERE) -> Welcome:
    """Ask `others`, some of whom are there, to serve stage `wish`, and wait until told. PeerLost where all are lost
    first; DeadlinePassed where nobody answers.
    """
    post, agreement = swarm.agreement.post, swarm.agreement
    came: list[list[int]] = []
    post.answers[WELCOME] = lambda letter: came.extend(_read(swarm, letter))
    for other in others:
        post.mail.meet(other)
        post.mail.send(other, MailNote(ASK, 0, number=wish + 1))
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
    turn, step, look, *rest = came[0]
    rows = [rest[begin : begin + ROW] for begin in range(0, len(rest), ROW)]
    post.begin_at(turn)
    agreement.members = tuple(peer for peer, _, _, is_member, _ in rows if is_member)
    for member in agreement.members:
        post.mail.meet(member)
    arrangement = swarm.arrangement
    stages = arrangement.stages
    for peer, stage, *_ in rows:
        stages[peer] = stage
    arrangement.seconds = {peer: seconds for peer, _, bits, *_ in rows if (seconds := as_number(bits))}
    arrangement.next_look = as_number(look)
    swarm.changes = [StageChange(peer, NOWHERE, stages[peer]) for peer, _, _, _, is_fresh in rows if is_fresh]
    swarm.place()
    return Welcome(step, StageChange(swarm.me, NOWHERE, stages[swarm.me]))


def _read(swarm: Swarm, letter: MailLetter) -> list[list[int]]:
    """Its numbers, in a list; empty where it is no welcome: then its sender is not read any more."""
    numbers = letter.body.view(torch.int64).tolist()
    rows = [numbers[begin : begin + ROW] for begin in range(3, len(numbers), ROW)]
    known = {peer: stage for peer, stage, *_ in rows} if len(numbers) % ROW == 3 % ROW else {}
    fits = bool(known) and len(known) == len(rows) and min(numbers[:2]) >= 1 and swarm.me in known
    if fits and all(0 <= peer < len(swarm.stages) and 0 <= known[peer] < swarm.count for peer in known):
        return [numbers]
    mail = swarm.agreement.post.mail
    mail.refuse(letter.sender, Malformed(mail.group.ranks[letter.sender], "a welcome that is none"))
    return []
