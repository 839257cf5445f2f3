"""How a peer joins others that are at work: it asks them, and is told where and when to begin.

ASK        to all, once it is here; they name it when they agree
WELCOME    from all who were there before, from the epoch on in which it is a member; one is enough

What a welcome holds depends on the system: here that of a swarm, where it comes between two steps, before the step that
the peer takes part in. A malformed message closes the queue from its sender, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from isles.comm.collectives.message_queue import MessageHeader, QueuedMessage
from isles.comm.errors import Malformed, PeerLost
from isles.comm.group import numbers
from isles.pipeline.peers.inbox import ASK, ROW, WELCOME, PeerInbox, as_bits, as_number
from isles.pipeline.swarm.placement import NOWHERE, StageChange
from isles.pipeline.swarm.swarm import Swarm

W = TypeVar("W")
_PATIENCE = 100  # times the deadline of what the others do meanwhile
_LOOK = 1.0  # seconds


def ask(
    inbox: PeerInbox,
    others: Sequence[int],
    read: Callable[[Tensor], W],
    patience: float,
    *,
    number: int = 0,
    body: Tensor | None = None,
    gives_up: Callable[[], bool] = lambda: False,
) -> W | None:
    """Ask `others`, some of whom are there, to be let in, and wait for a welcome: what `read` makes of it, which raises
    ValueError for what is none. number, body: what is asked. None once this peer `gives_up`.

    PeerLost where all of them are lost first; DeadlinePassed where nobody answers in 100 times `patience`.
    """
    queue, came = inbox.queue, list[W]()

    def hear(message: QueuedMessage) -> None:
        try:
            came.append(read(message.body))
        except ValueError as error:
            queue.refuse(message.sender, Malformed(queue.group.ranks[message.sender], str(error)))

    inbox.answers[WELCOME] = hear
    for other in others:
        queue.meet(other)
        queue.send(other, MessageHeader(ASK, 0, number=number), body)
    asked = set(others)
    inbox.wait_for(lambda: bool(came) or asked <= queue.lost.keys() or gives_up(), _PATIENCE * patience, look=_LOOK)
    if not came and asked <= queue.lost.keys():
        raise PeerLost(-1, "everybody who was asked to let this one in")
    del inbox.answers[WELCOME]
    return came[0] if came else None


def welcome(swarm: Swarm, step: int) -> None:
    """Tell those who have just come where they are, right after `Swarm.arrange`."""
    comers = [change.peer for change in swarm.changes if change.before == NOWHERE]
    if not comers:
        return
    placement, members = swarm.placement, swarm.agreement.members
    fresh = {change.peer for change in swarm.changes}
    rows = [
        [peer, stage, as_bits(placement.seconds.get(peer, 0.0)), peer in members, peer in fresh]
        for peer, stage in enumerate(swarm.stages)
        if stage != NOWHERE
    ]
    head = [swarm.agreement.inbox.epoch, step, as_bits(placement.balance.next_look)]
    body = numbers(*head, *(int(each) for row in rows for each in row)).view(torch.uint8)
    for peer in comers:
        swarm.agreement.inbox.queue.send(peer, MessageHeader(WELCOME, 0), body)


def enter(swarm: Swarm, others: Sequence[int], wish: int = NOWHERE) -> tuple[int, StageChange]:
    """Come to the swarm that `others` are of, to serve stage `wish`; see `ask`. The step that this peer begins with
    and its own change.
    """
    inbox, agreement = swarm.agreement.inbox, swarm.agreement
    came = ask(inbox, others, lambda body: _read(swarm, body), agreement.patience, number=wish + 1)
    assert came is not None
    epoch, step, look, *rest = came
    rows = [rest[begin : begin + ROW] for begin in range(0, len(rest), ROW)]
    inbox.epoch = epoch
    agreement.let_in([peer for peer, _, _, is_member, _ in rows if is_member])
    placement = swarm.placement
    stages = placement.stages
    for peer, stage, *_ in rows:
        stages[peer] = stage
    placement.seconds = {peer: seconds for peer, _, bits, *_ in rows if (seconds := as_number(bits))}
    placement.balance.next_look = as_number(look)
    swarm.changes = [StageChange(peer, NOWHERE, stages[peer]) for peer, _, _, _, is_fresh in rows if is_fresh]
    swarm.apply_placement()
    return step, StageChange(swarm.me, NOWHERE, stages[swarm.me])


def _read(swarm: Swarm, body: Tensor) -> list[int]:
    """Its numbers. ValueError where it is no welcome."""
    numbers = body.view(torch.int64).tolist()
    rows = [numbers[begin : begin + ROW] for begin in range(3, len(numbers), ROW)]
    known = {peer: stage for peer, stage, *_ in rows} if len(numbers) % ROW == 3 % ROW else {}
    fits = bool(known) and len(known) == len(rows) and min(numbers[:2]) >= 1 and swarm.me in known
    if fits and all(0 <= peer < len(swarm.stages) and 0 <= known[peer] < swarm.count for peer in known):
        return numbers
    raise ValueError("a welcome that is none")
