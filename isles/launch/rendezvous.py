"""How the launchers of several machines find each other: node 0 listens at the rendezvous, the others come there.

    node k                                             node 0
    {"isles": version, "node", "nodes",      ------>   is this one of us?
     "door": port, "ports": range, "card"}   <------   {"welcome": number still missing} | {"over": error}
                                             <------   {"doors": {node: [address, port]}}      when all are there
    knocks at every door of another node     ------>   {"reached": {node: reason}}             see `reach`
                                             <------   {"go": facts} | {"over": error}

`card` is whatever must be the same, or known, everywhere; `agree` says what is wrong with another's. A machine that is
refused is told why in one line, and node 0 goes on waiting for the right one.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from isles.comm.errors import MeetingFailed, from_plain
from isles.launch.admission import Guests
from isles.launch.link import SILENCE, Line, LineLost, connect, listen, parse_address
from isles.launch.nodes import Party, Place
from isles.launch.reachable import PATIENCE, Door, knock, port_range
from isles.version import __version__

_AGAIN = 1.0  # seconds between attempts to reach node 0
_START = 120.0  # seconds in which node 0 starts after all have met


def meet(
    place: Place,
    card: Mapping[str, Any],
    agree: Callable[[Mapping[str, Any], int], str],
    seconds: float,
    tell: Callable[[str], None],
) -> Party:
    """Come together within `seconds`, and make sure that all can reach each other.

    card: JSON-able. agree(card, node): empty, or why that node cannot take part; asked on node 0. tell: is told what is
    being waited for.

    ValueError: this machine cannot take part with these settings. MeetingFailed: somebody did not come or cannot be
    reached.
    """
    host, port = parse_address(place.rendezvous, "--rendezvous")
    if place.node == 0:
        return _host(place, host, port, agree, seconds, tell)
    return _come(place, host, port, card, seconds, tell)


def _host(
    place: Place,
    host: str,
    port: int,
    agree: Callable[[Mapping[str, Any], int], str],
    seconds: float,
    tell: Callable[[str], None],
) -> Party:
    own = _own_address(host, place.rendezvous)
    with listen(port, own) as door, Door(own) as entry, Guests(place.nodes, agree, tell) as guests:
        tell(f"waiting at {place.rendezvous} for {guests.missing_in_words()}")
        ends_at = time.monotonic() + seconds
        while guests.missing:
            if time.monotonic() > ends_at:
                raise MeetingFailed(
                    f"{guests.missing_in_words()} did not come to {place.rendezvous} within {seconds:g} s: start the "
                    "same command there, or raise world.meeting_deadline"
                )
            guests.receive(door)
        here = {line.here for line in guests.lines.values()}
        if len(here) > 1:
            raise MeetingFailed(
                f"the other nodes reach this machine at different addresses ({', '.join(sorted(here))}): give all of "
                "them the same --rendezvous"
            )
        (address,) = here
        doors = {0: [address, entry.port], **guests.doors()}
        party = Party(place=place, here=address, host=address, lines=guests.lines, cards=guests.cards)
        party.tell({"doors": doors})
        reached = {0: _knocks(0, doors)}
        for node, line in guests.lines.items():
            reached[node] = guests.answer(node, line, "reached", 4 * PATIENCE)
        ports = {0: port_range(), **guests.ports}
        blocked = [
            f"{_name(source, doors)} cannot reach {_name(int(target), doors)} (port {doors[int(target)][1]}: {why}): "
            f"let TCP ports {ports[int(target)]} in on node {target}"
            for source, answers in reached.items()
            for target, why in answers.items()
            if why
        ]
        if blocked:
            raise MeetingFailed(f"{'; '.join(blocked)}; to see more: isles doctor, docs/two-machines.md")
        guests.keep()
        return party


def _come(
    place: Place, host: str, port: int, card: Mapping[str, Any], seconds: float, tell: Callable[[str], None]
) -> Party:
    line = _reach_host(place, host, port, seconds, tell)
    with contextlib.ExitStack() as unless_kept, Door(line.here) as entry:
        unless_kept.callback(line.close)
        line.send(
            {"isles": __version__, "node": place.node, "nodes": place.nodes, "door": entry.port,
             "ports": port_range(), "card": card}
        )  # fmt: skip
        where = f"node 0 ({place.rendezvous})"
        missing = _answer(line, "welcome", SILENCE, where)
        line.keep_alive()
        if missing:
            tell(f"met {where}; it waits for {missing} more")
        doors = {int(node): door for node, door in _answer(line, "doors", seconds, where).items()}
        line.send({"reached": _knocks(place.node, doors)})
        facts = _answer(line, "go", _START, where)
        unless_kept.pop_all()
    return Party(place=place, here=line.here, host=line.there, lines={0: line}, facts=facts)


def _reach_host(place: Place, host: str, port: int, seconds: float, tell: Callable[[str], None]) -> Line:
    ends_at, told = time.monotonic() + seconds, False
    while True:
        try:
            return connect(host, port, min(PATIENCE, seconds))
        except LineLost as error:
            if str(error) == "no such host name":
                raise ValueError(f"--rendezvous {place.rendezvous}: no such host name; give node 0's address") from None
            if time.monotonic() > ends_at:
                raise MeetingFailed(
                    f"nobody answers at {place.rendezvous} since {seconds:g} s ({error}): start node 0 there, or mend "
                    f"--rendezvous, or let TCP port {port} in there"
                ) from None
            if not told:
                tell(f"nobody answers at {place.rendezvous} yet ({error}); trying for {seconds:g} s")
                told = True
            time.sleep(min(_AGAIN, seconds))


def _answer(line: Line, key: str, seconds: float, where: str) -> Any:
    """What node 0 says under `key`. The error that it sends instead is raised."""
    try:
        message = line.receive(seconds)
    except LineLost as error:
        raise MeetingFailed(f"{where}: {error}") from None
    if isinstance(message, dict) and "over" in message:
        raise from_plain(message["over"])
    if not isinstance(message, dict) or key not in message:
        raise MeetingFailed(f"{where}: what answers there is no run of isles {__version__}")
    return message[key]


def _knocks(node: int, doors: Mapping[int, list[Any]]) -> dict[int, str]:
    """By node, why its door does not answer; empty where it does."""
    others = [other for other in doors if other != node]
    with ThreadPoolExecutor(len(others)) as pool:
        return dict(zip(others, pool.map(lambda other: knock(*doors[other]), others), strict=True))


def _name(node: int, doors: Mapping[int, list[Any]]) -> str:
    return f"node {node} ({doors[node][0]})"


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
