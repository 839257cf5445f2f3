"""Tickets with which two connections become one: at the lighthouse, and at workers that carry for others.

    ticket = number (8 random bytes), proof of it by a key of whoever makes the two one (16)

The lighthouse knows that key, and gives a pair a ticket; nothing is said between those who give and who take tickets.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
import socket
from collections import deque
from collections.abc import Callable

from isles.comm.elastic.p2p.splice import Splices
from isles.comm.elastic.p2p.stream import TICKET, TICKET_SIZE, tuned
from isles.comm.sockets.listener import peeked
from isles.comm.sockets.lost import SILENCE

_NUMBER = 8
_KNOWN = 4096  # tickets that were used


def new_ticket(key: bytes) -> bytes:
    """With which two connections become one at whoever has `key`."""
    return _ticket(key, secrets.token_bytes(_NUMBER))


def _ticket(key: bytes, number: bytes) -> bytes:
    return number + hmac.digest(key, b"isles ties\0" + number, "sha256")[: TICKET_SIZE - _NUMBER]


class Ties:
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
            raise ConnectionError("a ticket of nobody")
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
