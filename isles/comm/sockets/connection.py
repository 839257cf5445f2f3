"""A connection after its handshake: messages in two lanes, urgent ones before the others and between the frames of a
long one; and signs of life.

Traffic proves nothing about a process: the kernel of a frozen one goes on acknowledging. So each end of a connection,
and every worker, sends signs of life now and then from a thread of its own. An end that is silent for too long is lost;
each piece of a long message over a slow link is a sign of life. A frame fits a TLS record, and the kernel's send buffer
is bounded, because urgent messages would have to wait behind it.

    frame = b"isle" + length (4 bytes, big-endian) + that many bytes of a message; length 0: only a sign of life

The two highest bits of the length are flags: `URGENT`, and `MORE` if the message goes on in a later frame. A message's
length is checked before it is buffered, and its JSON is parsed as untrusted input. There is no pickle: messages are
plain data, and anything else is `BadFrame`.

A `Connection` runs in the loop's thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import socket
import ssl
import struct
import sys
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, cast

from isles.base.parsing import parse_json
from isles.comm.errors import CommError
from isles.comm.stopping import LeaveControl

BEAT = 2.0  # seconds between signs of life
_STOOD = 2.0  # the longest interval between two looks that counts: if it is longer, this process itself was suspended


class Silence:
    """Measures how long the other side has been silent; `over` must be called often.

    seconds: until it counts as lost. first: the same before its first message, because programs start slowly.
    """

    def __init__(self, seconds: float, first: float | None = None) -> None:
        self.seconds = seconds
        self._first: float | None = seconds if first is None else max(first, seconds)
        self._heard = self._looked = time.monotonic()
        self._longer = 0.0

    def heard(self) -> None:
        """Something has arrived."""
        self._heard, self._first, self._longer = time.monotonic(), None, 0.0

    @property
    def has_heard(self) -> bool:
        """Whether anything has ever arrived."""
        return self._first is None

    @property
    def limit(self) -> float:
        """The present limit, seconds."""
        return self.seconds if self._first is None else self._first

    def over(self, longer: float = 0.0) -> bool:
        """Whether the silence exceeds the limit plus `longer` (the largest value in this silence, and at most the limit
        once more: the other side's kernel waits about as long as this one). Read what has arrived before calling it.
        """
        now = time.monotonic()
        self._heard = min(self._heard + max(now - self._looked - _STOOD, 0.0), now)
        self._looked = now
        self._longer = max(self._longer, min(longer, self.seconds))
        return now - self._heard > self.limit + self._longer


def no_sign_of_life(seconds: float) -> str:
    """The reported failure of a worker that was silent for so long."""
    return f"no sign of life for {seconds:g} s: its process is stopped or its machine frozen"


def begin_pulse(
    send: Callable[[tuple[str, Any]], None],
    closing: threading.Event,
    moved: Callable[[], int],
    asked: threading.Event,
    leaving: LeaveControl,
) -> None:
    """Start a worker's thread of signs of life: ("beat", bytes that its connections have moved) until `closing`.

    asked: set when this process is asked to end; passed on to `leaving`.
    """

    def beat() -> None:
        # The launcher has ended: nobody is left to hear of this worker.
        with contextlib.suppress(OSError, EOFError):
            while not closing.is_set():
                send(("beat", moved()))
                # One wait for both: a request to end is passed on at once, not at the next beat.
                if asked.wait(BEAT):
                    # Cleared first: a request that arrives while `ask` runs is passed on at the next turn.
                    asked.clear()
                    leaving.ask()

    threading.Thread(target=beat, name="isles-pulse", daemon=True).start()


MARK = b"isle"
HEAD = struct.Struct(">4sI")
URGENT, MORE = 1 << 31, 1 << 30
LONGEST = 16 << 20  # the most bytes of an authenticated peer's message; usual ones have some hundred
STRANGERS = 64 << 10  # the most bytes of an unauthenticated peer's message
ALIVE = HEAD.pack(MARK, 0)
_OTHER = "what answers there is not Isles"
_DEEPEST = 32  # most nested tables and lists: a parser recurses on them; Isles' messages have 6


class BadFrame(ValueError):
    """What arrived is no message of Isles."""


def packed(message: Any) -> bytes:
    """The frame of a message, any JSON value."""
    body = json.dumps(message).encode()
    return HEAD.pack(MARK, len(body)) + body


def head_of(head: bytes, longest: int) -> tuple[int, bool, bool]:
    """Parse the first `HEAD.size` bytes of a frame: (length, urgent, more). BadFrame if it is longer than `longest`."""
    mark, flags = HEAD.unpack(head)
    length = flags & ~(URGENT | MORE)
    if mark != MARK or length > longest or (flags and not length):
        raise BadFrame(_OTHER)
    return length, bool(flags & URGENT), bool(flags & MORE)


def message_of(body: bytes) -> Any:
    """The message of a body. BadFrame if it is no JSON, or nested too deeply."""
    try:
        return parse_json(body, _DEEPEST)
    except ValueError as error:
        raise BadFrame(_OTHER) from error


async def heard(reader: asyncio.StreamReader, longest: int) -> Any:
    """The first message on a connection. BadFrame; EOFError if there is none."""
    body, more = b"", True
    while more or not body:
        length, _, more = head_of(await reader.readexactly(HEAD.size), longest - len(body))
        body += await reader.readexactly(length)
    return message_of(body)


SILENCE = 10.0  # seconds without a sign of life until the other side counts as lost, while the machines meet


class LinkLost(CommError):
    """The connection is not usable any more; the text is the reason, such as "it closed the connection"."""


def ends(writer: asyncio.StreamWriter) -> tuple[str, str]:
    """The addresses of this end and the other one; "" for a connection that has ended."""
    names = (writer.get_extra_info("sockname"), writer.get_extra_info("peername"))
    here, there = (plain(name[0]) if name else "" for name in names)
    return here, there


def plain(address: str) -> str:
    """An IPv4 address from an IPv6 socket, in its usual form."""
    return address.removeprefix("::ffff:")


def reason(error: BaseException, seconds: float | None = None) -> str:
    """Why a connection failed, in words. seconds: how long it was waited for; None: SILENCE."""
    if isinstance(error, BadFrame):
        return str(error)
    if isinstance(error, EOFError | ConnectionResetError | BrokenPipeError | RuntimeError):
        return "it closed the connection"
    if isinstance(error, TimeoutError) and error.errno == errno.ETIMEDOUT:
        return "nothing reaches it any more (the kernel gave the connection up)"
    if isinstance(error, TimeoutError):
        return f"no answer within {SILENCE if seconds is None else seconds:g} s"
    if isinstance(error, socket.gaierror):
        return "no such host name"
    if isinstance(error, ssl.SSLError):
        return "it does not speak TLS as isles does"
    number = error.errno if isinstance(error, OSError) else None
    return (os.strerror(number) if number else str(error)).lower()


async def close(writer: asyncio.StreamWriter) -> None:
    """Close a connection once its buffer was sent, or after a time-out."""
    try:
        writer.close()
        async with asyncio.timeout(_FLUSH):
            await writer.wait_closed()
    # It broke while it was closed (TimeoutError is an OSError): there is nothing left to send.
    except (OSError, RuntimeError):
        pass
    finally:
        writer.transport.abort()


PIECE = 1 << 14
"""Bytes of a message in one frame: those of a TLS record."""
_LOOKS = 4  # looks, and signs of life, within a silence: some may be late or lost
_LOOK = 1.0  # the most seconds between them; below _STOOD, or `Silence` would not count all of the time
_UNSENT = 1 << 15  # most unsent bytes in each of the buffers below: urgent messages wait behind them
_NOTSENT_LOWAT = 25  # of linux/tcp.h
_FLUSH = 2.0  # seconds to send the queue

Heard = Callable[[bytes | bytearray, bool], Awaitable[object] | None]
"""Called with a message and whether it is urgent. Reading pauses until the returned awaitable is done."""


class Connection:
    """One end. silence: seconds until the other one counts as lost. longest: bytes of a received message. most: bytes
    of the send queue. longer: returns by how many seconds a silence may now exceed its limit.
    """

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        silence: float,
        *,
        longest: int,
        most: int,
        longer: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._reader, self._writer, self._longest, self._most = reader, writer, longest, most
        self._longer = longer
        self.here, self.there = ends(writer)  # stored: a broken connection has no addresses
        self.silence = Silence(silence)
        self._lanes: tuple[deque[memoryview], deque[memoryview]] = deque(), deque()
        self._waiting, self._any, self._left = 0, asyncio.Event(), asyncio.Event()
        self._holds = False
        writer.transport.set_write_buffer_limits(high=_UNSENT)
        with contextlib.suppress(AttributeError):  # private: the transport below TLS, which has a buffer of its own
            cast(Any, writer.transport)._ssl_protocol._transport.set_write_buffer_limits(high=_UNSENT)
        wrapped = writer.get_extra_info("socket")
        self.socket: socket.socket | None = None if wrapped is None else wrapped._sock  # its descriptor is asyncio's
        with contextlib.suppress(OSError):  # it has broken already: the first read reports that
            wrapped.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if sys.platform == "linux":
                wrapped.setsockopt(socket.IPPROTO_TCP, _NOTSENT_LOWAT, _UNSENT)

    def send(self, message: bytes, *, urgent: bool = False) -> bool:
        """Queue a message; False if the queue is full."""
        if self._waiting + len(message) > self._most:
            return False
        self._waiting += len(message)
        self._lanes[urgent].append(memoryview(message))
        self._any.set()
        return True

    async def left(self) -> None:
        """Wait until something was sent, or the connection breaks."""
        # Only what is sent from now on counts: `_left` is still set by earlier frames.
        self._left.clear()
        await self._left.wait()

    async def run(self, heard: Heard) -> None:
        """Call `heard` with each message until the connection breaks; raises what broke it, LinkLost for silence."""
        tasks = [asyncio.ensure_future(one) for one in (self._read(heard), self._look(), self._write())]
        try:  # a write error must not hide messages that have arrived: let the reader finish first
            done, _ = await asyncio.wait(tasks[:2], return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._left.set()

    def abort(self) -> None:
        """Break the connection."""
        self._writer.transport.abort()

    async def close(self) -> None:
        """Close once the queue was sent, or after a time-out."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_FLUSH):
                while self._waiting and not self._writer.transport.is_closing():
                    await asyncio.sleep(0.005)  # until `_write` has taken the rest
        await close(self._writer)

    async def _read(self, heard: Heard) -> None:
        lanes = [bytearray(), bytearray()]
        while True:
            length, urgent, more = head_of(await self._reader.readexactly(HEAD.size), self._longest)
            self.silence.heard()
            if not length:
                continue
            lane = lanes[urgent]
            if len(lane) + length > self._longest:
                raise BadFrame("a message beyond the size limit")
            while length:
                piece = await self._reader.read(length)
                if not piece:
                    raise asyncio.IncompleteReadError(b"", length)
                self.silence.heard()
                lane += piece
                length -= len(piece)
            if not more:
                # A new buffer before the call: the receiver may keep the old one.
                lanes[urgent] = bytearray()
                if (wait := heard(lane, urgent)) is not None:
                    self._holds = True
                    await wait
                    self._holds = False

    async def _write(self) -> None:
        while True:
            await self._any.wait()
            batch = list[bytes | memoryview]()
            # At most about one piece a batch: an urgent message that arrives meanwhile then leaves with the next one.
            room = PIECE
            while room > 0 and (lane := next((one for one in (1, 0) if self._lanes[one]), None)) is not None:
                message = self._lanes[lane].popleft()
                piece, rest = message[:PIECE], message[PIECE:]
                if rest:
                    self._lanes[lane].appendleft(rest)
                flags = (URGENT if lane else 0) | (MORE if rest else 0)
                batch += (HEAD.pack(MARK, flags | len(piece)), piece)
                room -= len(piece)
                self._waiting -= len(piece)
            self._writer.write(b"".join(batch))
            await self._writer.drain()
            self._left.set()
            # No await between the two, so that no `send` comes in between and is forgotten.
            if not any(self._lanes):
                self._any.clear()

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(min(self.silence.seconds / _LOOKS, _LOOK))
            if self._holds:
                self.silence.heard()  # while reading is paused, silence means nothing
            if self.silence.over(self._longer()):
                raise LinkLost(f"no sign of life for {self.silence.limit:g} s")
            # Where something waits to be sent, its frames are the sign of life.
            if not self._waiting and not self._writer.transport.get_write_buffer_size():
                self._writer.write(ALIVE)
