"""A peer's messages, sorted by the epoch that they belong to.

An epoch is the time between two agreements. All peers take part in the same agreements, so a message of an earlier
epoch is dropped, and one of a later epoch waits until this peer reaches that epoch.

How a peer joins others whose run has begun (`ask`):

ASK        to all of them; they name the new peer in their next agreement
WELCOME    from all earlier members, in the first epoch in which the new peer is a member; one is enough

What a welcome holds depends on the system. A malformed message closes the queue from its sender, and nothing else.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from torch import Tensor

from isles.comm.collectives.message_queue import MessageHeader, MessageQueue, QueuedMessage
from isles.comm.errors import DeadlinePassed, Malformed, PeerLost
from isles.comm.tags import Channel
from isles.network.routing.events import Task
from isles.pipeline.swarm.ledger import words_for
from isles.pipeline.wire import StageForm

(
    FORWARD,
    TAKEN,
    BACKWARD,
    HOME,
    VOTE,
    SHARD,
    MEAN,
    LOOK,
    LOSS,
    STATE,
    STATE_REQUEST,
    STATE_TRANSFER,
    ASK,
    WELCOME,
    OUTER,
) = range(1, 16)
"""Kinds of messages, in order: a microbatch; its forward pass is done; its gradient; an origin has all of its
gradients; votes of an agreement; a share of the stage's sum to add up; the sum; a batch to evaluate; its loss; a
stage's weights; a request for a stage's state; that state; a request to join; the welcome of a joining peer; a message
of an exchange of the outer method.
"""
LARGE: Mapping[int, Channel] = dict.fromkeys((SHARD, MEAN, STATE_TRANSFER), "inner")
"""Channels of the bodies of large messages within a stage, so that microbatches do not queue behind them."""
_COPIES, _SPARE = 8, 1 << 20
"""A stage's state may have this many times the bytes of its weights, plus `_SPARE` bytes."""
_FORMS = 2
"""A codec may make this many times a gradient's bytes."""
_MAX_VALUES = 32
"""The most numbers in a vote, without the sets of peers and of microbatches."""
MAX_JOINERS = 8
"""The most requests to join in one vote; further ones wait for the next vote."""
_REST = 0
"""The box of messages that are neither votes nor messages of exchanges."""
ROW = 5
"""Numbers per peer in a welcome."""


def message_lengths(
    form: StageForm, *, gradient: int, state: int, peers: int, microbatches: int, ever: int | None = None
) -> dict[int, range]:
    """The valid lengths of messages in bytes, by kind. gradient, state: bytes of the largest stage's. peers: the most
    at one time; ever: the most in the whole run, by default `peers`.
    """
    forward, back = form.nbytes(Task("F", 0, 1)), form.nbytes(Task("B", 0, 0))
    votes = 8 * peers * (_MAX_VALUES + words_for(peers) + words_for(microbatches))
    return {
        FORWARD: range(forward, forward + 1),
        TAKEN: range(1),
        BACKWARD: range(back, back + 1),
        HOME: range(1),
        VOTE: range(0, votes + 1, 8),
        SHARD: range(gradient + 1),
        MEAN: range(gradient + 1),
        LOOK: range(1, forward + 1),
        LOSS: range(8, 9),
        STATE: range(state + 1),
        STATE_REQUEST: range(1),
        STATE_TRANSFER: range(_COPIES * state + _SPARE),
        ASK: range(1),
        WELCOME: range(0, 8 * (ROW * (peers if ever is None else ever) + _MAX_VALUES) + 1, 8),
        OUTER: range(_FORMS * gradient + _SPARE),
    }


class PeerInbox:
    """Sorts the messages of `queue`. epoch: number of agreements begun. answers: handlers by message kind, called as
    soon as `sort` sees such a message, in any epoch.
    """

    def __init__(self, queue: MessageQueue) -> None:
        self.queue, self.epoch = queue, 0
        self.answers: dict[int, Callable[[QueuedMessage], object]] = {}
        self._boxes: dict[int, list[QueuedMessage]] = {VOTE: [], OUTER: [], _REST: []}

    def sort(self) -> None:
        while (message := self.queue.take()) is not None:
            if (answer := self.answers.get(message.header.kind)) is not None:
                answer(message)
            elif message.header.attempt >= self.epoch:
                self._boxes.get(message.header.kind, self._boxes[_REST]).append(message)

    def wait_for(self, ready: Callable[[], bool], patience: float, late: int = -1, look: float = math.inf) -> None:
        """Receive messages until `ready()`, which is called after each message and every `look` seconds.
        DeadlinePassed, naming position `late`, after `patience` seconds.
        """
        now = self.queue.group.transport.now
        until = now() + patience
        while True:
            self.sort()
            if ready():
                return
            if now() >= until:
                rank = self.queue.group.ranks[late] if late >= 0 else -1
                raise DeadlinePassed(rank, self.queue.group.channel, patience)
            self.queue.wait(min(look, until - now()))

    def wait_for_news(self, seconds: float, patience: float, late: int = -1) -> None:
        """Wait up to `seconds` for a message or a loss. DeadlinePassed, naming position `late`, if no message arrived
        in `patience` seconds.
        """
        now = self.queue.group.transport.now
        began = now()
        self.queue.wait(seconds)
        if not self.queue.messages and now() - began >= patience:
            raise DeadlinePassed(self.queue.group.ranks[late] if late >= 0 else -1, "pipeline", patience)

    def calls(self) -> list[tuple[int, Tensor]]:
        """Votes of peers that have begun the next agreement: (sender, body)."""
        votes = self._boxes[VOTE]
        return [(message.sender, message.body) for message in votes if message.header.attempt == self.epoch + 1]

    def of_epoch(self, kind: int = _REST) -> list[QueuedMessage]:
        """Take this epoch's messages in order of arrival: votes (VOTE), messages of exchanges (OUTER), or by default
        all others. Those of later epochs stay.
        """
        box = self._boxes[kind]
        self._boxes[kind] = [message for message in box if message.header.attempt > self.epoch]
        return [message for message in box if message.header.attempt == self.epoch]

    def requeue(self, message: QueuedMessage) -> None:
        self._boxes[VOTE].append(message)


W = TypeVar("W")
_PATIENCE = 100  # deadlines: the others answer only at their next agreement
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
    """Ask `others`, of which some may be lost, to join their run, and wait for a welcome. Returns what `read` decodes
    from it (ValueError: invalid), or None once `gives_up()`. number, body: of the request.

    PeerLost if all of them are lost first; DeadlinePassed if none answers within 100 times `patience`.
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
        raise PeerLost(-1, "all peers that were asked to admit this one")
    del inbox.answers[WELCOME]
    return came[0] if came else None


def as_bits(value: float) -> int:
    """The bits of a double as a signed 64-bit integer."""
    return struct.unpack("<q", struct.pack("<d", value))[0]


def as_number(bits: int) -> float:
    """The double whose bits `as_bits` returned."""
    return struct.unpack("<d", struct.pack("<q", bits))[0]
