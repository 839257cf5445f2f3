"""Who has come to node 0's meeting: looks at everybody who knocks, keeps those that belong, tells the rest why not."""

from __future__ import annotations

import contextlib
import select
import socket
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

from isles.comm.errors import MeetingFailed, to_plain
from isles.launch.link import SILENCE, Line, LineLost
from isles.version import __version__

_GLANCE = 0.2  # seconds between looks at who has gone


class Guests:
    """The other nodes' launchers. Their lines are closed at the end of the context, with its error, unless kept."""

    def __init__(self, nodes: int, agree: Callable[[Mapping[str, Any], int], str], tell: Callable[[str], None]) -> None:
        self.nodes, self.agree, self.tell = nodes, agree, tell
        self.lines: dict[int, Line] = {}
        self.cards: dict[int, Any] = {}
        self.ports: dict[int, str] = {}
        self._doors: dict[int, int] = {}
        self._strangers: dict[Line, float] = {}  # and when they came
        self._kept = False

    def __enter__(self) -> Guests:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for stranger in self._strangers:
            stranger.close()
        if self._kept:
            return
        reason = error if isinstance(error, Exception) else MeetingFailed("node 0 was stopped")
        for line in self.lines.values():
            _dismiss(line, reason)

    def keep(self) -> None:
        """All is well: whoever has the lines closes them."""
        self._kept = True

    @property
    def missing(self) -> list[int]:
        """Nodes that are not there."""
        return [node for node in range(1, self.nodes) if node not in self.lines]

    def missing_in_words(self) -> str:
        """As in "node 1, node 2"."""
        return ", ".join(f"node {node}" for node in self.missing)

    def doors(self) -> dict[int, list[Any]]:
        """By node, [address, port] of its door."""
        return {node: [line.there, self._doors[node]] for node, line in self.lines.items()}

    def receive(self, door: socket.socket) -> None:
        """Look for a moment at who comes through the listening socket `door`, what they say, and who goes."""
        known = [*self.lines.values(), *self._strangers]
        if door in select.select([door, *known], [], [], _GLANCE)[0]:
            with contextlib.suppress(OSError):  # it went away again
                self._strangers[Line(door.accept()[0])] = time.monotonic()
        for stranger, came in list(self._strangers.items()):
            try:
                hello = stranger.next()
                if hello is None and time.monotonic() - came > SILENCE:
                    raise LineLost("it says nothing")
            except LineLost:
                del self._strangers[stranger]
                stranger.close()
                continue
            if hello is not None:
                del self._strangers[stranger]
                self._judge(stranger, hello)
        for node, line in list(self.lines.items()):
            try:
                line.ready()
            except LineLost as error:
                del self.lines[node]
                line.close()
                self.tell(f"node {node} ({line.there}) went away: {error}; waiting for {self.missing_in_words()}")

    def answer(self, node: int, line: Line, key: str, seconds: float) -> Any:
        """What that node says under `key`."""
        try:
            message = line.receive(seconds)
        except LineLost as error:
            raise MeetingFailed(f"node {node} ({line.there}) went away: {error}") from None
        if not isinstance(message, dict) or not isinstance(message.get(key), dict):
            raise MeetingFailed(f"node {node} ({line.there}) does not answer as isles {__version__} does")
        return message[key]

    def _judge(self, line: Line, hello: Any) -> None:
        if not isinstance(hello, dict) or not isinstance(hello.get("isles"), str):
            what = "isles doctor" if isinstance(hello, dict) and "doctor" in hello else "another program"
            return _dismiss(line, ValueError(f"a run of isles listens here, not {what}"))
        if refusal := self._refusal(hello, line):
            self.tell(f"refused {line.there}: {refusal}")
            return _dismiss(line, ValueError(refusal))
        node = hello["node"]
        self.lines[node], self.cards[node] = line, hello["card"]
        self.ports[node], self._doors[node] = str(hello.get("ports", "")), int(hello["door"])
        with contextlib.suppress(LineLost):  # seen at the next look
            line.send({"welcome": len(self.missing)})
        line.keep_alive()
        waiting = f"; waiting for {self.missing_in_words()}" if self.missing else ""
        return self.tell(f"node {node} ({line.there}) is here{waiting}")

    def _refusal(self, hello: dict[str, Any], line: Line) -> str:
        theirs = hello["isles"]
        if theirs != __version__:
            return (
                f"node {hello.get('node')} runs isles {theirs}, node 0 runs isles {__version__}: install the same "
                "version on both"
            )
        node, nodes = hello.get("node"), hello.get("nodes")
        if nodes != self.nodes:
            return f"node {node} was started with --nodes {nodes}, node 0 with --nodes {self.nodes}: give both the same"
        if not isinstance(node, int) or not 0 < node < self.nodes or not isinstance(hello.get("door"), int):
            return f"--node {node}: the nodes beside node 0 are 1 to {self.nodes - 1}"
        if node in self.lines:
            return (
                f"--node {node} at {line.there} is taken by {self.lines[node].there}: give every machine a --node of "
                "its own"
            )
        card = hello.get("card")
        return self.agree(card, node) if isinstance(card, dict) else "its greeting is no card"


def _dismiss(line: Line, reason: Exception) -> None:
    with contextlib.suppress(LineLost), contextlib.closing(line):
        line.send({"over": to_plain(reason)})
