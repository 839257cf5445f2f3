"""Files that one member of a run hands to another: the state to begin with, what a worker came to, the one model.

    giver       offers a file under a name; a newer one takes its place. Who asks for what is not there yet is answered
                once it is, and `wanted` tells the giver.
    taker       asks for its length, then for its pieces, `WINDOW` at a time; checks length and checksum

The giver goes on training meanwhile: pieces are read from the disk as they are asked for.
"""

from __future__ import annotations

import json
import threading
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from isles.comm.elastic.keys import GIFT
from isles.comm.elastic.session import IncomingQuery, Session
from isles.parsing import parse_json

ON_DEMAND = "state"
"""What is made when it is asked for."""
PIECE = 1 << 20
WINDOW = 4
_AGAIN = 0.2  # seconds
_MOST_FACTS = 1 << 16  # bytes of what is said beside a file
_MOST_WAITING = 64
_KEPT = 3  # offers under one name whose takers may still go on
_Answer = tuple[bytes | None, bytes | None]  # a reply, or why there is none


class NotGiven(Exception):
    """A gift did not come; the reason is a line for a person."""


class Gifts(Protocol):
    """What a worker gives and takes."""

    @property
    def wanted(self) -> threading.Event:
        """Set while somebody asks for what is made when it is asked for, and is not offered."""
        ...

    def offer(self, what: str, path: Path, facts: dict[str, Any]) -> None:
        """See `Giver.offer`."""
        ...

    def shut(self, what: str) -> None:
        """See `Giver.shut`."""
        ...

    def withdraw(self, what: str) -> None:
        """See `Giver.withdraw`."""
        ...

    def take(self, giver: str, what: str, path: Path, *, most: int, seconds: float) -> dict[str, Any]:
        """See `take`."""
        ...


@dataclass(frozen=True)
class _Offer:
    what: str
    path: Path
    size: int
    facts: dict[str, Any]


@dataclass
class Giver:
    """What this process offers as `name` (a seat, or `LIGHTHOUSE`). patient: what is not there may still come."""

    session: Session
    name: str
    patient: bool = True
    wanted: threading.Event = field(default_factory=threading.Event)
    _offers: dict[int, _Offer] = field(default_factory=dict)  # by number, the newest last
    _open: dict[str, int] = field(default_factory=dict)  # what a new taker gets
    _made: int = 0
    _waiting: list[tuple[str, IncomingQuery]] = field(default_factory=list)  # for what is not there yet

    def __post_init__(self) -> None:
        self.session.serve(f"{GIFT}/{self.name}", self._asked)

    def offer(self, what: str, path: Path, facts: dict[str, Any]) -> None:
        """Give the file at `path` to whoever asks for `what` from now on; it is this giver's, which removes it once
        newer ones have taken its place and that of `_KEPT` before it. facts: JSON-able, told beside.
        """
        checksum, size = 0, 0
        with path.open("rb") as file:
            while piece := file.read(PIECE):
                checksum, size = zlib.crc32(piece, checksum), size + len(piece)
        self._made += 1
        self._offers[self._made] = _Offer(what, path, size, {**facts, "crc32": checksum})
        self._open[what] = self._made
        if what == ON_DEMAND:
            self.wanted.clear()
        self.session.later(self._answer)
        for number in [number for number, offer in self._offers.items() if offer.what == what][:-_KEPT]:
            old = self._offers.pop(number)
            if all(offer.path != old.path for offer in self._offers.values()):
                old.path.unlink(missing_ok=True)

    def withdraw(self, what: str) -> None:
        """Nobody needs it any more: its files go."""
        self.shut(what)
        for number in [number for number, offer in self._offers.items() if offer.what == what]:
            self._offers.pop(number).path.unlink(missing_ok=True)

    def shut(self, what: str) -> None:
        """It is too old for new takers; those who have begun to take it go on."""
        self._open.pop(what, None)

    def take(self, giver: str, what: str, path: Path, *, most: int, seconds: float) -> dict[str, Any]:
        """What another one offers; see `take`."""
        return take(self.session, giver, what, path, most=most, seconds=seconds)

    def _asked(self, query: IncomingQuery) -> None:
        try:
            asked = parse_json(query.payload[:_MOST_FACTS])
            what, number, offset = asked["what"], asked["number"], asked["offset"]
            if not (isinstance(what, str) and isinstance(number, int) and isinstance(offset, int) and offset >= 0):
                raise ValueError
        except (ValueError, KeyError, TypeError):
            query.refuse(b"never")
            return
        if number < 0:
            self._waiting = [*self._waiting, (what, query)][-_MOST_WAITING:]
            if what == ON_DEMAND:
                self.wanted.set()
            self._answer()
            return
        offer = self._offers.get(number)
        if offer is None or offer.what != what or offset > offer.size:
            query.refuse(b"never")
        else:
            with offer.path.open("rb") as file:
                file.seek(offset)
                query.reply(file.read(PIECE))

    def _answer(self) -> None:
        """Tell those who wait for what is there now. In the session's thread."""
        waiting, self._waiting = self._waiting, []
        for what, query in waiting:
            number = self._open.get(what)
            offer = None if number is None else self._offers.get(number)
            if offer is not None:
                query.reply(json.dumps({**offer.facts, "number": number, "size": offer.size}).encode("ascii"))
            elif self.patient:
                self._waiting.append((what, query))
            else:
                query.refuse(b"never")
        if all(what != ON_DEMAND for what, _ in self._waiting):
            self.wanted.clear()


def take(session: Session, giver: str, what: str, path: Path, *, most: int, seconds: float) -> dict[str, Any]:
    """Fetch `what` from `giver` into the file `path`; what is said beside it.

    most: bytes that are taken. seconds: without a piece, after which it counts as lost. NotGiven where it does not
    come, is too long, or is not what was offered. Not to be called in the session's thread.
    """
    taking = _Taking(session, f"{GIFT}/{giver}", what)
    facts = taking.open(seconds)
    size, number = facts["size"], facts["number"]
    if size > most:
        raise NotGiven(f"it has {size} bytes, more than the {most} that fit this model")
    with path.open("wb") as file:
        checksum = 0
        for piece in taking.pieces(number, size, seconds):
            checksum = zlib.crc32(piece, checksum)
            file.write(piece)
    if checksum != facts.get("crc32"):
        raise NotGiven("it is not what was offered: its checksum differs")
    return facts


class _Taking:
    """One fetch. Answers come in the session's thread; the taker waits for them in its own."""

    def __init__(self, session: Session, key: str, what: str) -> None:
        self._session, self._key, self._what = session, key, what
        self._answers: dict[int, _Answer] = {}
        self._changed = threading.Condition()

    def open(self, seconds: float) -> dict[str, Any]:
        """Length, number and facts, once it is offered."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self._post(-1, 0, min(seconds, 5.0))
            reply, refusal = self._wait(0, min(seconds, 5.0))
            if reply is not None:
                return _facts(reply)
            if refusal == b"never":
                raise NotGiven("there is none")
            time.sleep(_AGAIN)
        raise NotGiven(f"nothing came within {seconds:g} s")

    def pieces(self, number: int, size: int, seconds: float) -> Iterator[bytes]:
        """Its bytes, in order."""
        offsets, posted = range(0, size, PIECE), 0
        for place, offset in enumerate(offsets):
            while posted < min(place + WINDOW, len(offsets)):
                self._post(number, offsets[posted], seconds)
                posted += 1
            piece, refusal = self._wait(offset, seconds)
            if piece is None and refusal is None:  # an answer may be lost: once more
                self._post(number, offset, seconds)
                piece, _ = self._wait(offset, seconds)
            if piece is None or len(piece) != min(PIECE, size - offset):
                raise NotGiven("it broke off")
            yield piece

    def _post(self, number: int, offset: int, seconds: float) -> None:
        def answered(reply: bytes | None, refusal: bytes | None) -> None:
            with self._changed:
                self._answers[offset] = reply, refusal
                self._changed.notify_all()

        asked = json.dumps({"what": self._what, "number": number, "offset": offset}).encode("ascii")
        try:
            self._session.ask(self._key, asked, answered, seconds=seconds)
        except OSError as error:
            raise NotGiven(str(error)) from None

    def _wait(self, offset: int, seconds: float) -> _Answer:
        with self._changed:
            self._changed.wait_for(lambda: offset in self._answers, seconds + 1.0)
            return self._answers.pop(offset, (None, None))


def _facts(answer: bytes) -> dict[str, Any]:
    """What a giver says of its gift. NotGiven where it is not as it must be."""
    try:
        facts = parse_json(answer[:_MOST_FACTS])
        if all(isinstance(facts[key], int) and 0 <= facts[key] < 1 << 62 for key in ("size", "number", "crc32")):
            return facts
    except (ValueError, KeyError, TypeError):
        pass
    raise NotGiven("what is said of it makes no sense")
