"""Messages that nobody asked for, from any member of a group, as they come.

    message = head | body
    head    = 10 numbers of 8 bytes: magic, run, kind, step, attempt, number, bytes of the body, and three figures
    body    = so many bytes, raw, received where they stay; of some kinds on a channel of its own, so that it shares the
              link with other messages and delays none but those of the same sender to the same receiver

Collectives know who sends what and when; these messages are for what is decided while it travels. From every other
member one head is awaited at any time, behind the computation, then the body that it announces: memory is taken only
for a length that the configuration allows. What cannot be a message of this run ends reception from its sender
(`lost`), and nothing else. Messages of one sender come in the order in which they were sent.
"""

from __future__ import annotations

import math
import threading
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from itertools import count
from typing import NamedTuple

import torch
from torch import Tensor

from isles.comm.call import Call
from isles.comm.collectives.basic import any_done
from isles.comm.errors import CommError, Malformed
from isles.comm.group import Group
from isles.comm.tags import Channel
from isles.comm.transport import Steps, WaitEvent, Work

MAGIC = 0x49534C45534D4131  # "ISLESMA1"
_HEAD, _BODY = 62, 63  # phases that no task of a pipeline has (`isles.pipeline.wire.phase`)
_NUMBERS = 10
HEAD = 8 * _NUMBERS
"""Bytes of a message's head."""
_ADDRESSES = 1024  # of messages, used again in turn
_UNREAD = 256  # unread messages of one sender before no more are received from it


class MessageHeader(NamedTuple):
    """What a message is about. kind: which lengths it may have. nanoseconds, queue, extra: figures of the sender."""

    kind: int
    step: int
    attempt: int = 0
    number: int = 0
    nanoseconds: int = 0
    queue: int = 0
    extra: int = 0


class QueuedMessage(NamedTuple):
    """sender: position in the group. body: uint8 (n,). wire: seconds from the head's arrival to the body's, where the
    body came after it was waited for; else 0.
    """

    sender: int
    header: MessageHeader
    body: Tensor
    wire: float


class MessageQueue:
    """One worker's messages from and to the others of `group`, on the group's channel.

    run: a number that all workers of this run share and others do not. lengths: of bodies in bytes, by kind. channels:
    by kind, of bodies that would delay others on the group's. Made once for a group: it listens to `met` from
    then on, by default to all others, and to who comes later once it has met it.
    """

    def __init__(
        self,
        group: Group,
        *,
        run: int,
        lengths: Mapping[int, range],
        channels: Mapping[int, Channel] | None = None,
        met: Sequence[int] | None = None,
    ) -> None:
        self.group, self.run, self.lengths = group, run, dict(lengths)
        self._channels = dict(channels or {})
        self.messages: deque[QueuedMessage] = deque()
        """Not taken yet."""
        self.lost: dict[int, CommError] = {}
        """Positions from which nothing more comes, and why."""
        self.refused: Counter[int] = Counter()
        """Letters that could not be, by position."""
        self._news: WaitEvent | None = None
        self._reported_losses = 0  # lost members that `wait` has returned for
        self._unread: Counter[int] = Counter()
        self._sent: Counter[int] = Counter()  # messages, by position
        self._room: dict[int, WaitEvent] = {}
        self._sends: list[Work] = []
        self._look_at = 0  # so many sends: then those that are done are forgotten
        self._met: set[int] = set()
        self._met_lock = threading.Lock()  # `meet` may come from any thread, and must listen once
        for position in group.others if met is None else met:
            self.meet(position)

    def meet(self, position: int) -> None:
        """Listen to `position` from now on; again: nothing. May be called in any thread."""
        with self._met_lock:
            is_new = position not in self._met and position != self.group.rank
            self._met.add(position)
        if is_new:
            self.group.start(self._listen(position), self.group.channel, math.inf)

    def send(self, position: int, header: MessageHeader, body: Tensor | None = None) -> None:
        """Send a message. `body`, uint8, must not be written to from now on. Nothing is sent to a lost member."""
        if position in self.lost:
            return
        length = 0 if body is None else body.numel()
        head = torch.tensor([MAGIC, self.run, *header[:4], length, *header[4:]], dtype=torch.int64, device="cpu")
        number = self._sent[position]
        self._sent[position] += 1
        if len(self._sends) >= self._look_at:  # rarely, because each pass checks all of them
            self._sends = [work for work in self._sends if not work.done()]
            self._look_at = 2 * len(self._sends) + _UNREAD
        self._sends.append(self._address(number).send(position, head, _HEAD))
        if body is not None and length:
            self._sends.append(self._address(number, header.kind).send(position, body, _BODY))

    def take(self) -> QueuedMessage | None:
        """The oldest message received and not taken yet."""
        if not self.messages:
            return None
        message = self.messages.popleft()
        self._unread[message.sender] -= 1
        if self._unread[message.sender] < _UNREAD and message.sender in self._room:
            self._room.pop(message.sender).set()
        return message

    def wait(self, seconds: float = math.inf) -> None:
        """Until a message is here, or another member is lost, or `seconds` have passed."""
        event = self._news = self.group.transport.event(seconds)
        if not self.messages and self._reported_losses == len(self.lost):
            self.group.start(any_done([event]), self.group.channel, math.inf).wait()
        event.set()
        self._news, self._reported_losses = None, len(self.lost)

    def give_up(self, position: int, why: CommError) -> None:
        """Neither wait for `position` any more nor read what it sends."""
        self.lost.setdefault(position, why)
        self.messages = deque(message for message in self.messages if message.sender != position)

    def refuse(self, position: int, why: CommError) -> None:
        """A message of `position` is invalid in a way that its head did not show."""
        self.refused[position] += 1
        self.give_up(position, why)

    def settle(self, seconds: float = math.inf) -> None:
        """Wait until what was sent has left, for so long at most: a member that stopped listening receives nothing."""
        event = self.group.transport.event(seconds)
        for work in self._sends:
            try:
                self.group.start(any_done([work, event]), self.group.channel).wait()
            except CommError:
                continue  # its peer is lost: `lost` says so
        self._sends = []

    def _listen(self, position: int) -> Steps[None]:
        try:
            for number in count():
                head = torch.empty(_NUMBERS, dtype=torch.int64, device="cpu")
                arrival = self._address(number).recv(position, head, _HEAD)
                yield arrival
                header, length = self._read(position, head)
                body, wire = torch.empty(length, dtype=torch.uint8, device="cpu"), 0.0
                if length:
                    work = self._address(number, header.kind).recv(position, body, _BODY)
                    waited = not work.done()
                    yield work
                    wire = work.at - arrival.at if waited else 0.0
                if position in self.lost:
                    return
                self._unread[position] += 1
                self.messages.append(QueuedMessage(position, header, body, wire))
                self._notify()
                if self._unread[position] >= _UNREAD:
                    room = self._room[position] = self.group.transport.event()
                    yield room
        except CommError as error:
            if isinstance(error, Malformed):
                self.refused[position] += 1
            self.lost.setdefault(position, error)
            self._notify()

    def _address(self, number: int, kind: int | None = None) -> Call:
        """Of one sender's message of that number: messages may take different channels, and pass each other. kind:
        whose body it is of; None: the head.
        """
        channel = self.group.channel if kind is None else self._channels.get(kind, self.group.channel)
        return self.group.call(channel, round=number % _ADDRESSES)

    def _read(self, position: int, head: Tensor) -> tuple[MessageHeader, int]:
        """Malformed where the head is none of this run."""
        magic, run, kind, step, attempt, number, length, *figures = head.tolist()
        header = MessageHeader(kind, step, attempt, number, *figures)
        rank = self.group.ranks[position]
        if magic != MAGIC:
            raise Malformed(rank, "the head of a message begins with something else")
        if run != self.run:
            raise Malformed(rank, "a message of another run, or of another configuration")
        if length not in self.lengths.get(kind, range(0)):
            raise Malformed(rank, f"a message of kind {kind} with {length} bytes")
        if min(header) < 0:
            raise Malformed(rank, "the head of a message has numbers below 0")
        return header, length

    def _notify(self) -> None:
        if (event := self._news) is not None:
            event.set()
