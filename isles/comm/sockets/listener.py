"""A listening socket that is safe against strangers; and whether one machine can reach another, and how fast.

Each connection is handled by a task of its own in the loop's thread, with `seconds` from its beginning to its end. At
most `MOST` are handled at a time: beyond that, one of the address with the most connections is cut off, so that a
machine that opens thousands only cuts off itself. It is the oldest one at the stage (silent, has sent something, has
completed TLS) that most of them are at: so many alike, however far they get, do not cut off one that gets further or
has just come.

Streams and their transports refer to each other, and asyncio gives each TLS connection a buffer of 256 kB. Python
collects such cycles more rarely the more objects a process has, and one with torch has a million: thousands of
strangers took hundreds of MB. So objects from before are frozen while a listener exists, and garbage is collected after
every few connections, which then takes a millisecond.

Whether a machine can be reached is tested before gloo or a pair needs it, whose own error would be a time-out. It opens
an `EchoServer` and sends the others its port (in a fixed world an ephemeral one); each of them asks for an echo:

    echo_failure(address, port, name)  ---- {"echo": token} ----------------->   EchoServer
                                       <-- {"echoed": token, "name": name} ---
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import secrets
import socket
import ssl
import statistics
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import NamedTuple, Self, cast

from isles.base.parsing import OneLine, table, value_of
from isles.comm import credentials
from isles.comm.credentials import Credentials
from isles.comm.sockets import loop
from isles.comm.sockets.connection import STRANGERS, BadFrame, LinkLost, close, heard, packed, plain, reason
from isles.comm.sockets.proof import dial, prove_as_host
from isles.comm.tcp import listen

MOST = 64
_AGAIN = 0.05  # seconds until the next try after a failed accept, and until the next look at incomplete first bytes
_BACKLOG = 128
_LINES = 20  # the most lines about strangers in a minute
_LITTER = 32  # ended connections until garbage is collected

Hear = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
"""Handles a new connection. When it returns, it has closed the connection or taken it over. An exception ends only that
connection: LinkLost with a text for the user, or anything that a connection may raise.
"""


class Listener:
    """Passes every connection to `listening` to `hear`, from construction until the end of its context.

    mine: a run's credentials; `hear` then gets only connections that have proved, in TLS, that they know its token.
    refused: called in the loop's thread with the address and the reason of each failed connection. raw: sees each
    connection first; True if it has taken it over, so that `hear` does not get it.
    """

    def __init__(
        self,
        listening: socket.socket,
        hear: Hear,
        *,
        seconds: float,
        mine: Credentials | None = None,
        refused: Callable[[str, str], None] = lambda address, why: None,
        raw: Callable[[socket.socket], Awaitable[bool]] | None = None,
    ) -> None:
        self._listening, self._hear, self._refused = listening, hear, refused
        self._seconds, self._mine, self._raw = seconds, mine, raw
        self._tls = None if mine is None else credentials.server_context(mine)
        self._heard: dict[asyncio.Task[None], tuple[str, int]] = {}  # address and stage, in the order of arrival
        self._gone = 0
        listening.setblocking(False)
        listening.listen(_BACKLOG)
        self._set_aside = not gc.get_freeze_count()  # objects that other code has frozen stay frozen
        if self._set_aside:
            gc.freeze()

        async def begin() -> asyncio.Task[None]:
            return asyncio.get_running_loop().create_task(self._accept())

        self._accepting = loop.run(begin())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        # `_end` waits 1 s at most. A loop that does not answer, or is closed, has no task that could still accept.
        with contextlib.suppress(TimeoutError, RuntimeError):
            loop.run(self._end(), 2.0)
        self._listening.close()
        if self._set_aside:
            gc.unfreeze()

    async def _accept(self) -> None:
        running = asyncio.get_running_loop()
        while True:
            try:
                connection, address = await running.sock_accept(self._listening)
            except OSError:  # it has closed again, or this process has no descriptor left
                await asyncio.sleep(_AGAIN)
                continue
            if len(self._heard) >= MOST:
                self._make_room()
            task = running.create_task(self._attend(connection, plain(address[0])))
            self._heard[task] = plain(address[0]), 0
            task.add_done_callback(self._over)
            # `sock_accept` may not yield, and nobody is cut off before its first bytes are looked at.
            await asyncio.sleep(0)

    def _over(self, task: asyncio.Task[None]) -> None:
        self._heard.pop(task, None)
        self._gone += 1
        if self._gone % _LITTER == 0:
            gc.collect()

    def _make_room(self) -> None:
        ((address, _),) = Counter(address for address, _ in self._heard.values()).most_common(1)
        (most, _), *_ = Counter(where for where in self._heard.values() if where[0] == address).most_common(1)
        oldest = next(task for task, where in self._heard.items() if where == most)
        # Removed before it has ended, so that it is not chosen again meanwhile.
        del self._heard[oldest]
        oldest.cancel()

    def _reached(self, stage: int) -> None:
        """Note how far the present connection has got."""
        if (task := cast(asyncio.Task[None], asyncio.current_task())) in self._heard:
            self._heard[task] = self._heard[task][0], stage

    async def _attend(self, connection: socket.socket, address: str) -> None:
        writer: asyncio.StreamWriter | None = None
        try:
            async with asyncio.timeout(self._seconds):
                if self._raw is not None and await self._raw(connection):
                    return
                self._reached(1)
                reader, writer = await opened(connection, self._tls)
                self._reached(2)
                if self._mine is not None:
                    await prove_as_host(reader.readexactly, writer.write, self._mine.token)
                await self._hear(reader, writer)
        except asyncio.CancelledError:
            writer.transport.abort() if writer is not None else connection.close()
            raise
        except Exception as error:  # any error of a stranger's connection ends only that connection
            writer.transport.abort() if writer is not None else connection.close()
            words = f"it is silent for {self._seconds:g} s" if isinstance(error, TimeoutError) else reason(error)
            self._refused(address, str(error) if isinstance(error, LinkLost) else words)

    async def _end(self) -> None:
        tasks = [self._accepting, *self._heard]
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks, timeout=1.0)


async def peeked(connection: socket.socket, first: bytes) -> bool:
    """Whether the connection begins with `first`, which is then consumed. EOFError if nothing arrives."""
    running = asyncio.get_running_loop()
    while True:
        there: asyncio.Future[None] = running.create_future()
        running.add_reader(connection, lambda there=there: there.done() or there.set_result(None))
        try:
            await there
        finally:
            running.remove_reader(connection)
        begins = connection.recv(len(first), socket.MSG_PEEK)
        if not begins:
            raise EOFError
        if begins != first[: len(begins)]:
            return False
        if len(begins) == len(first):
            connection.recv(len(first))
            return True
        # Peeked bytes stay in the kernel, so the connection stays readable: without a pause this would spin.
        await asyncio.sleep(_AGAIN)


async def opened(
    connection: socket.socket, tls: ssl.SSLContext | None
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """The streams of an accepted connection, after TLS if required. They own the connection."""
    running = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=STRANGERS)
    transport, protocol = await running.connect_accepted_socket(
        lambda: asyncio.StreamReaderProtocol(reader), connection, ssl=tls
    )
    return reader, asyncio.StreamWriter(transport, protocol, reader, running)


class Throttle:
    """Limits lines about strangers per minute, and reports how many it withheld."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._minute, self._passed, self._withheld = time.monotonic(), 0, 0

    def tell(self, text: str) -> None:
        """Report a line, unless the limit is reached."""
        if time.monotonic() - self._minute > 60.0:
            if self._withheld:
                self._tell(f"and {self._withheld} more such")
            self._minute, self._passed, self._withheld = time.monotonic(), 0, 0
        if self._passed < _LINES:
            self._passed += 1
            self._tell(text)
        else:
            self._withheld += 1


PATIENCE = 5.0  # seconds for an echo
_LONGEST = 256  # bytes of a question, and of an answer
_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")


class EchoServer(Listener):
    """Echoes every token that it is sent at the address `host` while the context is open. port: 0 for an ephemeral one.
    name: identifies this server. seconds, raw: as in `Listener`. ValueError if the address cannot be bound.
    """

    def __init__(
        self,
        host: str,
        port: int = 0,
        name: str = "",
        seconds: float = PATIENCE,
        raw: Callable[[socket.socket], Awaitable[bool]] | None = None,
    ) -> None:
        async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            asked = table(await heard(reader, _LONGEST), "the question")
            writer.write(packed({"echoed": value_of(asked, "echo", OneLine), "name": name}))
            await close(writer)

        listening = listen(port, host)
        self.port: int = listening.getsockname()[1]
        super().__init__(listening, echo, seconds=seconds, raw=raw)


async def echo_failure(address: str, port: int, name: str = "", seconds: float = PATIENCE) -> str:
    """Why the echo server of that name does not answer at `address`, such as "no answer within 5 s"; "" if it does. In
    the loop's thread.
    """
    token = secrets.token_hex(8)
    try:
        async with asyncio.timeout(seconds):
            reader, writer = await dial(address, port, seconds)
            try:
                writer.write(packed({"echo": token}))
                answer = await heard(reader, _LONGEST)
            finally:
                writer.transport.abort()
    except (OSError, EOFError, BadFrame) as error:
        return reason(error, seconds)
    except ValueError:
        return "it is no address"
    return "" if answer == {"echoed": token, "name": name} else "something else answers there"


def port_range() -> str:
    """The range of ephemeral ports of this system, such as "32768-60999", which a firewall must let through."""
    try:
        first, last = _PORTS.read_text().split()
    except (OSError, ValueError):
        first, last = "49152", "65535"  # IANA's, which other systems keep to
    return f"{first}-{last}"


_PINGS = 20  # round trips, whose median counts: single ones are delayed by other traffic
_SMALLEST = 1 << 16  # bytes of the first exchange; each next one is twice as large
_ENOUGH = 0.4  # seconds of the shortest exchange that counts: in shorter ones the round trip is a large part


class LinkRates(NamedTuple):
    """out, back: bytes per second to and from the other side. round_trip: median seconds."""

    out: float
    back: float
    round_trip: float


def measure_link(ask: Callable[[int, int], object], largest: int) -> LinkRates:
    """Measure a link within some seconds. ask(out, back): sends so many bytes, and returns once `back` bytes have
    arrived; its errors end the measurement. largest: bytes of one direction of an exchange.
    """

    def timed(out: int, back: int) -> float:
        began = time.perf_counter()
        ask(out, back)
        return time.perf_counter() - began

    def rate(timed: Callable[[int], float]) -> float:
        size, best = _SMALLEST, 0.0
        while (seconds := timed(size)) < _ENOUGH:
            best = max(best, size / seconds)
            if size >= largest:
                return best
            size *= 2
        return size / seconds

    round_trip = statistics.median(timed(0, 0) for _ in range(_PINGS))
    return LinkRates(rate(lambda size: timed(size, 0)), rate(lambda size: timed(0, size)), round_trip)
