"""The sending side of `transport`: all messages to one peer, in chunks with receipts, in their order."""

from __future__ import annotations

import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from itertools import islice
from typing import Protocol

import numpy as np

from isles.comm.elastic.chunks.incoming import CHUNK, offsets
from isles.comm.elastic.chunks.patience import Patience, UnderWay
from isles.comm.elastic.control import Answered
from isles.comm.elastic.keys import sealed
from isles.comm.errors import PeerLost, RoundPassed
from isles.comm.gloo.transfers import PostedWork
from isles.comm.tags import CHANNELS, Tag

WINDOW = 4
"""Chunks that are under way to one peer at a time."""
HEAD = struct.Struct(f"<{len(Tag._fields) + 4}q")
"""What goes beside a chunk: tag, message number, offset, total bytes, sender; then the seal of all."""
OVER = -1
"""In place of a chunk's offset: its round, and those before, are over at the sender."""
_AGAIN, _SELDOM = 0.1, 3.0  # seconds until the next try where nobody took it or there was no room: twice as many each


class Carrier(Protocol):
    """What brings chunks to a peer: `ElasticTransport`. resent: chunks sent again. under_way: bytes of those that go to
    anybody.
    """

    rank: int
    resent: int
    under_way: UnderWay

    def introduction(self, peer: int) -> bytes | None:
        """By which a message to `peer` is sealed (16 bytes); None while that is not known. May wait."""
        ...

    def ship(self, peer: int, chunk: bytes, head: bytes, answered: Answered, seconds: float) -> None:
        """Send a chunk, and call `answered` once as `Session.ask` does. OSError once the session is closed."""
        ...

    def passed(self, peer: int, tag: Tag) -> None:
        """`peer` has said that the round of `tag`, and all before, are over there."""
        ...


def lost_peer(peer: int, why: str | PeerLost) -> PeerLost:
    """The error for works with `peer`; why: it, or its text."""
    return PeerLost(peer, why) if isinstance(why, str) else why


class OutgoingMessage:
    """One message on its way out: (n,) uint8 `data` for the address `tag`.

    number: unique among all messages of this worker. left: chunks that have no receipt yet.
    """

    def __init__(self, work: PostedWork, data: np.ndarray, tag: Tag, number: int) -> None:
        self.work, self.data, self.tag, self.number = work, data, tag, number
        self.left = len(offsets(len(data)))

    def chunk(self, offset: int) -> np.ndarray:
        """Its bytes from `offset` on, or none (`OVER`)."""
        return self.data[max(offset, 0) : offset + CHUNK]

    def size(self, offset: int) -> int:
        """Bytes of that chunk."""
        return len(self.chunk(offset))


class Outgoing:
    """All messages to `peer`, sent in their order by a thread of this peer's own."""

    def __init__(self, transport: Carrier, peer: int) -> None:
        self._transport, self._peer = transport, peer
        self._word: bytes | None = None
        self._waiting: deque[tuple[OutgoingMessage, int]] = deque()  # chunks: (message, offset)
        self._messages: set[OutgoingMessage] = set()
        self._flying = 0
        self._pause = 0.0  # since nobody takes it; one chunk at a time tries
        self._not_before = 0.0
        self._patience = Patience()
        self._over: str | PeerLost | None = None
        self._changed = threading.Condition()
        threading.Thread(target=self._serve, name=f"isles-to-{peer}", daemon=True).start()

    def add(self, message: OutgoingMessage, *chunks: int) -> None:
        """Queue `message` behind the others; chunks: offsets to send in place of those of its bytes (`_OVER`)."""
        with self._changed:
            over = self._over
            if over is None:
                self._messages.add(message)
                self._waiting += [(message, offset) for offset in chunks or offsets(len(message.data))]
                self._changed.notify()
        if over is not None:
            message.work.finished(lost_peer(self._peer, over))

    def drop(self, has_passed: Callable[[Tag], bool], *why: str) -> None:
        """Send nothing any more to addresses that have passed. why: for `RoundPassed`."""
        with self._changed:
            ended = [message for message in self._messages if has_passed(message.tag)]
            self._messages.difference_update(ended)
            self._pause = self._not_before = 0.0
            self._changed.notify()
        for message in ended:
            message.work.finished(RoundPassed(self._peer, *why))

    def end(self, why: str | PeerLost) -> None:
        """Send nothing any more."""
        with self._changed:
            self._over = why
            messages, self._messages = self._messages, set()
            self._waiting.clear()
            self._changed.notify()
        for message in messages:
            message.work.finished(lost_peer(self._peer, why))

    def _serve(self) -> None:
        while (job := self._next()) is not None:
            self._ship(*job)

    def _next(self) -> tuple[OutgoingMessage, int, int] | None:
        """The next chunk, once it may go, and the load with it; None at the end."""
        with self._changed:
            while self._over is None:
                wait = None
                if self._waiting and self._flying < (1 if self._pause else WINDOW):
                    wait = self._not_before - time.monotonic()
                    if wait <= 0:
                        message, offset = self._waiting.popleft()
                        if message in self._messages:
                            self._flying += 1
                            under_way = self._transport.under_way.add(message.size(offset))
                            return message, offset, under_way + self._next_bytes()
                        continue
                self._changed.wait(wait)
            return None

    def _next_bytes(self) -> int:
        """Of the chunks that follow at once: a receipt waits behind what the peer sends meanwhile, about as much."""
        return sum(message.size(offset) for message, offset in islice(self._waiting, max(WINDOW - self._flying, 0)))

    def _ship(self, message: OutgoingMessage, offset: int, load: int) -> None:
        began, allowed = time.monotonic(), self._patience.seconds(load)

        def answered(reply: bytes | None, refusal: bytes | None) -> None:
            took = time.monotonic() - began
            self._transport.under_way.add(-message.size(offset))
            with self._changed:
                self._flying -= 1
                if reply is not None:
                    self._patience.took(took, load)
                elif refusal is None and took >= allowed:
                    self._patience.passed(load, allowed)
            self._answered(message, offset, reply is not None, refusal)

        self._word = self._word or self._transport.introduction(self._peer)
        if self._word is None:
            answered(None, b"later")
            return
        tag = (CHANNELS.index(message.tag.channel), *message.tag[1:])
        head = HEAD.pack(*tag, message.number, offset, len(message.data), self._transport.rank)
        chunk = message.chunk(offset).tobytes()
        head += sealed(self._word, head, chunk)
        try:
            self._transport.ship(self._peer, chunk, head, answered, allowed)
        except OSError as error:
            self.end(str(error))

    def _answered(self, message: OutgoingMessage, offset: int, arrived: bool, refusal: bytes | None) -> None:
        """A chunk has its receipt, was refused, or is to be sent again."""
        error = None
        with self._changed:
            if arrived:
                self._pause = self._not_before = 0.0
                message.left -= 1
            elif refusal == b"over":
                pass
            elif refusal == b"never":
                error = PeerLost(self._peer, "it refused what was sent to it")
            elif message in self._messages:
                self._transport.resent += 1
                self._pause = min(max(_AGAIN, 2 * self._pause), _SELDOM)
                self._not_before = time.monotonic() + self._pause
                self._waiting.appendleft((message, offset))
            ended = message in self._messages and (message.left == 0 or error is not None)
            if ended:
                self._messages.discard(message)
            self._changed.notify()
        if ended:
            message.work.finished(error)
        if refusal == b"over":
            self._transport.passed(self._peer, message.tag)
