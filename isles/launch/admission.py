"""Who is let into a run at node 0's rendezvous: all that connect are looked at, and told why where they are refused."""

from __future__ import annotations

import contextlib
import select
import socket
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

from isles.comm.errors import RendezvousFailed, to_plain
from isles.launch.link import SILENCE, Link, LinkLost
from isles.version import __version__

_GLANCE = 0.2  # seconds between looks at who has gone


class Admission:
    """The other nodes' launchers. Their links are closed at the end of the context, with its error, unless kept."""

    def __init__(self, nodes: int, agree: Callable[[Mapping[str, Any], int], str], tell: Callable[[str], None]) -> None:
        self.nodes, self.agree, self.tell = nodes, agree, tell
        self.links: dict[int, Link] = {}
        self.descriptions: dict[int, Any] = {}
        self.ports: dict[int, str] = {}
        self._echo_ports: dict[int, int] = {}
        self._strangers: dict[Link, float] = {}  # and when they came
        self._kept = False

    def __enter__(self) -> Admission:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for stranger in self._strangers:
            stranger.close()
        if self._kept:
            return
        reason = error if isinstance(error, Exception) else RendezvousFailed("node 0 was stopped")
        for link in self.links.values():
            _dismiss(link, reason)

    def keep(self) -> None:
        """All is well: whoever has the links closes them."""
        self._kept = True

    @property
    def missing(self) -> list[int]:
        """Nodes that are not there."""
        return [node for node in range(1, self.nodes) if node not in self.links]

    def missing_in_words(self) -> str:
        """As in "node 1, node 2"."""
        return ", ".join(f"node {node}" for node in self.missing)

    def echo_addresses(self) -> dict[int, list[Any]]:
        """By node, [address, port] of its echo server."""
        return {node: [link.there, self._echo_ports[node]] for node, link in self.links.items()}

    def admit(self, listener: socket.socket) -> None:
        """Look for a moment at who connects to `listener`, what they say, and who goes."""
        known = [*self.links.values(), *self._strangers]
        if listener in select.select([listener, *known], [], [], _GLANCE)[0]:
            with contextlib.suppress(OSError):  # it went away again
                self._strangers[Link(listener.accept()[0])] = time.monotonic()
        for stranger, came in list(self._strangers.items()):
            try:
                hello = stranger.next()
                if hello is None and time.monotonic() - came > SILENCE:
                    raise LinkLost("it says nothing")
            except LinkLost:
                del self._strangers[stranger]
                stranger.close()
                continue
            if hello is not None:
                del self._strangers[stranger]
                self._judge(stranger, hello)
        for node, link in list(self.links.items()):
            try:
                link.ready()
            except LinkLost as error:
                del self.links[node]
                link.close()
                self.tell(f"node {node} ({link.there}) went away: {error}; waiting for {self.missing_in_words()}")

    def answer(self, node: int, link: Link, key: str, seconds: float) -> Any:
        """What that node says under `key`."""
        try:
            message = link.receive(seconds)
        except LinkLost as error:
            raise RendezvousFailed(f"node {node} ({link.there}) went away: {error}") from None
        if not isinstance(message, dict) or not isinstance(message.get(key), dict):
            raise RendezvousFailed(f"node {node} ({link.there}) does not answer as isles {__version__} does")
        return message[key]

    def _judge(self, link: Link, hello: Any) -> None:
        if not isinstance(hello, dict) or not isinstance(hello.get("isles"), str):
            what = "isles doctor" if isinstance(hello, dict) and "doctor" in hello else "another program"
            return _dismiss(link, ValueError(f"a run of isles listens here, not {what}"))
        if refusal := self._refusal(hello, link):
            self.tell(f"refused {link.there}: {refusal}")
            return _dismiss(link, ValueError(refusal))
        node = hello["node"]
        self.links[node], self.descriptions[node] = link, hello["description"]
        self.ports[node], self._echo_ports[node] = str(hello.get("ports", "")), int(hello["echo_port"])
        with contextlib.suppress(LinkLost):  # seen at the next look
            link.send({"welcome": len(self.missing)})
        link.keep_alive()
        waiting = f"; waiting for {self.missing_in_words()}" if self.missing else ""
        return self.tell(f"node {node} ({link.there}) is here{waiting}")

    def _refusal(self, hello: dict[str, Any], link: Link) -> str:
        theirs = hello["isles"]
        if theirs != __version__:
            return (
                f"node {hello.get('node')} runs isles {theirs}, node 0 runs isles {__version__}: install the same "
                "version on both"
            )
        node, nodes = hello.get("node"), hello.get("nodes")
        if nodes != self.nodes:
            return f"node {node} was started with --nodes {nodes}, node 0 with --nodes {self.nodes}: give both the same"
        if not isinstance(node, int) or not 0 < node < self.nodes or not isinstance(hello.get("echo_port"), int):
            return f"--node {node}: the nodes beside node 0 are 1 to {self.nodes - 1}"
        if node in self.links:
            return (
                f"--node {node} at {link.there} is taken by {self.links[node].there}: give every machine a --node of "
                "its own"
            )
        description = hello.get("description")
        return self.agree(description, node) if isinstance(description, dict) else "it does not describe its run"


def _dismiss(link: Link, reason: Exception) -> None:
    with contextlib.suppress(LinkLost), contextlib.closing(link):
        link.send({"over": to_plain(reason)})
