"""Direct links of one worker: to those who listen, without the lighthouse in between.

A worker that listens is the small router of a session of its own; whoever wants to reach it opens another one to that.
So who is linked directly is known, is told in a line, and outlives the lighthouse; everybody else is reached over the
lighthouse. Of two who listen the one with the higher seat dials.

Who is there, and where, the lighthouse says, and gives the introduction that a message to a seat must bear. What it
has said is kept, so that two who have met go on without it.
"""

from __future__ import annotations

import base64
import ipaddress
import ssl
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from isles.comm import credentials
from isles.comm.elastic.guards.refusals import Refusals
from isles.comm.elastic.keys import LIT, introduction
from isles.comm.elastic.messages import Entry, Find, Found, Listening, Reached
from isles.comm.elastic.session import Session, address, open_session

_LOOK = 30.0  # seconds until whoever is not linked directly is looked for again
_TRIED = 20.0  # seconds for the lighthouse's answer, which tries the address meanwhile
_DIAL = 3.0  # seconds that a worker is dialled for
_MOST = 64  # direct links that are dialled; all others go over the lighthouse


class LinkedTransport(Protocol):
    """What sends over direct links: `ElasticTransport`."""

    def link(self, session: Session, peer: int | None) -> None:
        """Reach `peer`, or whoever is there, over `session` too."""
        ...


class DirectListener:
    """A session of this worker's own that others connect to, at host:port; port 0: any. refused: see `Session`."""

    def __init__(self, secret: str, folder: Path, host: str, port: int, *, lease: float, refused: Refusals) -> None:
        """ValueError where the address cannot be had."""
        mine = credentials.own(secret, folder)
        self.certificate = ssl.PEM_cert_to_DER_cert(mine.certificate.read_text(encoding="ascii"))
        self.session = open_session("router", mine, listen=address(host, port), lease=lease, refused=refused)
        self.port = self.session.port

    def close(self) -> None:
        """Stop listening."""
        self.session.close()


class DirectLinks:
    """The direct links of the worker in the seat of `entry`; the `Guide` of its transport.

    ask: asks the lighthouse, as `Company.ask`. secret: the run's. folder: for the certificates of others. lease:
    seconds of silence after which a link counts as broken. notice: called with a line for a person. place: this
    worker's in its island; it is linked to the workers at the same place of other islands.
    """

    def __init__(
        self,
        session: Session,
        entry: Entry,
        ask: Callable[..., Any],
        secret: str,
        folder: Path,
        *,
        lease: float,
        notice: Callable[[str], None],
        place: int = 0,
    ) -> None:
        self._session, self._entry, self._ask, self._place = session, entry, ask, place
        self._secret, self._folder, self._lease, self._notice = secret, folder, lease, notice
        self._transport: LinkedTransport | None = None
        self._listener: DirectListener | None = None
        self._listens = False
        self._found: dict[int, Found] = {}
        self._dialled: dict[int, Session] = {}
        self._there: set[int] = set()
        self._direct: dict[int, bool] = {}  # what was said of each
        self._changed = threading.Condition()
        self._todo: list[int] = []
        self._lit: list[bool] = []  # how the lighthouse came and went, since it was last told where this worker listens
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="isles-links", daemon=True)

    def listen(self, host: str, port: int, *, announced: str = "") -> None:
        """Be reached at port `port` of this machine's address `host`; announced: the address for others, "" where the
        lighthouse sees this machine. Says whether the lighthouse reaches it. ValueError where the address cannot be
        had.
        """
        self._listener = DirectListener(
            self._secret, self._folder / "own", host, port, lease=self._lease, refused=self._session.refused
        )
        self._announced = announced
        self._announce()

    def _announce(self) -> None:
        listener = self._listener
        assert listener is not None
        certificate = base64.b64encode(listener.certificate).decode("ascii")
        said = Listening(self._announced, listener.port, self._session.name(), certificate, self._place)
        answer = self._ask(said, _TRIED)
        reached = isinstance(answer, Reached) and not answer.refusal
        if isinstance(answer, Reached) and reached != self._listens:
            self._notice(f"others reach this worker directly, at {address(answer.host, answer.port)}")
        elif not reached and not self._listens:
            where = f" of {answer.host} ({answer.refusal})" if isinstance(answer, Reached) else ""
            self._notice(
                f"warning: relayed: the lighthouse does not reach port {listener.port}{where}; open or forward it, or "
                "leave --listen out"
            )
        self._listens = self._listens or reached

    def start(self, transport: LinkedTransport) -> None:
        """Add direct links to `transport` from now on."""
        self._transport = transport
        if self._listener is not None:
            transport.link(self._listener.session, None)
            self._session.watch(LIT, self._light)
        self._thread.start()

    # What the transport asks (`Guide`)

    def introduction(self, peer: int) -> bytes | None:
        """By which a message to `peer` is sealed; None while the lighthouse does not say. Waits for its answer."""
        found = self._found.get(peer) or self._find(peer)
        return None if found is None else bytes.fromhex(found.introduction)

    def expected(self, sender: int) -> bytes:
        """By which a message of `sender` must be sealed."""
        return introduction(self._entry.key, sender)

    def met(self, seat: int, *, there: bool, direct: bool) -> None:
        """Whether `seat` is there, and whether it is linked directly."""
        with self._changed:
            if there:
                self._there.add(seat)
                if not direct:
                    self._todo.append(seat)
                    self._changed.notify_all()
            else:
                self._there.discard(seat)
        if there and direct:
            self._say(seat, True)

    def close(self) -> None:
        """End the links. Safe to call twice."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(_DIAL + _TRIED)
        for session in self._dialled.values():
            session.close()
        if self._listener is not None:
            self._listener.close()

    # In the thread

    def _work(self) -> None:
        while True:
            with self._changed:
                called = self._changed.wait_for(lambda: self._todo or self._lit[2:] or self._closed, _LOOK)
                if self._closed:
                    return
                forgotten = bool(self._lit[2:])  # there, gone, there
                del self._lit[1 if forgotten else 3 :]
                todo, self._todo = (self._todo, []) if called else (sorted(self._there - self._direct_ones()), [])
            if forgotten:
                self._announce()
            for seat in todo:
                self._look(seat, again=not called)

    def _light(self, _: str, there: bool) -> None:
        """The lighthouse went out, or is lit again and has forgotten where this worker listens."""
        with self._changed:
            self._lit.append(there)
            self._changed.notify_all()

    def _direct_ones(self) -> set[int]:
        return {seat for seat, direct in self._direct.items() if direct}

    def _look(self, seat: int, *, again: bool) -> None:
        """Dial `seat`, where it is this worker's to dial."""
        found = self._find(seat) if again or seat not in self._found else self._found[seat]
        if found is None or seat in self._dialled:
            return
        theirs = bool(found.host) and (not self._listens or self._entry.seat > seat)
        if theirs and len(self._dialled) < _MOST and self._is_near(found.host):
            if self._dial(seat, found):
                return
        elif self._listens and not theirs and not again:
            return  # it will dial this worker
        self._say(seat, False)

    def _dial(self, seat: int, found: Found) -> bool:
        with suppress(ValueError, OSError):
            der = base64.b64decode(found.certificate, validate=True)
            theirs = credentials.trusting(der, self._secret, self._folder / f"seat-{seat}")
            where = address(found.host, found.port)
            session = open_session(
                "client",
                theirs,
                connect=where,
                lease=self._lease,
                patience=_DIAL,
                refused=self._session.refused,
            )
            self._dialled[seat] = session
            assert self._transport is not None
            self._transport.link(session, seat)
            return True
        return False

    def _is_near(self, host: str) -> bool:
        """Whether `host` is the same machine here as for the lighthouse: a loopback address is everybody's own."""
        with suppress(ValueError):
            return not ipaddress.ip_address(host).is_loopback or self._session.is_local()
        return True

    def _find(self, seat: int) -> Found | None:
        answer = self._ask(Find(seat, self._place))
        if isinstance(answer, Found) and answer.seat == seat:
            self._found[seat] = answer
        return self._found.get(seat)

    def _say(self, seat: int, direct: bool) -> None:
        if self._direct.get(seat) != direct:
            self._direct[seat] = direct
            self._notice(f"worker {seat}: {'direct' if direct else 'relayed'}")
