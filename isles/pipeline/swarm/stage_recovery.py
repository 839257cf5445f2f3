"""How a peer joins a swarm between two steps and gets its stage's state, and how a stage that has lost all peers is
rebuilt.

A peer requests the state from a donor of its stage. Donors answer while they wait for messages, until an exchange
begins:

    STATE_REQUEST    to the first donor; to the next one if that is lost
    STATE_TRANSFER   the state, as bytes

A stage without peers is rebuilt from its neighbours, and the step begins again:

    wait     some seconds for a joining peer, if one can still join
    agree    on that peer; if none has asked, a peer of a stage that has several moves
    rebuild  the mean of a peer of the stage before and one of the stage after, weighted by the norms of their gradients
             (`isles.pipeline.recovery`, CheckFree)

The first and the last stage are not rebuilt: no other stage has an embedding or a head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

import torch
from torch import Tensor

from isles.comm.collectives.message_queue import MessageHeader, QueuedMessage
from isles.comm.errors import DeadlinePassed
from isles.comm.group import numbers
from isles.pipeline.peers.inbox import ROW, STATE_REQUEST, STATE_TRANSFER, WELCOME, PeerInbox, as_bits, as_number, ask
from isles.pipeline.recovery import sources
from isles.pipeline.swarm.placement import NOWHERE, StageChange
from isles.pipeline.swarm.swarm import StageLost, Swarm

AsBytes = Callable[[], bytes]


class StageStateServer:
    """Answers requests for this peer's state, which `state` returns when it is sent. Requests wait while it is closed:
    during an exchange the weights are between two valid states.
    """

    def __init__(self, inbox: PeerInbox, state: AsBytes) -> None:
        self._inbox, self._state = inbox, state
        self._is_open = True
        self._asked: list[QueuedMessage] = []
        inbox.answers[STATE_REQUEST] = self._answer

    def close(self) -> None:
        """Queue requests from now on."""
        self._is_open = False

    def open(self) -> None:
        """Answer the queued requests, and later ones at once."""
        self._is_open = True
        asked, self._asked = self._asked, []
        for message in asked:
            self._answer(message)

    def _answer(self, message: QueuedMessage) -> None:
        if not self._is_open:
            self._asked.append(message)
            return
        body = torch.frombuffer(bytearray(self._state()), dtype=torch.uint8)
        self._inbox.queue.send(message.sender, MessageHeader(STATE_TRANSFER, 0, message.header.attempt), body)


def fetch_state(inbox: PeerInbox, donors: Sequence[int], patience: float) -> Tensor | None:
    """The state from the first of `donors` that sends it, (n,) uint8; None if all are lost before. DeadlinePassed if
    one is silent for `patience` seconds.
    """
    lost, came = inbox.queue.lost, dict[int, Tensor]()
    inbox.answers[STATE_TRANSFER] = lambda message: came.update({message.sender: message.body})
    try:
        for donor in donors:
            if donor not in lost:
                inbox.queue.send(donor, MessageHeader(STATE_REQUEST, 0, inbox.epoch))
                inbox.wait_for(lambda donor=donor: donor in came or donor in lost, patience, donor)
            if donor in came:
                return came[donor]
        return None
    finally:
        del inbox.answers[STATE_TRANSFER]


def rebuild(swarm: Swarm, step: int, patience: float, *, comers: bool) -> list[StageChange]:
    """Assign a peer to every stage that has lost all of them; all remaining peers call it together. Returns the
    changes. step: the current one. patience: seconds to wait for a joining peer. comers: whether peers may join now.
    StageLost if no peer can be assigned, or a neighbour stage is lost too.
    """
    if comers:
        _await_comers(swarm, patience)
    votes = swarm.agreement.agree(swarm.asking)
    lost = [stage for stage in range(swarm.count) if not swarm.peers(stage)]
    for stage in lost:
        check_rebuildable(stage, lost, swarm.count)
    asked = swarm.admissible(peer for vote in votes.values() for peer in vote) if comers else []
    changes = swarm.placement.rescue(swarm.agreement.members, asked, lost)
    for stage in set(lost) - {change.after for change in changes}:
        raise StageLost(stage, "no other stage has a second peer")
    swarm.rearrange(changes)
    welcome(swarm, step)
    return changes


def check_rebuildable(stage: int, lost: Sequence[int], stages: int) -> None:
    """Raise StageLost if `stage` cannot be rebuilt from stages that are not `lost`."""
    if stage in (0, stages - 1):
        raise StageLost(stage, f"no other stage has its {'head' if stage else 'embedding'}")
    gone = [other for other in sources("checkfree", stage, stages) if other in lost]
    if gone:
        raise StageLost(stage, f"its neighbour, stage {gone[0]}, is lost too")


def fetch_neighbour_states(swarm: Swarm, stage: int) -> list[Tensor]:
    """The states of the stages that `stage` is rebuilt from, one from a peer of each, (n,) uint8. StageLost if all
    donors of one are lost before.
    """
    fresh = {change.peer for change in swarm.changes}
    found = []
    for source in sources("checkfree", stage, swarm.count):
        donors = [peer for peer in swarm.peers(source) if peer not in fresh]
        state = fetch_state(swarm.agreement.inbox, donors, swarm.agreement.patience)
        if state is None:
            raise StageLost(source)
        found.append(state)
    return found


def _await_comers(swarm: Swarm, patience: float) -> None:
    """Wait until a peer asks to join, or another peer has stopped waiting."""
    inbox = swarm.agreement.inbox

    def is_over() -> bool:
        absent = {peer for peer, stage in enumerate(swarm.stages) if stage == NOWHERE}
        return bool(swarm.admissible(swarm.asking) or inbox.calls()) or absent <= inbox.queue.lost.keys()

    with suppress(DeadlinePassed):
        inbox.wait_for(is_over, patience)


def welcome(swarm: Swarm, step: int) -> None:
    """Send the joined peers the stages and members, right after `Swarm.arrange`."""
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
    """Join the swarm of `others`, to serve stage `wish` if possible; see `ask`. Returns the step that this peer begins
    with, and its own change.
    """
    inbox, agreement = swarm.agreement.inbox, swarm.agreement
    came = ask(inbox, others, lambda body: _read(swarm, body), agreement.patience, number=wish + 1)
    assert came is not None
    epoch, step, look, *rest = came
    rows = [rest[begin : begin + ROW] for begin in range(0, len(rest), ROW)]
    inbox.epoch = epoch
    agreement.add_members([peer for peer, _, _, is_member, _ in rows if is_member])
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
    """Decode a welcome. ValueError if it is none."""
    numbers = body.view(torch.int64).tolist()
    rows = [numbers[begin : begin + ROW] for begin in range(3, len(numbers), ROW)]
    known = {peer: stage for peer, stage, *_ in rows} if len(numbers) % ROW == 3 % ROW else {}
    fits = bool(known) and len(known) == len(rows) and min(numbers[:2]) >= 1 and swarm.me in known
    if fits and all(0 <= peer < len(swarm.stages) and 0 <= known[peer] < swarm.count for peer in known):
        return numbers
    raise ValueError("an invalid welcome")
