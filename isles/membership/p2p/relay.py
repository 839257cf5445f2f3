"""Relays for pairs of workers that cannot dial each other: two connections are joined, and bytes of one are forwarded
to the other, unread.

    ticket = number (8 random bytes), MAC of it by the relay's key (16)

Both ends show the same ticket (`TicketExchange`), at the lighthouse or at a worker that relays. The lighthouse knows
the relay's key, and issues tickets to pairs; issuer and relay exchange no messages about them.

The pair's data is encrypted from end to end. Per direction only what the other end has not accepted yet is buffered,
and nothing more is read meanwhile, so a slow pair delays only itself. One loop in a thread of its own serves all pairs.

`RelayCount` adds up the bytes that a lighthouse has relayed over its restarts.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

from typing_extensions import override

from isles.comm.sockets.connection import SILENCE
from isles.comm.sockets.listener import peeked
from isles.membership.effects import RELAYED
from isles.membership.p2p.stream import TICKET, TICKET_SIZE, tuned


class _End(asyncio.Protocol):
    """One of two joined connections: its data is written to the other, `far`, before more is read."""

    link: asyncio.Transport
    far: _End

    def __init__(self, relay: TicketExchange) -> None:
        self._relay = relay

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.link = cast(asyncio.Transport, transport)
        self.link.set_write_buffer_limits(high=0)
        self._relay.ends.add(self)

    @override
    def data_received(self, data: bytes) -> None:
        self._relay.carried(len(data))
        self.far.link.write(data)

    @override
    def pause_writing(self) -> None:
        self.far.link.pause_reading()

    @override
    def resume_writing(self) -> None:
        self.far.link.resume_reading()

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        self.far.link.abort()
        self._relay.ends.discard(self)


_NUMBER = 8
_KNOWN = 4096  # remembered used tickets; anybody with the token can ask for many


def new_ticket(key: bytes) -> bytes:
    """A ticket that joins two connections at the relay with `key`."""
    return _ticket(key, secrets.token_bytes(_NUMBER))


def _ticket(key: bytes, number: bytes) -> bytes:
    return number + hmac.digest(key, b"isles tickets\0" + number, "sha256")[: TICKET_SIZE - _NUMBER]


class TicketExchange:
    """Joins connections that show the same ticket, issued with `key`. carried: called with the number of forwarded
    bytes.

    ends: of joined connections.
    """

    def __init__(self, key: bytes, carried: Callable[[int], None]) -> None:
        self._key, self.carried = key, carried
        self.ends: set[_End] = set()
        self._first: dict[bytes, socket.socket] = {}  # by ticket: the first of the two connections
        self._used = deque[bytes](maxlen=_KNOWN)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="isles-splices", daemon=True)

    async def take(self, connection: socket.socket) -> bool:
        """Whether `connection` shows a ticket, and is now owned here. EOFError, OSError for an invalid or used
        ticket.
        """
        if not await peeked(connection, TICKET):
            return False
        ticket, running = b"", asyncio.get_running_loop()
        while len(ticket) < TICKET_SIZE:
            piece = await running.sock_recv(connection, TICKET_SIZE - len(ticket))
            if not piece:
                raise EOFError
            ticket += piece
        first = self._first.pop(ticket, None)
        if first is not None:
            for end in (first, connection):
                tuned(end).send(TICKET[:1])  # disables Nagle: a short message must not wait for an acknowledgement
            self._join(first, connection)
        elif ticket in self._used or not hmac.compare_digest(ticket, _ticket(self._key, ticket[:_NUMBER])):
            raise ConnectionError("a forged or used ticket")
        else:
            self._used.append(ticket)
            self._first[ticket] = connection
            running.call_later(SILENCE, self._expire, ticket)
        return True

    def close(self) -> None:
        """Break all joined connections. Safe to call twice."""
        if self._thread.is_alive():
            asyncio.run_coroutine_threadsafe(self._end(), self._loop)
            self._thread.join(5.0)
        if not self._thread.is_alive():
            self._loop.close()

    def _expire(self, ticket: bytes) -> None:
        first = self._first.pop(ticket, None)
        if first is not None:
            first.close()

    def _join(self, one: socket.socket, other: socket.socket) -> None:
        if self._thread.ident is None:
            self._thread.start()
        asyncio.run_coroutine_threadsafe(self._splice(one, other), self._loop)

    async def _splice(self, *links: socket.socket) -> None:
        ends = [_End(self) for _ in links]
        ends[0].far, ends[1].far = ends[1], ends[0]
        # Both at once: then neither reads before the other can write.
        joins = (
            self._loop.connect_accepted_socket(lambda end=end: end, link) for end, link in zip(ends, links, strict=True)
        )
        await asyncio.gather(*joins)

    async def _end(self) -> None:
        beginning = asyncio.all_tasks() - {asyncio.current_task()}
        for task in beginning:
            task.cancel()
        await asyncio.gather(*beginning, return_exceptions=True)
        for end in self.ends:
            end.link.abort()
        self._loop.call_soon(self._loop.stop)  # after their close callbacks


_SPARE = 1 << 20  # bytes by which the count must grow, or the journal would grow with every tick


class RelayCount:
    """carried: returns the bytes relayed in this session. entries: of the journal so far, from whose count a restarted
    lighthouse goes on.
    """

    def __init__(self, carried: Callable[[], int], entries: Iterable[Mapping[str, Any]] = ()) -> None:
        self._carried = carried
        self._before = max((entry["bytes"] for entry in entries if entry.get("event") == RELAYED), default=0)
        self._noted = self._before

    def relayed(self) -> int:
        """Bytes relayed so far, over all restarts."""
        return self._before + self._carried()

    def note(self, relayed: int) -> dict[str, Any] | None:
        """The journal entry of this count; None if it grew by less than a hundredth and 1 MB."""
        if relayed <= self._noted + self._noted // 100 + _SPARE:
            return None
        self._noted = relayed
        return {"event": RELAYED, "bytes": relayed}
