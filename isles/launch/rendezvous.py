"""How the launchers of several machines find each other: node 0 listens at the rendezvous, the others come there.

    node k                                             node 0
    {"isles": version, "node", "nodes",      ------>   is this one of us?
     "echo_port": port, "ports": range,
     "description"}                          <------   {"welcome": number still missing} | {"over": error}
                                             <------   {"addresses": {node: [address, port]}}  when all are there
    asks every other node for an echo        ------>   {"reached": {node: reason}}             see `reachable`
                                             <------   {"go": facts} | {"over": error}

`description` is whatever must be the same, or known, everywhere; `agree` says what is wrong with another's. A machine
that is refused is told why in one line, and node 0 goes on waiting for the right one.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from isles.comm.errors import RendezvousFailed, from_plain
from isles.launch.admission import Admission
from isles.launch.link import SILENCE, Link, LinkLost, connect, listen, parse_address
from isles.launch.nodes import NodeGroup, NodeSpec
from isles.launch.reachable import PATIENCE, EchoServer, echo_failure, port_range
from isles.version import __version__

_AGAIN = 1.0  # seconds between attempts to reach node 0
_START = 120.0  # seconds in which node 0 starts after all have met


def meet(
    node_spec: NodeSpec,
    description: Mapping[str, Any],
    agree: Callable[[Mapping[str, Any], int], str],
    seconds: float,
    tell: Callable[[str], None],
) -> NodeGroup:
    """Come together within `seconds`, and make sure that all can reach each other.

    description: JSON-able. agree(description, node): empty, or why that node cannot take part; asked on node 0. tell:
    is told what is being waited for.

    ValueError: this machine cannot take part with these settings. RendezvousFailed: somebody did not come or cannot be
    reached.
    """
    host, port = parse_address(node_spec.rendezvous, "--rendezvous")
    if node_spec.node == 0:
        return _host(node_spec, host, port, agree, seconds, tell)
    return _come(node_spec, host, port, description, seconds, tell)


def _host(
    node_spec: NodeSpec,
    host: str,
    port: int,
    agree: Callable[[Mapping[str, Any], int], str],
    seconds: float,
    tell: Callable[[str], None],
) -> NodeGroup:
    own = _own_address(host, node_spec.rendezvous)
    with listen(port, own) as listener, EchoServer(own) as echo, Admission(node_spec.nodes, agree, tell) as admission:
        tell(f"waiting at {node_spec.rendezvous} for {admission.missing_in_words()}")
        ends_at = time.monotonic() + seconds
        while admission.missing:
            if time.monotonic() > ends_at:
                raise RendezvousFailed(
                    f"{admission.missing_in_words()} did not come to {node_spec.rendezvous} within {seconds:g} s: "
                    "start the same command there, or raise world.join_deadline"
                )
            admission.admit(listener)
        here = {link.here for link in admission.links.values()}
        if len(here) > 1:
            raise RendezvousFailed(
                f"the other nodes reach this machine at different addresses ({', '.join(sorted(here))}): give all of "
                "them the same --rendezvous"
            )
        (address,) = here
        addresses = {0: [address, echo.port], **admission.echo_addresses()}
        node_group = NodeGroup(
            spec=node_spec, here=address, host=address, links=admission.links, descriptions=admission.descriptions
        )
        node_group.tell({"addresses": addresses})
        reached = {0: _echo_failures(0, addresses)}
        for node, link in admission.links.items():
            reached[node] = admission.answer(node, link, "reached", 4 * PATIENCE)
        ports = {0: port_range(), **admission.ports}
        blocked = [
            f"{_name(source, addresses)} cannot reach {_name(int(target), addresses)} (port "
            f"{addresses[int(target)][1]}: {why}): let TCP ports {ports[int(target)]} in on node {target}"
            for source, answers in reached.items()
            for target, why in answers.items()
            if why
        ]
        if blocked:
            raise RendezvousFailed(f"{'; '.join(blocked)}; to see more: isles doctor, docs/two-machines.md")
        admission.keep()
        return node_group


def _come(
    node_spec: NodeSpec,
    host: str,
    port: int,
    description: Mapping[str, Any],
    seconds: float,
    tell: Callable[[str], None],
) -> NodeGroup:
    link = _reach_host(node_spec, host, port, seconds, tell)
    with contextlib.ExitStack() as unless_kept, EchoServer(link.here) as echo:
        unless_kept.callback(link.close)
        link.send(
            {"isles": __version__, "node": node_spec.node, "nodes": node_spec.nodes, "echo_port": echo.port,
             "ports": port_range(), "description": description}
        )  # fmt: skip
        where = f"node 0 ({node_spec.rendezvous})"
        missing = _answer(link, "welcome", SILENCE, where)
        link.keep_alive()
        if missing:
            tell(f"met {where}; it waits for {missing} more")
        addresses = {int(node): address for node, address in _answer(link, "addresses", seconds, where).items()}
        link.send({"reached": _echo_failures(node_spec.node, addresses)})
        facts = _answer(link, "go", _START, where)
        unless_kept.pop_all()
    return NodeGroup(spec=node_spec, here=link.here, host=link.there, links={0: link}, facts=facts)


def _reach_host(node_spec: NodeSpec, host: str, port: int, seconds: float, tell: Callable[[str], None]) -> Link:
    ends_at, told = time.monotonic() + seconds, False
    while True:
        try:
            return connect(host, port, min(PATIENCE, seconds))
        except LinkLost as error:
            if str(error) == "no such host name":
                raise ValueError(
                    f"--rendezvous {node_spec.rendezvous}: no such host name; give node 0's address"
                ) from None
            if time.monotonic() > ends_at:
                raise RendezvousFailed(
                    f"nobody answers at {node_spec.rendezvous} since {seconds:g} s ({error}): start node 0 there, or "
                    f"mend --rendezvous, or let TCP port {port} in there"
                ) from None
            if not told:
                tell(f"nobody answers at {node_spec.rendezvous} yet ({error}); trying for {seconds:g} s")
                told = True
            time.sleep(min(_AGAIN, seconds))


def _answer(link: Link, key: str, seconds: float, where: str) -> Any:
    """What node 0 says under `key`. The error that it sends instead is raised."""
    try:
        message = link.receive(seconds)
    except LinkLost as error:
        raise RendezvousFailed(f"{where}: {error}") from None
    if isinstance(message, dict) and "over" in message:
        raise from_plain(message["over"])
    if not isinstance(message, dict) or key not in message:
        raise RendezvousFailed(f"{where}: what answers there is no run of isles {__version__}")
    return message[key]


def _echo_failures(node: int, addresses: Mapping[int, list[Any]]) -> dict[int, str]:
    """By node, why its echo server does not answer; empty where it does."""
    others = [other for other in addresses if other != node]
    with ThreadPoolExecutor(len(others)) as pool:
        return dict(zip(others, pool.map(lambda other: echo_failure(*addresses[other]), others), strict=True))


def _name(node: int, addresses: Mapping[int, list[Any]]) -> str:
    return f"node {node} ({addresses[node][0]})"


def _own_address(host: str, rendezvous: str) -> str:
    """The address behind `host`, if it is one of this machine's. ValueError otherwise: node 0 listens there."""
    try:
        addresses = [info[4][0] for info in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)]
    except OSError:
        raise ValueError(f"--rendezvous {rendezvous}: no such host name; give an address of this machine") from None
    for address in addresses:
        with (
            contextlib.suppress(OSError),
            socket.create_server((address, 0), family=socket.AF_INET6 if ":" in str(address) else socket.AF_INET),
        ):
            return str(address)
    raise ValueError(
        f"--rendezvous {rendezvous}: is no address of this machine, and node 0 listens there; give one that is, or "
        "another --node"
    )
