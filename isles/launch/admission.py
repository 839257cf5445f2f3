"""Who is let into a run at node 0's rendezvous: all that connect are looked at. Who proves that it knows the token is
told why where it is refused; who does not is told nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import socket
from collections.abc import Callable, Mapping
from typing import Any

from isles.base.errors import printable
from isles.base.parsing import OneLine, Port, Unfit, integer, table, value_of
from isles.base.version import __version__
from isles.comm.credentials import Credentials
from isles.comm.errors import RendezvousFailed, to_plain
from isles.comm.sockets.connection import SILENCE, STRANGERS, LinkLost, heard
from isles.comm.sockets.listener import Listener, Throttle
from isles.launch.nodes import Link

_GLANCE = 0.2  # seconds between looks at who has gone
_MANY = 1 << 20  # nodes


class Admission:
    """The other nodes' launchers. Their links are closed at the end of the context, with its error, unless they were
    released.

    listening: where they come; closed at the end. mine: the run's. agree, tell: as in `rendezvous.host`.
    """

    def __init__(
        self,
        nodes: int,
        listening: socket.socket,
        mine: Credentials,
        agree: Callable[[Mapping[str, Any], int], str],
        tell: Callable[[str], None],
    ) -> None:
        self.nodes, self.agree, self.tell = nodes, agree, tell
        self.links: dict[int, Link] = {}
        self.descriptions: dict[int, Any] = {}
        self.ports: dict[int, str] = {}
        self._echo_ports: dict[int, int] = {}
        self._arrived: queue.SimpleQueue[tuple[Link, Any]] = queue.SimpleQueue()
        self._turned_away: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._throttle = Throttle(lambda text: self._turned_away.put(text))
        self._released = False
        self._listener = Listener(
            listening,
            self._hear,
            seconds=SILENCE,
            mine=mine,
            refused=lambda address, why: self._throttle.tell(f"turned away {address}: {why}"),
        )

    def __enter__(self) -> Admission:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._listener.__exit__(kind, error, trace)
        with contextlib.suppress(queue.Empty):
            while True:
                self._arrived.get_nowait()[0].close()
        if self._released:
            return
        reason = error if isinstance(error, Exception) else RendezvousFailed("node 0 was stopped")
        for link in self.links.values():
            _dismiss(link, reason)

    def release(self) -> None:
        """All is well: whoever has the links closes them."""
        self._released = True

    @property
    def missing(self) -> list[int]:
        """Nodes that are not there."""
        return [node for node in range(1, self.nodes) if node not in self.links]

    def format_missing(self) -> str:
        """As in "node 1, node 2"."""
        return ", ".join(f"node {node}" for node in self.missing)

    def echo_addresses(self) -> dict[int, tuple[str, int]]:
        """By node, address and port of its echo server."""
        return {node: (link.there, self._echo_ports[node]) for node, link in self.links.items()}

    def admit(self) -> None:
        """Look for a moment at who has come, what they said, and who goes."""
        with contextlib.suppress(queue.Empty):
            self._decide(*self._arrived.get(timeout=_GLANCE))
        with contextlib.suppress(queue.Empty):
            while True:
                self.tell(self._turned_away.get_nowait())
        for node, link in list(self.links.items()):
            try:
                link.ready()
            except LinkLost as error:
                del self.links[node]
                link.close()
                self.tell(f"node {node} ({link.there}) went away: {error}; waiting for {self.format_missing()}")

    def reached(self, node: int, seconds: float) -> dict[int, str]:
        """What that node says within `seconds` of the echoes that it asked for: by node, empty or why none came."""
        link = self.links[node]
        try:
            said = table(table(link.receive(seconds), "the answer").get("reached"), "reached")
            return {other: value_of(said, str(other), OneLine) for other in range(self.nodes) if other != node}
        except LinkLost as error:
            raise RendezvousFailed(f"node {node} ({link.there}) went away: {error}") from None
        except Unfit:
            raise RendezvousFailed(f"node {node} ({link.there}) does not answer as isles {__version__} does") from None

    async def _hear(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        hello = await heard(reader, STRANGERS)
        self._arrived.put((Link(reader, writer), hello))

    def _decide(self, link: Link, hello: Any) -> None:
        try:
            node = self._admitted(hello, link)
        except Unfit as error:
            refusal = printable(str(error))
            self.tell(f"refused {link.there}: {refusal}")
            return _dismiss(link, ValueError(refusal))
        self.links[node] = link
        with contextlib.suppress(LinkLost):  # seen at the next look
            link.send({"welcome": len(self.missing)})
        waiting = f"; waiting for {self.format_missing()}" if self.missing else ""
        return self.tell(f"node {node} ({link.there}) is here{waiting}")

    def _admitted(self, hello: Any, link: Link) -> int:
        """The number of the node that says hello, whose description is kept. Unfit, in words, where it is refused."""
        hello = table(hello, "what it says")
        theirs = value_of(hello, "isles", OneLine)
        if theirs != __version__:
            who = f"node {hello['node']}" if isinstance(hello.get("node"), int) else "it"
            raise Unfit(f"{who} runs isles {theirs}, node 0 runs isles {__version__}: install the same version on both")
        node, nodes = integer(hello, "node", 0, _MANY), integer(hello, "nodes", 1, _MANY)
        if nodes != self.nodes:
            raise Unfit(
                f"node {node} was started with --nodes {nodes}, node 0 with --nodes {self.nodes}: give both the same"
            )
        if not 0 < node < self.nodes:
            raise Unfit(f"--node {node}: the nodes beside node 0 are 1 to {self.nodes - 1}")
        if node in self.links:
            raise Unfit(
                f"--node {node} at {link.there} is taken by {self.links[node].there}: give every machine a --node of "
                "its own"
            )
        description = table(hello.get("description"), "description")
        if disagreement := self.agree(description, node):
            raise Unfit(disagreement)
        echo_port, ports = value_of(hello, "echo_port", Port), value_of(hello, "ports", OneLine)
        self.descriptions[node], self._echo_ports[node], self.ports[node] = description, echo_port, ports
        return node


def _dismiss(link: Link, reason: Exception) -> None:
    with contextlib.suppress(LinkLost), contextlib.closing(link):
        link.send({"over": to_plain(reason)})
