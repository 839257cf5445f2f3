"""The sending side: all messages to one peer, in their order, each buffered until the peer has said what became of it.

A connection that breaks is made anew, and what the peer has not taken is sent on it once more, from its first byte.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Protocol

import numpy as np

from isles.comm.errors import PeerLost, RoundClosed
from isles.comm.gloo.transfers import PostedWork
from isles.comm.sockets.connection import LinkLost
from isles.comm.tags import Tag
from isles.membership.p2p.stream import CHUNK, PIECE, REFUSED, ROUND_CLOSED, TAKEN, Head, Stream

_LOOK = 30.0  # seconds until it is asked again whether a peer is reached directly to which nothing is to be sent
_AGAIN, _SELDOM = 0.1, 3.0  # seconds until the next try to reach a peer: twice as many each time


class Carrier(Protocol):
    """What reaches a peer: `ElasticTransport`. resent: messages sent again."""

    resent: int

    def add_sequence(self) -> int:
        """A number, higher than those before."""
        ...

    def connected(self, peer: int, lane: int, *, soon: bool) -> Stream | None:
        """That connection of the pair, to send to `peer` on; None where it would be relayed and nothing is to be sent
        `soon`. LinkLost where it is not reached.
        """
        ...

    def disconnected(self, peer: int, stream: Stream) -> None:
        """That connection is broken."""
        ...

    def sent(self, peer: int, way: str, size: int) -> None:
        """So many bytes have left for `peer`."""
        ...

    def passed(self, peer: int, tag: Tag) -> None:
        """`peer` has said that the round of `tag`, and all before, are over there."""
        ...


def lost_peer(peer: int, why: str | PeerLost) -> PeerLost:
    """The error for works with `peer`; why: it, or its text."""
    return PeerLost(peer, why) if isinstance(why, str) else why


class PartedWork:
    """Of a message in parts: over with the last of them, as the first that fails. Until then its buffer is in use."""

    def __init__(self, work: PostedWork, parts: int) -> None:
        self._work, self._left, self._lock = work, parts, threading.Lock()
        self._error: Exception | None = None

    def finished(self, error: Exception | None = None) -> None:
        """One of them is over."""
        with self._lock:
            self._left -= 1
            self._error = self._error or error
            is_over = not self._left
        if is_over:
            self._work.finished(self._error)


class OutgoingMessage:
    """A part of one on its way out: (n,) uint8 `data` for the address `tag`. kind: `PIECE`, or `CLOSE_ROUND` without
    data.
    """

    def __init__(self, work: PartedWork, data: np.ndarray, tag: Tag, kind: int = PIECE) -> None:
        self.work, self.data, self.tag, self.kind = work, data, tag, kind
        self.was_sent = False


class Outgoing:
    """All messages to `peer` on one connection, sent by a thread of its own."""

    def __init__(self, carrier: Carrier, peer: int, lane: int) -> None:
        self._carrier, self._peer, self._lane = carrier, peer, lane
        self._messages: OrderedDict[int, OutgoingMessage] = OrderedDict()  # that the peer has not said anything of
        self._waiting: list[int] = []  # numbers of those that are to be sent on this connection
        self._stream: Stream | None = None
        self._over: str | PeerLost | None = None
        self._changed = threading.Condition()
        self._sending = -1
        self._thread = threading.Thread(target=self._serve, name=f"isles-to-{peer}", daemon=True)
        self._thread.start()

    def add(self, message: OutgoingMessage) -> None:
        """Queue `message` behind the others."""
        with self._changed:
            over = self._over
            if over is None:
                number = self._carrier.add_sequence()
                self._messages[number] = message
                self._waiting.append(number)
                self._notify()
        if over is not None:
            message.work.finished(lost_peer(self._peer, over))

    def drop(self, has_passed: Callable[[Tag], bool], *why: str) -> None:
        """Send nothing any more to addresses that have passed. why: for `RoundClosed`."""
        with self._changed:
            numbers = [number for number, message in self._messages.items() if has_passed(message.tag)]
            ended = [self._messages.pop(number) for number in numbers]
            if self._sending in numbers and threading.current_thread() is not self._thread and self._stream is not None:
                self._stream.cut()  # whose bytes are somebody else's from now on
        for message in ended:
            message.work.finished(RoundClosed(self._peer, *why))

    def end(self, why: str | PeerLost) -> None:
        """Send nothing any more."""
        with self._changed:
            self._over = why
            messages = [*self._messages.values()]
            self._messages.clear()
            if self._stream is not None:
                self._stream.cut()
            self._notify()
        for message in messages:
            message.work.finished(lost_peer(self._peer, why))

    def cut(self) -> None:
        """Break the connection off; it is made anew."""
        with self._changed:
            if self._stream is not None:
                self._stream.cut()

    def _notify(self) -> None:
        self._changed.notify_all()
        if self._stream is not None:
            self._stream.wake()

    def _serve(self) -> None:
        pause = _AGAIN
        while self._over is None:
            try:
                stream = self._carrier.connected(self._peer, self._lane, soon=bool(self._messages))
                if stream is None:
                    with self._changed:
                        self._changed.wait_for(lambda: self._messages or self._over is not None, _LOOK)
                    continue
                pause = _AGAIN
                self._use(stream)
            except LinkLost:
                with self._changed:
                    self._changed.wait_for(lambda: self._over is not None, pause)
                pause = min(2 * pause, _SELDOM)

    def _use(self, stream: Stream) -> None:
        """Until it breaks. LinkLost."""
        with self._changed:
            self._stream = stream
            self._waiting = [*self._messages]
            is_over = self._over is not None
        try:
            probed_at = -stream.lease  # how long a word takes is asked soon
            while not is_over:
                number = self._next()
                if number is not None:
                    self._send(stream, number)
                elif time.monotonic() - probed_at > stream.lease / 4:
                    stream.probe(self._handle)
                    probed_at = time.monotonic()
                else:
                    stream.wait(stream.lease / 4, self._handle)
                is_over = self._over is not None
        finally:
            with self._changed:
                self._stream = None
            self._carrier.disconnected(self._peer, stream)
            stream.close()

    def _next(self) -> int | None:
        with self._changed:
            while self._waiting:
                number = self._waiting.pop(0)
                if number in self._messages:
                    return number
            return None

    def _send(self, stream: Stream, number: int) -> None:
        """A message, for as long as anybody wants it."""
        with self._changed:
            message, self._sending = self._messages.get(number), number
        if message is None:
            return
        self._carrier.resent += message.was_sent
        message.was_sent = True
        data, total = message.data.data, len(message.data)
        for offset in range(0, max(total, 1), CHUNK):
            piece = data[offset : offset + CHUNK]
            if number not in self._messages:
                break
            stream.send(Head(message.kind, number, offset, total, message.tag), piece, self._handle)
            self._carrier.sent(self._peer, stream.way, len(piece))
        self._sending = -1

    def _handle(self, kind: int, number: int) -> None:
        """What `peer` says of a message: perhaps while a piece is on its way, of which it wants no more then."""
        with self._changed:
            message = self._messages.pop(number, None)
        if message is None:
            return
        if kind == ROUND_CLOSED:
            message.work.finished(RoundClosed(self._peer))
            self._carrier.passed(self._peer, message.tag)
        elif kind == REFUSED:
            message.work.finished(PeerLost(self._peer, "it refused what was sent to it"))
        elif kind == TAKEN:
            message.work.finished()
