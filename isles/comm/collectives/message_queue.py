"""Unexpected messages: a queue of what any member of a group sends, in the order of arrival.

    message = head | body
    head    = 10 numbers of 8 bytes: magic, run, kind, step, attempt, number, bytes of the body, and three figures
    body    = raw bytes, received into their final memory. Some kinds have their own channel for bodies: these share the
              link with other messages, and delay only messages of the same sender to the same receiver

In collectives all members know who sends what and when. This queue is for traffic that is decided at run time. Behind
the computation, it always waits for one head of every other member, and then for the body that the head announces. It
allocates memory only for lengths that the configuration allows. An invalid message ends reception from its sender
(`lost`), and nothing else. Messages of one sender arrive in the order in which they were sent.
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
_ADDRESSES = 1024  # message addresses, reused in turn
_UNREAD = 256  # unread messages of one sender, at which reception from it pauses


class MessageHeader(NamedTuple):
    """The header of a message. kind: determines the lengths allowed. nanoseconds, queue, extra: sender's figures."""

    kind: int
    step: int
    attempt: int = 0
    number: int = 0
    nanoseconds: int = 0
    queue: int = 0
    extra: int = 0


class QueuedMessage(NamedTuple):
    """A received message. sender: position in the group. body: uint8 (n,). wire: seconds from the head's arrival to the
    body's; 0 if the body had already arrived.
    """

    sender: int
    header: MessageHeader
    body: Tensor
    wire: float


class MessageQueue:
    """One worker's messages from and to the others of `group`, on the group's channel.

    run: a number that identifies this run; all its workers share it. lengths: allowed lengths of bodies in bytes, by
    kind. channels: by kind, for bodies that would delay other messages on the group's channel. met: positions to listen
    to from the start (default: all others); `meet` adds later ones. Create one queue per group.
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
        """Messages that `take` has not returned yet."""
        self.lost: dict[int, CommError] = {}
        """Positions from which no message arrives any more, with the reason."""
        self.refused: Counter[int] = Counter()
        """Number of invalid messages, by position."""
        self._news: WaitEvent | None = None
        self._reported_losses = 0  # lost members that `wait` has returned for
        self._unread: Counter[int] = Counter()
        self._sent: Counter[int] = Counter()  # messages, by position
        self._room: dict[int, WaitEvent] = {}
        self._sends: list[Work] = []
        self._look_at = 0  # number of sends at which those that are done are dropped
        self._met: set[int] = set()
        self._met_lock = threading.Lock()  # any thread may call `meet`, which must listen only once
        for position in group.others if met is None else met:
            self.meet(position)

    def meet(self, position: int) -> None:
        """Listen to `position` from now on. A second call has no effect. Safe in any thread."""
        with self._met_lock:
            is_new = position not in self._met and position != self.group.rank
            self._met.add(position)
        if is_new:
            self.group.start(self._listen(position), self.group.channel, math.inf)

    def send(self, position: int, header: MessageHeader, body: Tensor | None = None) -> None:
        """Send a message. Do not write to `body` (uint8) after this call. Sends nothing to a lost member."""
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
        """Remove and return the oldest message; None if there is none."""
        if not self.messages:
            return None
        message = self.messages.popleft()
        self._unread[message.sender] -= 1
        if self._unread[message.sender] < _UNREAD and message.sender in self._room:
            self._room.pop(message.sender).set()
        return message

    def wait(self, seconds: float = math.inf) -> None:
        """Wait until there is a message, another member is lost, or `seconds` have passed."""
        event = self._news = self.group.transport.event(seconds)
        if not self.messages and self._reported_losses == len(self.lost):
            self.group.start(any_done([event]), self.group.channel, math.inf).wait()
        event.set()
        self._news, self._reported_losses = None, len(self.lost)

    def give_up(self, position: int, why: CommError) -> None:
        """Mark `position` as lost, and drop its messages."""
        self.lost.setdefault(position, why)
        self.messages = deque(message for message in self.messages if message.sender != position)

    def refuse(self, position: int, why: CommError) -> None:
        """Count a message of `position` whose body is invalid, and give the member up."""
        self.refused[position] += 1
        self.give_up(position, why)

    def settle(self, seconds: float = math.inf) -> None:
        """Wait until all messages have left, at most `seconds`: a member that stopped listening receives nothing."""
        event = self.group.transport.event(seconds)
        for work in self._sends:
            try:
                self.group.start(any_done([work, event]), self.group.channel).wait()
            except CommError:
                continue  # the peer is lost; `lost` records it
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
        """The address of one sender's message of that number. Messages on different channels may overtake each other,
        so the number is part of it. kind: of the message whose body is addressed; None: address the head.
        """
        channel = self.group.channel if kind is None else self._channels.get(kind, self.group.channel)
        return self.group.call(channel, round=number % _ADDRESSES)

    def _read(self, position: int, head: Tensor) -> tuple[MessageHeader, int]:
        """Parse a head: (header, length of the body). Malformed if it is not a head of this run."""
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
