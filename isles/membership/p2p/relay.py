"""Relays for pairs without a way to each other: two connections become one, and what comes on one leaves on the other,
unread.

    ticket = number (8 random bytes), MAC of it by the relay's key (16)

Both ends show the same ticket (`TicketExchange`), at the lighthouse or at a worker that relays. The lighthouse knows
the relay's key, and gives a pair a ticket; nothing is said between those who issue and who accept tickets.

What the pair says is encrypted from end to end. Of each direction `Splices` buffers only what the other end has not
taken yet, and reads no more meanwhile: a slow pair holds up itself alone. One thread serves all pairs, beside the
loop's.

`RelayCount` adds up the bytes that a lighthouse has relayed over its restarts.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import secrets
import selectors
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from queue import Empty, SimpleQueue
from typing import Any

from isles.comm.sockets.connection import SILENCE
from isles.comm.sockets.listener import peeked
from isles.membership.effects import RELAYED
from isles.membership.p2p.stream import TICKET, TICKET_SIZE, tuned

_RETAINED = 1 << 18  # bytes of each direction
_READ, _WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE


class _Way:
    """What goes from one connection to the other. rest: what came and has not left."""

    def __init__(self, source: socket.socket, target: socket.socket) -> None:
        self.source, self.target, self.rest = source, target, memoryview(b"")

    def read(self, room: memoryview) -> int:
        """Bytes that came, by way of `room`. EOFError, OSError where it is over."""
        with contextlib.suppress(BlockingIOError):
            read = self.source.recv_into(room)
            if not read:
                raise EOFError
            self.rest = room[:read]
            self.write()
            self.rest = memoryview(bytes(self.rest))
            return read
        return 0

    def write(self) -> None:
        """As much as the target takes."""
        with contextlib.suppress(BlockingIOError):
            while self.rest:
                self.rest = self.rest[self.target.send(self.rest) :]


class Splices:
    """carried: called with bytes that went through."""

    def __init__(self, carried: Callable[[int], None]) -> None:
        self._carried = carried
        self._room = memoryview(bytearray(_RETAINED))
        self._selector = selectors.DefaultSelector()
        self._ways: dict[socket.socket, tuple[_Way, _Way]] = {}  # by connection: from it, to it
        self._events: dict[socket.socket, int] = {}  # that are waited for
        self._new: SimpleQueue[tuple[socket.socket, socket.socket] | None] = SimpleQueue()
        self._wakes, self._awake = socket.socketpair()
        self._awake.setblocking(False)
        self._thread: threading.Thread | None = None

    def add(self, one: socket.socket, other: socket.socket) -> None:
        """Make these one."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="isles-splices", daemon=True)
            self._thread.start()
        self._new.put((one, other))
        self._wakes.send(b"x")

    def close(self) -> None:
        """End them all. Safe to call twice."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._new.put(None)
            self._wakes.send(b"x")
            thread.join(5.0)
        self._wakes.close()
        self._awake.close()

    def _work(self) -> None:
        self._selector.register(self._awake, _READ)
        while True:
            for key, events in self._selector.select():
                if key.fileobj is self._awake:
                    if not self._take_in():
                        return
                elif key.fileobj in self._ways:
                    self._move(key.fileobj, events)

    def _take_in(self) -> bool:
        with contextlib.suppress(BlockingIOError):
            self._awake.recv(4096)
        with contextlib.suppress(Empty):
            while (pair := self._new.get_nowait()) is not None:
                there, back = _Way(*pair), _Way(*reversed(pair))
                self._ways |= {pair[0]: (there, back), pair[1]: (back, there)}
                for end in pair:
                    self._await(end)
            for end in [*self._ways]:
                self._end(end)
            return False
        return True

    def _move(self, end: socket.socket, events: int) -> None:
        out, into = self._ways[end]
        try:
            if events & _READ:
                self._carried(out.read(self._room))
            if events & _WRITE:
                into.write()
        except (EOFError, OSError):
            self._end(end)
            return
        self._await(end)
        self._await(out.target)

    def _await(self, end: socket.socket) -> None:
        out, into = self._ways[end]
        events = (0 if out.rest else _READ) | (_WRITE if into.rest else 0)
        before = self._events.get(end, 0)
        if events == before:
            return
        if events and before:
            self._selector.modify(end, events)
        elif events:
            self._selector.register(end, events)
        elif before:
            self._selector.unregister(end)
        self._events[end] = events

    def _end(self, end: socket.socket) -> None:
        ways = self._ways.get(end)
        for one in () if ways is None else (ways[0].source, ways[0].target):
            self._ways.pop(one)
            if self._events.pop(one, 0):
                self._selector.unregister(one)
            one.close()


_NUMBER = 8
_KNOWN = 4096  # tickets that were used


def new_ticket(key: bytes) -> bytes:
    """With which two connections become one at whoever has `key`."""
    return _ticket(key, secrets.token_bytes(_NUMBER))


def _ticket(key: bytes, number: bytes) -> bytes:
    return number + hmac.digest(key, b"isles tickets\0" + number, "sha256")[: TICKET_SIZE - _NUMBER]


class TicketExchange:
    """Whoever has the key of these tickets. carried: called with bytes that went through."""

    def __init__(self, key: bytes, carried: Callable[[int], None]) -> None:
        self._key = key
        self._first: dict[bytes, socket.socket] = {}  # who came with a ticket, until another one does
        self._used = deque[bytes](maxlen=_KNOWN)
        self._splices = Splices(carried)

    async def take(self, connection: socket.socket) -> bool:
        """Whether somebody comes with a ticket, and is kept. EOFError, OSError for one that is none, or was used."""
        if not await peeked(connection, TICKET):
            return False
        ticket, own = b"", asyncio.get_running_loop()
        while len(ticket) < TICKET_SIZE:
            piece = await own.sock_recv(connection, TICKET_SIZE - len(ticket))
            if not piece:
                raise EOFError
            ticket += piece
        first = self._first.pop(ticket, None)
        if first is not None:
            for end in (first, connection):
                tuned(end).send(TICKET[:1])  # else a short message waits for the answer to the one before
            self._splices.add(first, connection)
        elif ticket in self._used or not hmac.compare_digest(ticket, _ticket(self._key, ticket[:_NUMBER])):
            raise ConnectionError("an unknown ticket")
        else:
            self._used.append(ticket)
            self._first[ticket] = connection
            own.call_later(SILENCE, self._expire, ticket)
        return True

    def close(self) -> None:
        """End them all."""
        self._splices.close()

    def _expire(self, ticket: bytes) -> None:
        first = self._first.pop(ticket, None)
        if first is not None:
            first.close()


_SPARE = 1 << 20  # bytes


class RelayCount:
    """carried: bytes since this session began. entries: of the journal so far, for a lighthouse that is started again
    goes on from what it had noted there.
    """

    def __init__(self, carried: Callable[[], int], entries: Iterable[Mapping[str, Any]] = ()) -> None:
        self._carried = carried
        self._before = max((entry["bytes"] for entry in entries if entry.get("event") == RELAYED), default=0)
        self._noted = self._before

    def relayed(self) -> int:
        """Bytes until now."""
        return self._before + self._carried()

    def note(self, relayed: int) -> dict[str, Any] | None:
        """What the journal is to get now that it is so many; None while it grew by less than a hundredth and 1 MB."""
        if relayed <= self._noted + self._noted // 100 + _SPARE:
            return None
        self._noted = relayed
        return {"event": RELAYED, "bytes": relayed}
