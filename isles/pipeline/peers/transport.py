"""Collectives over a swarm's message queue: a transport for protocols that know nothing of swarms.

    send      a message of kind OUTER, with the channel, round, fragment and phase of its tag
    recv      the message of this epoch with the same tag, whenever it arrives
    run       steps the protocol as its messages arrive, while this peer waits for any of its transfers

An exchange belongs to the epoch in which it began (`isles.pipeline.peers.inbox`), so messages of a failed one are of an
earlier epoch and are dropped. A peer that has begun the next agreement sends nothing more in this epoch: receives from
it fail as lost, so none waits for a peer that gave the exchange up. Requests of other kinds are answered meanwhile.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar, cast

from torch import Tensor

from isles.comm.collectives.message_queue import MessageHeader, QueuedMessage
from isles.comm.errors import CommError, DeadlinePassed, Malformed, PeerLost
from isles.comm.tags import CHANNELS, MAX_FRAGMENTS, MAX_PHASES, Channel, Tag
from isles.comm.traffic import Traffic
from isles.comm.transport import LinkEstimate, Steps, WaitEvent, Work, works_of
from isles.pipeline.peers.inbox import OUTER, PeerInbox

T = TypeVar("T")


class _Address(NamedTuple):
    epoch: int
    sender: int
    channel: int
    round: int
    place: int  # fragment and phase


@dataclass(slots=True, eq=False)
class _Message:
    """See `isles.comm.transport.Work`."""

    peer: int | None
    at: float = math.inf
    error: Exception | None = None

    def done(self) -> bool:
        return self.at < math.inf or self.error is not None


class MessageTransport:
    """The only transport over `inbox` (`Agreement.transport`): two would take each other's messages. See
    `isles.comm.transport.Transport`. Uses the clock and traffic counts of the queue's transport. past: see `Agreement`.
    Bodies and waits count on the channel of their exchange, headers on that of the queue.
    """

    native = False

    def __init__(self, inbox: PeerInbox, past: Callable[[], Mapping[int, CommError]]) -> None:
        self.inbox, self._past = inbox, past
        below = self.below = self.inbox.queue.group.transport
        self.rank, self.size = below.rank, below.size
        self.traffic: Traffic = below.traffic
        self._positions = {rank: position for position, rank in enumerate(self.inbox.queue.group.ranks)}
        self._awaited: dict[_Address, tuple[_Message, Tensor]] = {}
        self._early: dict[_Address, QueuedMessage] = {}
        self._running: list[MessageTransfer[Any]] = []

    @property
    def step_seconds(self) -> float:
        return self.below.step_seconds

    @property
    def away_seconds(self) -> float:
        return self.below.away_seconds

    def send(self, peer: int, data: Tensor, tag: Tag) -> Work:
        """Send a copy of `data`: the returned work is done at once."""
        channel, place = CHANNELS.index(tag.channel), tag.fragment * MAX_PHASES + tag.phase
        note = MessageHeader(OUTER, tag.round, self.inbox.epoch, place, queue=channel)
        self.inbox.queue.send(self._positions[peer], note, data.clone())
        if data.numel() and self._positions[peer] not in self.inbox.queue.lost:
            self.traffic.reassign(data.numel(), sent=True, before=self.inbox.queue.group.channel)
        return _Message(peer, at=self.now())

    def recv(self, peer: int | None, out: Tensor, tag: Tag) -> Work:
        assert peer is not None, "an exchange knows its members"
        place = tag.fragment * MAX_PHASES + tag.phase
        address = _Address(self.inbox.epoch, self._positions[peer], CHANNELS.index(tag.channel), tag.round, place)
        message = _Message(peer)
        self._awaited[address] = message, out
        if address in self._early:
            self._arrive(address, self._early.pop(address))
        else:
            self._read()  # the sender may be lost already, and no later message would report it
        return message

    def run(self, protocol: Steps[T], channel: Channel, deadline: float) -> MessageTransfer[T]:
        transfer = MessageTransfer(self, protocol, channel, deadline)
        self._running.append(transfer)
        transfer.go_on()
        return transfer

    def go_on(self) -> None:
        """Read the messages that arrived, and step the transfers that waited for them."""
        self.inbox.sort()
        self._read()
        for transfer in list(self._running):
            transfer.go_on()
        self._running = [transfer for transfer in self._running if not transfer.is_over]
        if not self._running:  # what is still awaited belongs to failed exchanges
            self._awaited.clear()
            self._early = {
                address: message for address, message in self._early.items() if address.epoch == self.inbox.epoch
            }

    def _read(self) -> None:
        """Complete the receives whose messages are here, then fail those whose sender is lost."""
        for message in self.inbox.of_epoch(OUTER):
            note, epoch = message.header, self.inbox.epoch
            address = _Address(epoch, message.sender, note.queue, note.step, note.number)
            if address in self._awaited:
                self._arrive(address, message)
            elif note.queue < len(CHANNELS) and note.number < MAX_FRAGMENTS * MAX_PHASES:
                self._early[address] = message
        self._lose()

    def _arrive(self, address: _Address, message: QueuedMessage) -> None:
        transfer, out = self._awaited.pop(address)
        if message.body.numel() == out.numel():
            out.copy_(message.body)
            transfer.at = self.now()
            if out.numel():
                self.traffic.reassign(out.numel(), sent=False, before=self.inbox.queue.group.channel)
            return
        assert transfer.peer is not None
        transfer.error = Malformed(transfer.peer, f"{message.body.numel()} bytes in place of {out.numel()}")
        self.inbox.queue.refuse(message.sender, cast(Malformed, transfer.error))

    def _lose(self) -> None:
        lost, ranks = {**self._past(), **self.inbox.queue.lost}, self.inbox.queue.group.ranks
        for address in [address for address in self._awaited if address.sender in lost]:
            why = lost[address.sender]
            error = why if isinstance(why, PeerLost) else PeerLost(ranks[address.sender], str(why))
            self._awaited.pop(address)[0].error = error

    def event(self, seconds: float = math.inf) -> WaitEvent:
        return self.below.event(seconds)

    def link_estimate(self) -> LinkEstimate | None:
        return self.below.link_estimate()

    def now(self) -> float:
        return self.below.now()

    def compute(self, seconds: float) -> None:
        self.below.compute(seconds)

    def state_dict(self) -> dict[str, Any]:
        """Nothing: no exchange is in flight between two steps."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to restore."""

    def close(self) -> None:
        """Nothing to close: the queue's transport is closed by its owner."""


class MessageTransfer(Generic[T]):
    """A protocol that advances as messages arrive. See `isles.comm.transport.Transfer`."""

    def __init__(self, transport: MessageTransport, protocol: Steps[T], channel: Channel, seconds: float) -> None:
        self._transport, self._protocol = transport, protocol
        self._channel, self._seconds = channel, seconds
        self._until = transport.now() + seconds
        self._works: list[Work] = []
        self._needed = 0
        self._result: T | None = None
        self._error: Exception | None = None
        self.is_over = False

    def wait(self) -> T:
        channels, before = self._transport.traffic, self._transport.inbox.queue.group.channel
        blocked = channels[before].blocked_seconds
        try:
            return self._wait()
        finally:
            blocked = channels[before].blocked_seconds - blocked
            channels[before].blocked_seconds -= blocked
            channels[self._channel].blocked_seconds += blocked

    def _wait(self) -> T:
        try:
            self._transport.inbox.wait_for(self.done, self._until - self._transport.now())
        except DeadlinePassed:
            self._end(DeadlinePassed(self._late(), self._channel, self._seconds))
        if self._error is not None:
            raise self._error
        return cast(T, self._result)

    def done(self) -> bool:
        self._transport.go_on()
        return self.is_over

    def go_on(self) -> None:
        """Step the protocol as far as its messages allow."""
        while not self.is_over:
            failed = next((work.error for work in self._works if work.error is not None), None)
            if failed is None and sum(work.done() for work in self._works) < self._needed:
                return
            try:
                waited = self._protocol.send(None) if failed is None else self._protocol.throw(failed)
            except StopIteration as end:
                self._result, self.is_over = end.value, True
            except Exception as error:  # `wait` raises it
                self._end(error)
            else:
                works, self._needed = works_of(waited)
                self._works = list(works)

    def _late(self) -> int:
        return next((work.peer for work in self._works if not work.done() and work.peer is not None), -1)

    def _end(self, error: Exception) -> None:
        self._error, self.is_over = error, True
        self._protocol.close()
