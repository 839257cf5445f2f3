"""Forwards frames between admitted clients: requests to the client that serves their address, replies back, and who is
present.

The hub never waits. Each client has a send queue of some megabytes, and a request that finds a full queue is refused
with "later" at once, so a slow or stopped client does not hold up others. A client may ask everybody, and watch who is
present. It may serve only `SERVED_BY_MEMBERS` and be present only as `PRESENT_AS_MEMBERS`, so that nobody answers in
place of the hub's own session.

All of this runs in the loop's thread, so there are no locks. Hub and clients exchange frames, each a message of one
`Connection`:

frame = kind (1 byte), number (8), milliseconds (4), lengths of key (2) and attachment (4); these; payload
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
import struct
from collections.abc import Callable
from enum import IntEnum
from itertools import count
from typing import NamedTuple

from isles.comm.credentials import Credentials
from isles.comm.sockets.connection import SILENCE, BadFrame, Connection
from isles.comm.sockets.listener import Listener
from isles.membership.keys import ABOUT, CONFIG, ECHO, PRESENT_AS_MEMBERS, SERVED_BY_MEMBERS, STATUS
from isles.membership.p2p.relay import TicketExchange, new_ticket
from isles.membership.session import RateLimit, Rejections, network_of

MAX_MESSAGE = 4 << 20
"""The most bytes of a frame's payload."""
LONGEST = MAX_MESSAGE + (1 << 16)
"""The most bytes of a frame."""
_FRAME = struct.Struct(">BQIHI")


class FrameKind(IntEnum):
    """The kind of a frame. From a client: ASK, SERVE, PRESENT, WATCH; from the hub: WELCOME, SEEN, GONE; from the
    client that was asked, forwarded to the asker: REPLY, REFUSAL; from the hub in its place: NOBODY.
    """

    WELCOME, ASK, REPLY, REFUSAL, NOBODY, SERVE, PRESENT, WATCH, SEEN, GONE = range(10)


class Frame(NamedTuple):
    """number: of the question that it asks or answers, or of the watch. milliseconds: until an answer is due."""

    kind: FrameKind
    number: int
    key: str = ""
    payload: bytes | memoryview = b""
    attachment: bytes | memoryview = b""
    milliseconds: int = 0

    @property
    def size(self) -> int:
        """Bytes of payload and attachment."""
        return len(self.payload) + len(self.attachment)


def pack(frame: Frame) -> bytes:
    """The frame as bytes."""
    key = frame.key.encode("ascii")
    head = _FRAME.pack(frame.kind, frame.number, frame.milliseconds, len(key), len(frame.attachment))
    return b"".join((head, key, frame.attachment, frame.payload))


def unpack(data: bytes | bytearray) -> Frame:
    """The frame of these bytes. BadFrame if they are malformed."""
    try:
        kind, number, milliseconds, key, attachment = _FRAME.unpack_from(data)
        at = _FRAME.size + key
        if at + attachment > len(data):
            raise BadFrame("a truncated frame")
        body = memoryview(data)
        name = data[_FRAME.size : at].decode("ascii")
        if not name.isprintable():
            raise BadFrame("an invalid address")
        return Frame(FrameKind(kind), number, name, body[at + attachment :], body[at : at + attachment], milliseconds)
    except (struct.error, ValueError) as error:
        raise BadFrame("a malformed frame") from error


_LOG = logging.getLogger(__name__)
_WAITING = 16 << 20  # the longest send queue of one client, bytes: some of the longest frames
_CLIENTS = 4096
_NAMES, _LENGTH = 64, 256  # addresses that one client serves, is seen at, or watches; characters of each
_MAX_PENDING = 4096  # unanswered questions of one client
_LONGEST = 600_000  # milliseconds for an answer
_OPEN, _COSTS = 600, {CONFIG: 1, ABOUT: 1, STATUS: 1, ECHO: 6}  # what one address may ask in a minute, without a member


class Peer:
    """A client, or the hub's own session. send: sends a frame (urgent or not); False if its queue is full. close_link:
    ends the connection; None for the hub's own session.
    """

    def __init__(
        self, name: str, there: str, send: Callable[[Frame, bool], bool], close_link: Callable[[], None] | None = None
    ) -> None:
        self.name, self.there, self.send, self.close_link = name, there, send, close_link
        self.is_hub = close_link is None
        self.serves: set[str] = set()
        self.present_at: set[str] = set()
        self.watches: dict[int, str] = {}
        self.pending: set[int] = set()  # numbers of questions to answer
        self.asked = 0  # own unanswered questions


class _Question(NamedTuple):
    asker: Peer
    number: int  # the asker's
    served_by: set[Peer]
    ends: asyncio.TimerHandle


class Hub:
    """Listens at `listening` for clients that have the token of `mine`, whose key the hub holds.

    relayed: bytes that clients have sent each other. refused: counts rejected frames.
    """

    def __init__(self, mine: Credentials, listening: socket.socket, lease: float, refused: Rejections) -> None:
        self.relayed = 0
        self._lease, self._refused = lease, refused
        self._peers: dict[str, Peer] = {}
        self._serving: dict[str, dict[Peer, None]] = {}
        self._present: dict[str, set[Peer]] = {}
        self._questions: dict[int, _Question] = {}
        self._open = RateLimit(_OPEN)
        self._numbers = count(1)
        self._links: dict[asyncio.Task[None], Connection] = {}
        self._key = secrets.token_bytes(32)
        self._tickets = TicketExchange(self._key, self._carry)
        self._listener = Listener(
            listening, self._admit, seconds=SILENCE, mine=mine, refused=self._on_rejected, raw=self._tickets.take
        )

    def close(self) -> None:
        """Admit no more clients; not to be called in the loop's thread."""
        self._listener.__exit__()
        self._tickets.close()

    async def end(self) -> None:
        """Close the connections after their queues were sent."""
        links = [*self._links.items()]
        await asyncio.gather(*(link.close() for _, link in links))
        for task, _ in links:
            task.cancel()
        await asyncio.gather(*(task for task, _ in links), return_exceptions=True)

    def seen(self, name: str) -> str:
        """The address of the client of that name; "" if there is none."""
        peer = self._peers.get(name)
        return "" if peer is None else peer.there

    def join(self, peer: Peer) -> None:
        """Register a client."""
        self._peers[peer.name] = peer

    def hear(self, peer: Peer, frame: Frame, urgent: bool) -> None:
        """Handle one frame of a client."""
        kind, key = frame.kind, frame.key
        if kind == FrameKind.ASK:
            self._ask(peer, frame, urgent)
        elif kind in (FrameKind.REPLY, FrameKind.REFUSAL):
            self._answer(peer, frame, urgent)
        elif not peer.is_hub and (len(key) > _LENGTH or self._name_count(peer) >= _NAMES):
            self._refused.note(-1, "too many addresses")
        elif kind == FrameKind.WATCH:
            peer.watches[frame.number] = key
            there_now = [one for one in self._present if matches(key, one)]
            self._send_or_close(peer, Frame(FrameKind.SEEN, frame.number, payload="\n".join(there_now).encode("ascii")))
        elif kind == FrameKind.SERVE and self._is_allowed(peer, key, SERVED_BY_MEMBERS):
            peer.serves.add(key)
            self._serving.setdefault(key, {})[peer] = None
        elif kind == FrameKind.PRESENT and self._is_allowed(peer, key, PRESENT_AS_MEMBERS):
            peer.present_at.add(key)
            there = self._present.setdefault(key, set())
            there.add(peer)
            if len(there) == 1:
                self._changed(key, FrameKind.SEEN)

    def leave(self, peer: Peer) -> None:
        """Remove a client; its open questions count as unanswered."""
        self._peers.pop(peer.name, None)
        for key in peer.serves:
            self._serving[key].pop(peer, None)
            if not self._serving[key]:
                del self._serving[key]
        for number in [*peer.pending]:
            self._not_from(peer, number, Frame(FrameKind.NOBODY, 0))
        for key in peer.present_at:
            self._present[key].discard(peer)
            if not self._present[key]:
                del self._present[key]
                self._changed(key, FrameKind.GONE)

    # Admission

    async def _admit(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._links) >= _CLIENTS:
            raise ConnectionError("too many clients")
        link = Connection(reader, writer, self._lease, longest=LONGEST, most=_WAITING)
        name = secrets.token_hex(8)
        peer = Peer(name, link.there, lambda frame, urgent: link.send(pack(frame), urgent=urgent), link.abort)
        peer.send(Frame(FrameKind.WELCOME, 0, name, milliseconds=round(1000 * self._lease)), True)
        self.join(peer)
        task = asyncio.get_running_loop().create_task(self._attend(peer, link))
        self._links[task] = link
        task.add_done_callback(lambda task: self._links.pop(task, None))

    async def _attend(self, peer: Peer, link: Connection) -> None:
        try:
            await link.run(lambda data, urgent: self.hear(peer, unpack(data), urgent))
        except (OSError, EOFError, RuntimeError, ValueError) as error:
            _LOG.debug("%s: %s", peer.there, error)
        finally:
            link.abort()
            self.leave(peer)

    def _on_rejected(self, address: str, why: str) -> None:
        _LOG.debug("turned away %s: %s", address, why)

    def ticket(self) -> bytes:
        """A relay ticket, for two workers that cannot dial each other."""
        return new_ticket(self._key)

    def _carry(self, size: int) -> None:
        self.relayed += size

    # Questions

    def _ask(self, peer: Peer, frame: Frame, urgent: bool) -> None:
        servers = self._serving.get(frame.key)
        if not servers:
            peer.send(Frame(FrameKind.NOBODY, frame.number), True)
            return
        cost = _COSTS.get(frame.key, 0)
        is_often = cost and self._open.take(network_of(peer.there), asyncio.get_running_loop().time(), cost) > 0
        if is_often:
            self._refused.note(-1, "more questions than one address may ask in a minute")
        if (is_often or peer.asked >= _MAX_PENDING) and not peer.is_hub:
            peer.send(Frame(FrameKind.REFUSAL, frame.number, payload=b"later"), True)
            return
        number, seconds = next(self._numbers), min(frame.milliseconds, _LONGEST) / 1000
        ends = asyncio.get_running_loop().call_later(seconds, self._forget, number)
        peer.asked += 1
        self._questions[number] = _Question(peer, frame.number, set(servers), ends)
        passed_on = frame._replace(number=number)
        for server in [*servers]:
            server.pending.add(number)  # set before sending: the hub's own session may answer at once
            if server.send(passed_on, urgent):
                self._count(peer, server, frame)
            else:
                self._not_from(server, number, Frame(FrameKind.REFUSAL, 0, payload=b"later"))

    def _answer(self, peer: Peer, frame: Frame, urgent: bool) -> None:
        if frame.number in peer.pending:
            question = self._questions[frame.number]
            self._count(peer, question.asker, frame)
            self._settle(frame.number, frame, urgent)

    def _count(self, one: Peer, other: Peer, frame: Frame) -> None:
        if not (one.is_hub or other.is_hub):
            self.relayed += frame.size

    def _not_from(self, peer: Peer, number: int, instead: Frame) -> None:
        """One of the asked clients gives no answer. `instead` is the asker's answer if it was the last of them."""
        peer.pending.discard(number)
        if (question := self._questions.get(number)) is not None:
            question.served_by.discard(peer)
            if not question.served_by:
                self._settle(number, instead, True)

    def _settle(self, number: int, answer: Frame, urgent: bool) -> None:
        question = self._forget(number)
        question.asker.send(answer._replace(number=question.number), urgent)

    def _forget(self, number: int) -> _Question:
        question = self._questions.pop(number)
        question.ends.cancel()
        question.asker.asked -= 1
        for server in question.served_by:
            server.pending.discard(number)
        return question

    # Presence

    def _is_allowed(self, peer: Peer, key: str, allowed: tuple[str, ...]) -> bool:
        return peer.is_hub or any(matches(one, key) for one in allowed)

    def _name_count(self, peer: Peer) -> int:
        return len(peer.serves) + len(peer.present_at) + len(peer.watches)

    def _changed(self, key: str, kind: FrameKind) -> None:
        for peer in [*self._peers.values()]:
            for number, pattern in peer.watches.items():
                if matches(pattern, key):
                    self._send_or_close(peer, Frame(kind, number, payload=key.encode("ascii")))

    def _send_or_close(self, peer: Peer, frame: Frame) -> None:
        """Send a frame that must not be dropped. If the queue is full, disconnect the client, which then reconnects."""
        if not peer.send(frame, True) and peer.close_link is not None:
            peer.close_link()


def matches(pattern: str, key: str) -> bool:
    """Whether `key` matches `pattern`, in which * is one part between slashes, and ** at the end any rest."""
    wanted, parts = pattern.split("/"), key.split("/")
    if wanted[-1] == "**":
        wanted.pop()
        parts = parts[: max(len(wanted), 1)]
    return len(wanted) == len(parts) and all(one in ("*", part) for one, part in zip(wanted, parts, strict=True))
