"""The machines of a run after they have met: their addresses, the ranks of each, and the links between launchers.

A `Link` carries messages over one `Connection` between two machines, for one thread besides the loop's. A link that is
silent for too long counts as lost: the other program was killed, its machine went down, or the connection was cut.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections import deque
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from isles.comm.credentials import Token
from isles.comm.errors import CommError, to_plain
from isles.comm.sockets import loop
from isles.comm.sockets.connection import LONGEST, SILENCE, Connection, LinkLost, Silence, message_of, reason
from isles.comm.sockets.proof import dial
from isles.comm.tcp import connection_state, interface_of, keep_trying, loopback, parse_address, try_soon

_HELD = 2 * LONGEST  # bytes in each queue, to send and received; beyond that the other side waits
_FLUSH = 2.0  # seconds to send the queue when a link is closed


class Link:
    """One end of a connection with signs of life. Messages are JSON values; all methods but `send` are for one
    thread.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connection = Connection(reader, writer, SILENCE, longest=LONGEST, most=_HELD, longer=self._again)
        self.here, self.there = self._connection.here, self._connection.there
        self._inbox = deque[Any]()
        self._bytes = 0
        self._changing = threading.Lock()
        self._lost: LinkLost | None = None
        self._tries_soon = False
        self._awake, self._wakes = socket.socketpair()
        self._awake.setblocking(False)
        self._wakes.setblocking(False)
        self._room = asyncio.Event()
        self._task = asyncio.get_running_loop().create_task(self._run())

    def fileno(self) -> int:
        """For select and similar functions: readable when messages may have arrived."""
        return self._awake.fileno()

    def patience(self, silence: float) -> None:
        """Count the other side as lost after `silence` seconds without a sign of life, from now on."""
        self._connection.silence = Silence(silence)
        if self._connection.socket is not None:
            self._tries_soon = try_soon(self._connection.socket, silence)

    def send(self, message: Any) -> None:
        """Send one message. LinkLost if the connection is broken or the queue stays full."""
        loop.run(self._send(json.dumps(message).encode()))

    def ready(self) -> list[Any]:
        """The messages that have arrived, without waiting. LinkLost after the last one of a broken connection."""
        with contextlib.suppress(BlockingIOError):
            while self._awake.recv(4096):
                pass
        lost = self._lost  # read before the inbox: once it is set, nothing more arrives
        with self._changing:
            messages = [*self._inbox]
            self._inbox.clear()
            self._bytes = 0
        if messages:
            loop.call(self._room.set)
            if lost is not None:
                self._wake()
        elif lost is not None:
            raise lost
        return messages

    def next(self) -> Any:
        """The first message that has arrived, without waiting; None if there is none."""
        messages = self.ready()
        with self._changing:
            self._inbox.extendleft(reversed(messages[1:]))
        if messages[1:]:
            self._wake()
        return messages[0] if messages else None

    def receive(self, seconds: float) -> Any:
        """The next message. LinkLost if none arrives within `seconds`."""
        ends_at = time.monotonic() + seconds
        while (message := self.next()) is None:
            left = ends_at - time.monotonic()
            if left <= 0:
                raise LinkLost(f"no answer within {seconds:g} s")
            self.wait(min(left, 1.0))
        return message

    def wait(self, seconds: float) -> None:
        """Return when something arrives, or after `seconds`."""
        wait([self._awake], seconds)  # not select, which fails for descriptors from 1024 on

    def close(self) -> None:
        """Close the connection after sending the queue."""
        with contextlib.suppress(TimeoutError, RuntimeError):
            loop.run(self._close(), 2 * _FLUSH)
        self._awake.close()
        self._wakes.close()

    async def _send(self, data: bytes) -> None:
        limit = self._connection.silence.limit
        try:
            async with asyncio.timeout(limit):
                while self._lost is None and not self._connection.send(data):
                    await self._connection.left()
        except TimeoutError as error:
            raise LinkLost(reason(error, limit)) from error
        if self._lost is not None:
            raise self._lost

    async def _run(self) -> None:
        try:
            await self._connection.run(self._came)
        except (OSError, EOFError, RuntimeError, ValueError, LinkLost) as error:  # RuntimeError: TLS was ended
            broken = error if isinstance(error, LinkLost) else LinkLost(reason(error))
            self._lost = self._lost or broken  # the first to give it up knows why
        self._connection.abort()
        self._wake()

    def _came(self, body: bytes | bytearray, _: bool) -> Awaitable[object] | None:
        message = message_of(bytes(body))
        with self._changing:
            self._inbox.append(message)
            self._bytes += len(body)
            is_full = self._bytes > _HELD
        self._wake()
        if not is_full:
            return None
        self._room.clear()
        return self._room.wait()

    def _again(self) -> float:
        """Seconds until the kernel retransmits, if the other side does not acknowledge; 0 if that is soon."""
        connection = self._connection.socket
        look = None if connection is None else connection_state(connection)
        if look is None or connection is None:
            return 0.0
        if self._tries_soon:
            keep_trying(connection, look, self._connection.silence.seconds)
            return 0.0
        return look.retry_in

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # full: awake already; or closed
            self._wakes.send(b"x")

    async def _close(self) -> None:
        self._lost = self._lost or LinkLost("it was closed here")
        await self._connection.close()
        self._task.cancel()


def connect(host: str, port: int, token: Token, seconds: float) -> Link:
    """A link to node 0 at host:port, once both have proved that they know the token. TokenRefused, or LinkLost with the
    reason: refused, no answer, no route, unknown name.
    """

    async def begin() -> Link:
        return Link(*await dial(host, port, seconds, token))

    try:
        return loop.run(begin())
    except (OSError, EOFError) as error:
        raise LinkLost(reason(error, seconds)) from error


@dataclass(frozen=True, kw_only=True)
class NodeSpec:
    """Which of several machines this is: `--nodes`, `--node`, `--rendezvous`. A single node needs no rendezvous."""

    nodes: int = 1
    node: int = 0
    rendezvous: str = ""
    token: Token | None = field(default=None, repr=False)
    """As given by the user; None: the token stored on this machine, or on node 0 a new one."""
    shared_directory: bool = False
    """Whether all nodes write into the same run directory, as the processes of one torchrun do."""
    credentials: Path | None = None
    """Node 0's folder with the run's credentials; None: in its run directory."""

    def __post_init__(self) -> None:
        if self.nodes < 1:
            raise ValueError(f"--nodes {self.nodes}: choose 1 or more")
        if not 0 <= self.node < self.nodes:
            raise ValueError(f"--node {self.node}: with --nodes {self.nodes} it is one of 0 to {self.nodes - 1}")
        if self.nodes > 1 and not self.rendezvous:
            raise ValueError(
                f"--nodes {self.nodes} needs --rendezvous HOST:PORT, an address of node 0 and a free port there"
            )
        if self.nodes == 1 and self.rendezvous:
            raise ValueError(f"--rendezvous {self.rendezvous} needs --nodes: how many machines meet there")
        if self.rendezvous:
            parse_address(self.rendezvous, "--rendezvous")

    @property
    def flags(self) -> str:
        """The options as typed, with a leading space; empty for a run that was started otherwise."""
        typed = self.nodes > 1 and not self.shared_directory
        return f" --nodes {self.nodes} --node {self.node} --rendezvous {self.rendezvous}" if typed else ""


def split(workers: int, nodes: int) -> list[range]:
    """The ranks of each node: consecutive, as evenly as possible, with the remainder on the first nodes."""
    each, rest = divmod(workers, nodes)
    starts = [node * each + min(node, rest) for node in range(nodes + 1)]
    return [range(start, end) for start, end in pairwise(starts)]


@dataclass(frozen=True, kw_only=True, eq=False)
class NodeGroup:
    """The machines of a run as one of them sees it. Node 0 has a link to each of the others, which have one to node 0.

    spec: this machine's. here: the address under which the others know this machine. host: node 0's. descriptions: by
    node, what the others reported about themselves; facts: what node 0 sent when all were there.
    """

    spec: NodeSpec = field(default_factory=NodeSpec)
    here: str = "127.0.0.1"
    host: str = "127.0.0.1"
    links: Mapping[int, Link] = field(default_factory=dict)
    descriptions: Mapping[int, Any] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def interface(self) -> str | None:
        """The network interface that this machine's workers use."""
        return loopback() if self.spec.nodes == 1 else interface_of(self.here)

    def shares(self, workers: int) -> list[range]:
        """The ranks of each node."""
        return split(workers, self.spec.nodes)

    def go(self, **facts: Any) -> None:
        """Node 0: start the run on all machines, with the facts that they need."""
        self.facts.update(facts)
        self.tell({"go": self.facts})

    def tell(self, message: Any) -> None:
        """Send to all links that are not lost."""
        for link in self.links.values():
            with contextlib.suppress(LinkLost):
                link.send(message)

    def part(self, error: BaseException | None = None) -> None:
        """Close the links. Node 0 first reports how the run ended; another node reports why it leaves early."""
        if self.spec.node == 0:
            self.tell({"over": None if error is None else to_plain(_worded(error))})
        elif error is not None:
            self.tell([-1, "leaving", to_plain(_worded(error))])
        for link in self.links.values():
            link.close()


def _worded(error: BaseException) -> Exception:
    """The error to report to other machines: itself if they know its class, else its text."""
    if isinstance(error, KeyboardInterrupt | SystemExit):
        return CommError("stopped by hand on another node")
    if isinstance(error, CommError | ValueError):
        return error
    return CommError(f"on another node: {error}")


SINGLE_NODE = NodeSpec()  # of a run on one machine
