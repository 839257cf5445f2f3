"""How the launchers of several machines find each other: node 0 listens at the rendezvous, and the others connect.

    node k                                             node 0
    both prove that they know the run's token: see `proof`
    {"isles": version, "node", "nodes",      ------>   is this one of us?
     "echo_port": port, "ports": range,
     "description"}                          <------   {"welcome": number still missing} | {"over": error}
                                             <------   {"addresses": {node: [address, port]}}  when all are there
    asks every other node for an echo        ------>   {"reached": {node: reason}}             see `listener`
                                             <------   {"go": facts} | {"over": error}

`description` is whatever must be the same, or known, at all nodes; `agree` says what is wrong with another node's. A
refused machine gets the reason in one line, and node 0 goes on waiting for the right one. A machine that does not know
the token gets no answer (`Admission`).
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any

from isles.base.errors import printable
from isles.base.parsing import Int, OneLine, Port, Unfit, integer, table, value_of
from isles.base.version import __version__
from isles.comm.credentials import Credentials, Token
from isles.comm.errors import RendezvousFailed, from_plain, to_plain
from isles.comm.sockets import loop
from isles.comm.sockets.connection import SILENCE, STRANGERS, LinkLost, heard
from isles.comm.sockets.listener import PATIENCE, EchoServer, Listener, Throttle, echo_failure, port_range
from isles.comm.tcp import listen, own_address, parse_address
from isles.launch.nodes import Link, NodeGroup, NodeSpec, connect

_GLANCE = 0.2  # seconds between checks for lost nodes
_MANY = 1 << 20  # the most nodes


class Admission:
    """Admits the other nodes' launchers. Their links are closed at the end of the context, with its error, unless they
    were released.

    listening: the socket to accept from; closed at the end. mine: the run's credentials. agree, tell: as in `host`.
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
        self.echo_ports: dict[int, int] = {}
        self._arrived: queue.SimpleQueue[tuple[Link, Any]] = queue.SimpleQueue()
        self._turned_away: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._throttle = Throttle(lambda text: self._turned_away.put(text))
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
        reason = error if isinstance(error, Exception) else RendezvousFailed("node 0 was stopped")
        for link in self.links.values():
            _dismiss(link, reason)

    @property
    def missing(self) -> list[int]:
        """Nodes that have not connected."""
        return [node for node in range(1, self.nodes) if node not in self.links]

    def format_missing(self) -> str:
        """`missing` as text: "node 1, node 2"."""
        return ", ".join(f"node {node}" for node in self.missing)

    def admit(self) -> None:
        """Handle for a moment new connections, hellos, and lost links."""
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
        """The results of a node's echo requests, within `seconds`: by node, "" or why no echo arrived."""
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
        with contextlib.suppress(LinkLost):  # the next `admit` will notice
            link.send({"welcome": len(self.missing)})
        waiting = f"; waiting for {self.format_missing()}" if self.missing else ""
        return self.tell(f"node {node} ({link.there}) is here{waiting}")

    def _admitted(self, hello: Any, link: Link) -> int:
        """The number of the node of this hello; stores its description. Unfit, with the reason, if it is refused."""
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
        self.descriptions[node], self.echo_ports[node], self.ports[node] = description, echo_port, ports
        return node


def _dismiss(link: Link, reason: Exception) -> None:
    with contextlib.suppress(LinkLost), contextlib.closing(link):
        link.send({"over": to_plain(reason)})


_AGAIN = 1.0  # seconds between attempts to reach node 0
_NO_ISLES = f"what answers there is no run of isles {__version__}"
_Address = tuple[OneLine, Port]
_START = 120.0  # seconds for node 0 to start after all have met


def host(
    node_spec: NodeSpec,
    mine: Credentials,
    agree: Callable[[Mapping[str, Any], int], str],
    seconds: float,
    tell: Callable[[str], None],
) -> NodeGroup:
    """Node 0: admit the others within `seconds`, and make sure that all can reach each other.

    agree(description, node): "", or why that node cannot take part. tell: called with lines on what is awaited and who
    was turned away.

    ValueError: this machine cannot take part with these settings. RendezvousFailed: a node did not connect in time or
    cannot be reached.
    """
    name, number = parse_address(node_spec.rendezvous, "--rendezvous")
    own = own_address(name, f"--rendezvous {node_spec.rendezvous}")
    with Admission(node_spec.nodes, listen(number, own), mine, agree, tell) as admission, EchoServer(own) as echo:
        tell(f"waiting at {node_spec.rendezvous} for {admission.format_missing()}")
        ends_at = time.monotonic() + seconds
        while admission.missing:
            if time.monotonic() > ends_at:
                raise RendezvousFailed(
                    f"{admission.format_missing()} did not come to {node_spec.rendezvous} within {seconds:g} s: "
                    "start the same command there, or raise world.join_deadline"
                )
            admission.admit()
        here = {link.here for link in admission.links.values()}
        if len(here) > 1:
            raise RendezvousFailed(
                f"the other nodes reach this machine at different addresses ({', '.join(sorted(here))}): give all of "
                "them the same --rendezvous"
            )
        (address,) = here
        addresses: dict[int, tuple[str, int]] = {0: (address, echo.port)}
        addresses |= {node: (link.there, admission.echo_ports[node]) for node, link in admission.links.items()}
        node_group = NodeGroup(
            spec=node_spec, here=address, host=address, links=admission.links, descriptions=admission.descriptions
        )
        node_group.tell({"addresses": addresses})
        reached = {0: _echo_failures(0, addresses)}
        for node in admission.links:
            reached[node] = admission.reached(node, 4 * PATIENCE)
        ports = {0: port_range(), **admission.ports}
        blocked = [
            f"{_name(source, addresses)} cannot reach {_name(target, addresses)} (port "
            f"{addresses[target][1]}: {why}): let TCP ports {ports[target]} in on node {target}"
            for source, answers in reached.items()
            for target, why in answers.items()
            if why
        ]
        if blocked:
            raise RendezvousFailed(f"{'; '.join(blocked)}; to see more: isles doctor, docs/two-machines.md")
        admission.links = {}  # released: the group closes them
        return node_group


def come(
    node_spec: NodeSpec, token: Token, description: Mapping[str, Any], seconds: float, tell: Callable[[str], None]
) -> NodeGroup:
    """Another node: connect to node 0 within `seconds`. description: JSON-able. For `tell` and errors see `host`;
    TokenRefused if node 0 is not the machine of the token.
    """
    where = f"node 0 ({node_spec.rendezvous})"
    link, echo, missing = _reach_host(node_spec, token, description, seconds, tell)
    with contextlib.ExitStack() as on_failure, echo:
        on_failure.callback(link.close)
        if missing:
            tell(f"met {where}; it waits for {missing} more")
        try:
            answer = _said(link, "addresses", dict[str, _Address], seconds, where)
            addresses = {node: answer[str(node)] for node in range(node_spec.nodes)}
            link.send({"reached": _echo_failures(node_spec.node, addresses)})
            facts = _said(link, "go", dict[str, Any], _START, where)
        except LinkLost as error:
            raise RendezvousFailed(f"{where}: {error}") from None
        except KeyError:
            raise RendezvousFailed(f"{where}: {_NO_ISLES}") from None
        on_failure.pop_all()
    return NodeGroup(spec=node_spec, here=link.here, host=link.there, links={0: link}, facts=facts)


def _reach_host(
    node_spec: NodeSpec, token: Token, description: Mapping[str, Any], seconds: float, tell: Callable[[str], None]
) -> tuple[Link, EchoServer, int]:
    """The link to node 0, this machine's echo server, and the number of nodes that node 0 still waits for."""
    _, number = parse_address(node_spec.rendezvous, "--rendezvous")
    ends_at, notified = time.monotonic() + seconds, False
    while True:
        try:
            return _introduce(node_spec, token, description, min(SILENCE, seconds))
        except LinkLost as error:
            if str(error) == "no such host name":
                raise ValueError(
                    f"--rendezvous {node_spec.rendezvous}: no such host name; give node 0's address"
                ) from None
            if time.monotonic() > ends_at:
                raise RendezvousFailed(
                    f"nobody answers at {node_spec.rendezvous} since {seconds:g} s ({error}): start node 0 there, or "
                    f"correct --rendezvous, or let TCP port {number} in there"
                ) from None
            if not notified:
                tell(f"nobody answers at {node_spec.rendezvous} yet ({error}); trying for {seconds:g} s")
                notified = True
            time.sleep(min(_AGAIN, seconds))


def _introduce(
    node_spec: NodeSpec, token: Token, description: Mapping[str, Any], seconds: float
) -> tuple[Link, EchoServer, int]:
    """One attempt. LinkLost if it may be repeated."""
    name, number = parse_address(node_spec.rendezvous, "--rendezvous")
    link = connect(name, number, token, min(PATIENCE, seconds))
    with contextlib.ExitStack() as on_failure:
        on_failure.callback(link.close)
        echo = on_failure.enter_context(EchoServer(link.here))
        link.send(
            {"isles": __version__, "node": node_spec.node, "nodes": node_spec.nodes, "echo_port": echo.port,
             "ports": port_range(), "description": description}
        )  # fmt: skip
        missing = _said(link, "welcome", Int, seconds, "node 0")
        on_failure.pop_all()
    return link, echo, missing


def _said(link: Link, key: str, kind: Any, seconds: float, where: str) -> Any:
    """The value of type `kind` that node 0 sends under `key`. Raises the error that it sends instead."""
    try:
        said = table(link.receive(seconds), key)
        if "over" in said:
            raise from_plain(said["over"])
        return value_of(said, key, kind)
    except Unfit:
        raise RendezvousFailed(f"{where}: {_NO_ISLES}") from None


def _echo_failures(node: int, addresses: Mapping[int, tuple[str, int]]) -> dict[int, str]:
    """By node, why its echo server does not answer; "" if it does."""
    others = [other for other in addresses if other != node]

    async def ask() -> list[str]:
        return await asyncio.gather(*(echo_failure(*addresses[other]) for other in others))

    return dict(zip(others, loop.run(ask()), strict=True))


def _name(node: int, addresses: Mapping[int, tuple[str, int]]) -> str:
    return f"node {node} ({addresses[node][0]})"
