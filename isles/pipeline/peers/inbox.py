"""A peer's messages, sorted by the epoch that they belong to.

An epoch is what lies between two agreements. All peers take part in the same agreements, so a message of an earlier
epoch is too late, and one of a later epoch waits until this peer gets there.

How a peer joins others that are at work (`ask`):

ASK        to all, once it is here; they name it when they agree
WELCOME    from all who were there before, from the epoch on in which it is a member; one is enough

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
"""Kinds: a microbatch; that its forward pass is done; its gradient; an origin has all of its gradients; of an
agreement; a share of the stage's sum to add up; the sum; a batch to judge; its loss; a stage's weights; a wish for
a stage's state; that state; a wish to come; where to begin; a message of an exchange of the outer method.
"""
LARGE: Mapping[int, Channel] = dict.fromkeys((SHARD, MEAN, STATE_TRANSFER), "inner")
"""Large messages among the peers of a stage, which microbatches are not to wait for: the channels of their bodies."""
_COPIES, _SPARE = 8, 1 << 20
"""How many times a stage's weights its state may be, and bytes beside."""
_FORMS = 2
"""How many times a gradient's bytes a codec may make of it."""
_MAX_VALUES = 32
"""Numbers of a word at the most, beside sets of peers and of microbatches."""
COMERS = 8
"""Of whom one peer tells at once that they ask to come; the others are told of later."""
_REST = 0
"""The box of messages that are neither words nor messages of exchanges."""
ROW = 5
"""Numbers of a peer in a welcome."""


def message_lengths(
    form: StageForm, *, gradient: int, state: int, peers: int, microbatches: int, ever: int | None = None
) -> dict[int, range]:
    """The bytes that messages of each kind may have. gradient, state: bytes of the largest stage's. peers: that may be
    there at once; ever: in the whole run, by default as many.
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
    """Over `queue`. epoch: number of the agreements that began. answers: what is done with messages of some kinds as
    soon as this peer looks, whatever it waits for and whichever epoch they are of.
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
        """Take in what comes until all is `ready`, asked again after each message, and every `look` seconds.
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
        """For `seconds`, until a message comes or somebody is lost. DeadlinePassed, naming position `late`, where
        nothing came in `patience` seconds.
        """
        now = self.queue.group.transport.now
        began = now()
        self.queue.wait(seconds)
        if not self.queue.messages and now() - began >= patience:
            raise DeadlinePassed(self.queue.group.ranks[late] if late >= 0 else -1, "pipeline", patience)

    def calls(self) -> list[tuple[int, Tensor]]:
        """The words with which others have begun the next agreement, beside whose they are."""
        votes = self._boxes[VOTE]
        return [(message.sender, message.body) for message in votes if message.header.attempt == self.epoch + 1]

    def of_epoch(self, kind: int = _REST) -> list[QueuedMessage]:
        """Those of this epoch, in the order in which they came: the words, the messages of exchanges (OUTER), or by
        default all others. Those of later epochs stay.
        """
        box = self._boxes[kind]
        self._boxes[kind] = [message for message in box if message.header.attempt > self.epoch]
        return [message for message in box if message.header.attempt == self.epoch]

    def requeue(self, message: QueuedMessage) -> None:
        self._boxes[VOTE].append(message)


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


def as_bits(value: float) -> int:
    """A double as a number of 8 bytes."""
    return struct.unpack("<q", struct.pack("<d", value))[0]


def as_number(bits: int) -> float:
    """The double whose bits `as_bits` returned."""
    return struct.unpack("<d", struct.pack("<q", bits))[0]
