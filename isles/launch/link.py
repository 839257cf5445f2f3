"""A link: messages over one connection between two machines, with signs of life.

A link that is silent for too long counts as lost: the other side's program was killed, its machine went down,
or the connection was cut. It lives in the loop's thread (`loop`); its methods are for any one other thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import threading
import time
from collections import deque
from multiprocessing.connection import wait
from typing import Any

from isles.comm import credentials
from isles.comm.credentials import Token
from isles.comm.sockets import loop
from isles.comm.sockets.frames import ALIVE, HEAD, LONGEST, STRANGERS, BadFrame, length_of, message_of, packed
from isles.comm.sockets.lost import SILENCE, LinkLost, close, dial, ends, reason
from isles.comm.sockets.proof import prove_as_node
from isles.comm.sockets.silence import BEAT, Silence
from isles.comm.tcp import keep_trying, seen, try_soon

_BEAT = BEAT
_HELD = 2 * LONGEST  # bytes that have come and wait to be taken; the other side waits meanwhile
_FLUSH = 2.0  # seconds for what was sent to leave when a link is closed


class Link:
    """One end of a connection. Messages are anything that JSON holds; all methods but `send` are for one thread.

    longest: bytes of a message that comes.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, longest: int = LONGEST) -> None:
        self._reader, self._writer, self._longest = reader, writer, longest
        self.here, self.there = ends(writer)  # kept: a broken connection does not tell any more
        self._inbox: deque[tuple[int, Any]] = deque()
        self._bytes = 0
        self._changing = threading.Lock()
        self._lost: LinkLost | None = None
        self.silence = Silence(SILENCE)
        self._socket = _socket(writer)
        self._tries_soon = False
        self._awake, self._wakes = socket.socketpair()
        self._awake.setblocking(False)
        self._wakes.setblocking(False)
        self._room = asyncio.Event()
        self._tasks = [asyncio.get_running_loop().create_task(self._read())]

    def fileno(self) -> int:
        """For select and its relatives: readable when there may be something to take."""
        return self._awake.fileno()

    def keep_alive(self) -> None:
        """Begin to send signs of life, whatever the other threads do."""

        async def begin() -> None:
            self._tasks.append(asyncio.get_running_loop().create_task(self._beat()))

        loop.run(begin())

    def patience(self, silence: float) -> None:
        """From now on the other side counts as lost after `silence` seconds without a sign of life."""
        self.silence = Silence(silence)
        if self._socket is not None:
            self._tries_soon = try_soon(self._socket, silence)

    def send(self, message: Any) -> None:
        """Send one message. LinkLost where the connection is broken or nobody takes what is sent."""
        loop.run(self._send(packed(message)))

    def ready(self) -> list[Any]:
        """The messages that have come, without waiting. LinkLost where no more will come, once all were taken."""
        with contextlib.suppress(BlockingIOError):
            while self._awake.recv(4096):
                pass
        silent = self.silence.over(self._again())
        lost = self._lost  # before the look: nothing comes after it
        with self._changing:
            messages = [message for _, message in self._inbox]
            self._inbox.clear()
            self._bytes = 0
        if messages:
            loop.call(self._room.set)
            if lost is not None:
                self._wake()
        elif lost is not None:
            raise lost
        elif silent and not self._inbox:
            self._lost = LinkLost(f"no sign of life for {self.silence.limit:g} s")
            loop.call(self._writer.transport.abort)  # nothing that is said from now on would arrive
            raise self._lost
        return messages

    def next(self) -> Any:
        """The first message that has come, without waiting; None if there is none."""
        messages = self.ready()
        with self._changing:
            self._inbox.extendleft((0, message) for message in reversed(messages[1:]))
        if messages[1:]:
            self._wake()
        return messages[0] if messages else None

    def receive(self, seconds: float) -> Any:
        """The next message. LinkLost where it does not come within `seconds`."""
        ends_at = time.monotonic() + seconds
        while (message := self.next()) is None:
            left = ends_at - time.monotonic()
            if left <= 0:
                raise LinkLost(f"no answer within {seconds:g} s")
            self.wait(min(left, 1.0))
        return message

    def wait(self, seconds: float) -> None:
        """Return when something comes, or after `seconds`."""
        wait([self._awake], seconds)  # not select, which fails for descriptors from 1024 on

    def close(self) -> None:
        """Close the connection; what was sent still arrives."""
        with contextlib.suppress(TimeoutError, RuntimeError):
            loop.run(self._close(), 2 * _FLUSH)
        self._awake.close()
        self._wakes.close()

    def end(self) -> None:
        """Break the connection off, from any thread: whoever waits for something on it gets LinkLost."""
        self._lost = self._lost or LinkLost("it was closed here")
        loop.call(self._writer.transport.abort)
        self._wake()

    async def _send(self, data: bytes) -> None:
        if self._lost is not None:
            raise self._lost
        try:
            self._writer.write(data)
            async with asyncio.timeout(self.silence.limit):
                await self._writer.drain()
        except (OSError, RuntimeError) as error:  # TimeoutError is an OSError; RuntimeError: TLS was ended
            raise LinkLost(reason(error)) from error

    async def _read(self) -> None:
        try:
            while True:
                length = length_of(await self._reader.readexactly(HEAD.size), self._longest)
                self.silence.heard()
                body = await self._body(length)
                if body:
                    self._keep(message_of(body), length)
                if self._bytes > _HELD:
                    self._room.clear()
                    self._wake()
                    await self._room.wait()
        except (OSError, asyncio.IncompleteReadError, BadFrame) as error:
            self._lost = self._lost or LinkLost(reason(error))  # who gave it up first knows why
            self._wake()

    async def _body(self, length: int) -> bytes:
        """In pieces, for those of a long message over a slow line are signs of life too."""
        pieces: list[bytes] = []
        while length:
            piece = await self._reader.read(min(length, 1 << 16))
            if not piece:
                raise asyncio.IncompleteReadError(b"", length)
            self.silence.heard()
            pieces.append(piece)
            length -= len(piece)
        return b"".join(pieces)

    def _again(self) -> float:
        """Seconds until the kernel tries once more, where the other side does not acknowledge; 0 where that is soon."""
        look = None if self._socket is None else seen(self._socket)
        if look is None or self._socket is None:
            return 0.0
        if self._tries_soon:
            keep_trying(self._socket, look, self.silence.seconds)
            return 0.0
        return look.again

    def _keep(self, message: Any, length: int) -> None:
        with self._changing:
            self._inbox.append((length, message))
            self._bytes += length
        self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # full: awake already; or closed
            self._wakes.send(b"x")

    async def _beat(self) -> None:
        while self._lost is None:
            await asyncio.sleep(_BEAT)
            if self._writer.transport.get_write_buffer_size() < _HELD:
                self._writer.write(ALIVE)

    async def _close(self) -> None:
        for task in self._tasks:
            task.cancel()
        self._lost = self._lost or LinkLost("it was closed here")
        await close(self._writer)


async def heard(reader: asyncio.StreamReader, longest: int) -> Any:
    """The next message on a connection that is no link yet. BadFrame, or EOFError where there is none."""
    length = length_of(await reader.readexactly(HEAD.size), longest)
    return message_of(await reader.readexactly(length))


def connect(host: str, port: int, seconds: float) -> Link:
    """A link to whoever listens there. LinkLost with the reason: refused, no answer, no route, unknown name."""

    async def begin() -> Link:
        return Link(*await asyncio.open_connection(sock=connection), STRANGERS)

    connection = dial(host, port, seconds)
    return loop.run(begin())


def connect_as_node(host: str, port: int, token: Token, seconds: float) -> Link:
    """A link to node 0 at host:port, once both have proved that they know the token. TokenRefused, or LinkLost as
    `connect`.
    """

    async def begin() -> Link:
        async with asyncio.timeout(seconds):
            tls = credentials.unverified_context()  # `prove_as_node` compares the certificate
            reader, writer = await asyncio.open_connection(sock=connection, ssl=tls, server_hostname=credentials.NAME)
            try:
                await prove_as_node(reader, writer, token, f"{ends(writer)[1]}:{port}")
            except BaseException:
                writer.close()
                raise
            return Link(reader, writer)

    connection = dial(host, port, seconds)
    try:
        return loop.run(begin())
    except (OSError, EOFError, ssl.SSLError) as error:
        raise LinkLost(reason(error, seconds)) from error


def _socket(writer: asyncio.StreamWriter) -> socket.socket | None:
    """The connection itself; its descriptor is closed by asyncio."""
    own = writer.get_extra_info("socket")
    return None if own is None else own._sock
