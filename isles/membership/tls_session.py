"""The session between processes: over TLS 1.3, forwarded by a `Hub`.

    open_router(credentials, address)    the lighthouse: a hub
    open_session(token, address)         a client of it; what it sends to other clients goes through the hub
    ask / answer / serve                 a request and its reply (`answer` waits for it)
    present / watch                      who is connected: notified when a process ends, hangs or is cut off

A client whose connection breaks reconnects by itself (`Uplink`), under whatever address its hub's name then has. It
then declares again what it serves, where it is present and what it watches; in between its requests have no reply, and
nobody counts as present. A process may fork, and end without closing its session.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
import time
from asyncio import TimerHandle
from asyncio import get_running_loop as own_loop
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import count
from queue import SimpleQueue

from isles.comm.credentials import Credentials, Token
from isles.comm.sockets import loop
from isles.comm.sockets.connection import PIECE, SILENCE, Connection, LinkLost, reason
from isles.comm.sockets.proof import TokenRefused, dial
from isles.comm.tcp import listen, parse_address
from isles.membership.hub import LONGEST, MAX_MESSAGE, Frame, FrameKind, Hub, Peer, pack, unpack
from isles.membership.keys import RELAY_TICKETS
from isles.membership.p2p.stream import TICKET
from isles.membership.session import Answered, Query, Rejections

_WAITING = 64 << 20  # the longest send queue, bytes
_AGAIN, _SELDOM = 0.1, 1.0  # seconds until the next attempt: doubled each time, up to the second
_DECLARES = (FrameKind.SERVE, FrameKind.PRESENT, FrameKind.WATCH)
BROKEN = (OSError, EOFError, RuntimeError, ValueError)  # errors that end a connection, with TLS's and the proof's


class Uplink:
    """The connection to the hub at host:port, with `token`. on_frame: called with the hub's frames. lost: called when
    the connection breaks, so that open questions get no reply.

    where: host and port. name: this client's, given by the hub. is_local: whether the hub is on this machine.
    """

    def __init__(
        self,
        token: Token,
        host: str,
        port: int,
        on_frame: Callable[[Frame, bool], bool],
        lost: Callable[[], None],
    ) -> None:
        self._token, self.where, self._on_frame, self._lost = token, (host, port), on_frame, lost
        self.name, self.is_local = "", False
        self._declared: list[Frame] = []
        self._link: Connection | None = None
        self._welcomed = asyncio.Event()
        self._why: Exception | None = None
        self._task: asyncio.Task[None] | None = None

    async def start(self, seconds: float) -> None:
        """Connect within `seconds`. LinkLost with the last reason, at once if nothing listens there; TokenRefused if
        another machine than the token's answers, or it has another secret.
        """
        self._task = asyncio.get_running_loop().create_task(self._keep())
        welcomed = asyncio.ensure_future(self._welcomed.wait())
        await asyncio.wait((self._task, welcomed), timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        welcomed.cancel()
        if not self._welcomed.is_set():
            why = self._task.exception() if self._task.done() else self._why
            await self.end()
            if isinstance(why, TokenRefused):
                raise why
            why = why or TimeoutError()
            raise LinkLost(str(why) if isinstance(why, LinkLost) else reason(why, seconds)) from why

    def send(self, frame: Frame, urgent: bool) -> None:
        """Send a frame; a declaration is repeated on each new connection, a question without one has no reply."""
        if frame.kind in _DECLARES:
            self._declared.append(frame)
        if self._link is None:
            sent, answer = False, Frame(FrameKind.NOBODY, frame.number)
        else:
            sent = self._link.send(pack(frame), urgent=urgent)
            answer = Frame(FrameKind.REFUSAL, frame.number, payload=b"later")
        if frame.kind == FrameKind.ASK and not sent:
            self._on_frame(answer, True)

    async def end(self) -> None:
        """Close after the queue was sent."""
        link, task = self._link, self._task
        if link is not None:
            await link.close()
        if task is not None:
            task.cancel()
            await asyncio.wait([task])

    async def _keep(self) -> None:
        pause = _AGAIN
        while True:
            try:
                streams = await dial(*self.where, SILENCE, self._token)
                pause = _AGAIN
                await self._attend(Connection(*streams, SILENCE, longest=LONGEST, most=_WAITING))
            except BROKEN as error:
                if not self._welcomed.is_set() and isinstance(error, TokenRefused | ConnectionRefusedError):
                    raise
                self._why = error
            await asyncio.sleep(pause)
            pause = min(2 * pause, _SELDOM)

    async def _attend(self, link: Connection) -> None:
        def on_frame(data: bytes | bytearray, urgent: bool) -> None:
            frame = unpack(data)
            if frame.kind != FrameKind.WELCOME:
                self._on_frame(frame, urgent)
                return
            self.name, self.is_local = frame.key, link.here == link.there
            link.silence.seconds = frame.milliseconds / 1000
            # Before `_link` is set: no question may leave ahead of the declarations that its answer needs.
            for one in self._declared:
                link.send(pack(one), urgent=True)
            self._link = link
            self._welcomed.set()

        try:
            await link.run(on_frame)
        finally:
            link.abort()
            if self._link is not None:
                self._link = None
                self._lost()


_LOG = logging.getLogger(__name__)
_QUEUED = 8 << 20  # the most bytes of questions that wait for the session's thread
_OF_ITSELF = 1024  # bytes that a question counts beside its content
_LATE = 1.0  # seconds that a reply's timeout may be late
_ENDS = 5.0  # seconds to close a session; longer than a connection takes to send its queue


class Session:
    """An open connection to a run.

    All callbacks run in one thread of the session, one after the other, in the order of arrival. Questions that arrive
    faster than that thread handles them are refused, so that they cannot fill the memory.

    refused: counts rejected messages. port: at which a router listens. taken: bytes received.
    """

    beats = True

    def __init__(self) -> None:
        self.refused, self.port, self.taken = Rejections(), 0, 0
        self._hub: Hub | None = None
        self._uplink: Uplink | None = None
        self._own = Peer("", "", self._handle_frame)
        self._numbers = count(1)
        self._asked: dict[int, tuple[Answered, TimerHandle]] = {}
        self._serves: dict[str, Callable[[Query], None]] = {}
        self._watches: dict[int, tuple[set[str], Callable[[str, bool], None]]] = {}
        self._todo: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._closed = False
        self._queued = 0  # bytes
        self._thread = threading.Thread(target=self._work, name="isles-session", daemon=True)

    # See `ControlSession`

    def serve(self, key: str, answer: Callable[[Query], None]) -> None:
        self._serves[key] = answer
        self.say(Frame(FrameKind.SERVE, 0, key))

    def ask(
        self,
        key: str,
        payload: bytes,
        answered: Answered,
        *,
        attachment: bytes | None = None,
        seconds: float,
        urgent: bool = False,
    ) -> None:
        if self._closed:
            raise OSError("the session is closed")
        number = next(self._numbers)
        frame = Frame(FrameKind.ASK, number, key, payload, attachment or b"", round(1000 * seconds))
        loop.call(self._ask, frame, answered, seconds, urgent)

    def answer(
        self,
        key: str,
        payload: bytes,
        *,
        attachment: bytes | None = None,
        seconds: float,
        urgent: bool = False,
    ) -> tuple[bytes | None, bytes | None]:
        """`ask`, and wait for the arguments of `answered`. Not for the session's own thread, which would wait for
        itself.
        """
        done, answers = threading.Event(), list[tuple[bytes | None, bytes | None]]()

        def answered(reply: bytes | None, refusal: bytes | None) -> None:
            answers.append((reply, refusal))
            done.set()

        self.ask(key, payload, answered, attachment=attachment, seconds=seconds, urgent=urgent)
        return answers[0] if done.wait(seconds + _LATE) else (None, None)

    def present(self, key: str) -> None:
        self.say(Frame(FrameKind.PRESENT, 0, key))

    def watch(self, keys: str, changed: Callable[[str, bool], None]) -> None:
        number = next(self._numbers)
        self._watches[number] = set(), changed
        self.say(Frame(FrameKind.WATCH, number, keys))

    def later(self, call: Callable[[], None], seconds: float = 0.0) -> Callable[[], None]:
        waiting = [call]

        def ring() -> None:
            for one in [*waiting]:  # a copy: another thread may cancel meanwhile
                one()

        if seconds > 0:
            loop.call(lambda: own_loop().call_later(seconds, self._todo.put, ring))
        else:
            self._todo.put(ring)
        return waiting.clear

    def now(self) -> float:
        return time.monotonic()

    def wall(self) -> float:
        """Seconds since 1970."""
        return time.time()

    def condition(self) -> threading.Condition:
        return threading.Condition(threading.RLock())

    def aside(self, work: Callable[[], None]) -> Callable[[float], None]:
        thread = threading.Thread(target=work, name="isles-aside", daemon=True)
        thread.start()
        return thread.join

    def name(self) -> str:
        """The hub's name for this session."""
        return "" if self._uplink is None else self._uplink.name

    def seen(self, name: str) -> str:
        return "" if self._hub is None else self._hub.seen(name)

    def is_local(self) -> bool:
        """Whether the router of this client is on the same machine."""
        return self._uplink is not None and self._uplink.is_local

    @property
    def relayed(self) -> int:
        """Bytes that the clients of this router have sent to each other."""
        return 0 if self._hub is None else self._hub.relayed

    def say(self, frame: Frame, *, urgent: bool = True) -> None:
        """Send a frame to the hub."""
        loop.call(self._say, frame, urgent)

    def close(self) -> None:
        """Close the session. Safe to call twice."""
        if self._closed:
            return
        self._closed = True  # first: nothing new is asked while the queue is sent
        if self._hub is not None:
            self._hub.close()
        with suppress(TimeoutError):  # the rest of the queue is lost
            loop.run(self._end(), _ENDS)
        # Last: the callbacks of the questions that `_end` has settled still run.
        self._todo.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(_ENDS)

    # Opening

    def listen(self, mine: Credentials, listening: socket.socket, lease: float) -> None:
        """Serve as a router at `listening`."""
        self.port = listening.getsockname()[1]
        self._hub = Hub(mine, listening, lease, self.refused)
        loop.call(self._hub.join, self._own)
        self.serve(RELAY_TICKETS, self._ticket)
        self._thread.start()

    def connect(self, token: Token, host: str, port: int, seconds: float) -> None:
        """Connect to a hub. LinkLost if that fails within `seconds`."""
        self._uplink = Uplink(token, host, port, self._handle_frame, self._lost)
        loop.run(self._uplink.start(seconds))
        self._thread.start()

    def connect_by_ticket(self, ticket: bytes, seconds: float, where: tuple[str, int] | None = None) -> socket.socket:
        """A connection joined with the one that shows the same ticket at this client's hub, or at `where`. OSError if
        none does.
        """
        assert self._uplink is not None
        link = socket.create_connection(where or self._uplink.where, seconds)
        try:
            link.sendall(TICKET + ticket)
            if link.recv(1) != TICKET[:1]:
                raise ConnectionError("the other end did not show the ticket")
        except OSError:
            link.close()
            raise
        return link

    def _ticket(self, query: Query) -> None:
        hub = self._hub
        if hub is not None:
            loop.call(lambda: query.reply(hub.ticket()))

    # In the loop's thread

    def _say(self, frame: Frame, urgent: bool) -> None:
        if self._uplink is not None:
            self._uplink.send(frame, urgent)
        elif self._hub is not None:
            self._hub.hear(self._own, frame, urgent)

    def _ask(self, frame: Frame, answered: Answered, seconds: float, urgent: bool) -> None:
        timer = own_loop().call_later(seconds, self._settle, Frame(FrameKind.NOBODY, frame.number))
        self._asked[frame.number] = answered, timer
        if frame.size <= MAX_MESSAGE:
            self._say(frame, urgent)

    def _handle_frame(self, frame: Frame, urgent: bool) -> bool:
        """Handle a frame of the hub."""
        self.taken += frame.size
        if frame.kind == FrameKind.ASK:
            self._handle_question(frame)
        elif frame.kind in (FrameKind.SEEN, FrameKind.GONE):
            self._todo.put(lambda: self._seen(frame))
        else:
            self._settle(frame)
        return True

    def _handle_question(self, frame: Frame) -> None:
        size = frame.size + _OF_ITSELF
        if self._queued + size > _QUEUED:
            self.refused.note(-1, "more messages at once than can be handled")
            self._say(Frame(FrameKind.REFUSAL, frame.number, payload=b"later"), True)
            return
        self._queued += size

        def serve() -> None:
            loop.call(self._dequeue, size)
            if (answer := self._serves.get(frame.key)) is not None:
                answer(Query(bytes(frame.payload), bytes(frame.attachment), partial(self._answer, frame.number)))

        self._todo.put(serve)

    def _answer(self, number: int, reply: bytes | None, refusal: bytes | None) -> None:
        kind = FrameKind.REPLY if refusal is None else FrameKind.REFUSAL
        payload = reply or refusal or b""
        self.say(Frame(kind, number, payload=payload), urgent=len(payload) <= PIECE)

    def _dequeue(self, size: int) -> None:
        self._queued -= size

    def _settle(self, answer: Frame) -> None:
        answered, timer = self._asked.pop(answer.number, (None, None))
        if answered is None or timer is None:
            return
        timer.cancel()
        payload = bytes(answer.payload)
        outcome = (
            (payload, None)
            if answer.kind == FrameKind.REPLY
            else (None, payload if answer.kind == FrameKind.REFUSAL else None)
        )
        self._todo.put(lambda: answered(*outcome))

    def _lost(self) -> None:
        """The connection broke: open questions get no reply, and nobody counts as present."""
        for number in [*self._asked]:
            self._settle(Frame(FrameKind.NOBODY, number))
        self._todo.put(self._nobody)

    async def _end(self) -> None:
        if self._uplink is not None:
            await self._uplink.end()
        if self._hub is not None:
            await self._hub.end()
        for number in [*self._asked]:
            self._settle(Frame(FrameKind.NOBODY, number))

    # In the session's thread

    def _seen(self, frame: Frame) -> None:
        present, changed = self._watches.get(frame.number, (set(), lambda key, there: None))
        is_there = frame.kind == FrameKind.SEEN
        for key in filter(None, bytes(frame.payload).decode("ascii").split("\n")):
            if (key in present) != is_there:
                (present.add if is_there else present.discard)(key)
                changed(key, is_there)

    def _nobody(self) -> None:
        for present, changed in [*self._watches.values()]:
            for key in sorted(present):
                present.discard(key)
                changed(key, False)

    def _work(self) -> None:
        while (call := self._todo.get()) is not None:
            try:
                call()
            except Exception:  # a stranger's message must not end the thread that serves all others
                if not self._closed:
                    _LOG.exception("a message could not be handled")
            del call


def open_router(mine: Credentials, address: str, lease: float = 3.0) -> Session:
    """A router's session, of the run whose key is in `mine`.

    address: HOST:PORT to listen at, port 0 for any. lease: seconds of silence after which a client counts as lost.

    ValueError if the key is missing, or the address cannot be bound.
    """
    if mine.key is None:
        raise ValueError("to listen for others this machine needs the run's key: join first")
    host, _, port = address.rpartition(":")
    session = Session()
    session.listen(mine, listen(int(port), host.strip("[]")), lease)
    return session


def open_session(token: Token, address: str, patience: float = 5.0) -> Session:
    """A client's session with the router at `address`, HOST:PORT, which must be the machine of the token.

    patience: seconds to connect. TokenRefused if it is another machine; LinkLost, with the reason, if no connection is
    made.
    """
    session = Session()
    session.connect(token, *parse_address(address, "--connect"), patience)
    return session
