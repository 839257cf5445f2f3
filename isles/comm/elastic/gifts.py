"""Files that one member of a run hands to another: the state to begin with, what a worker came to, the one model.

    giver       offers a file under a name; a newer one takes its place. Who asks for what is not there yet is answered
                once it is, and `is_wanted` tells the giver.
    taker       asks for its length, then for its pieces, `WINDOW` at a time; checks length and checksum

The giver goes on training meanwhile: pieces are read from the disk as they are asked for. What a seat gives bears no
seal: whoever has the token may answer in its place.
"""

from __future__ import annotations

import json
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from isles.comm.elastic.keys import gift_at
from isles.comm.elastic.session import IncomingQuery, Session
from isles.parsing import parse_json

PIECE = 1 << 20
WINDOW = 4
_AGAIN = 0.2  # seconds
_MOST_FACTS = 1 << 16  # bytes of what is said beside a file
_MOST_WAITING = 64
_CLOSING = 10.0  # seconds for what is being written when a giver closes
_KEPT = 3  # offers under one name whose takers may still go on
_Answer = tuple[bytes | None, bytes | None]  # a reply, or why there is none


class NotGiven(Exception):
    """A gift did not come; the reason is a line for a person."""


class NotOffered(NotGiven):
    """Its giver has nothing of that name, and will have nothing."""


class NotAdopted(NotGiven):
    """A state came with which nobody can begin, and what its taker had before is gone."""


@dataclass(frozen=True, kw_only=True)
class GiftRequest:
    """A request for the file that `giver` offers under the name `what`.

    most: bytes that are accepted. seconds: without a piece until the gift counts as lost. wait: seconds until it must
    be offered; None: as long as `seconds`. after: only a gift of a later round than this one will do.
    """

    giver: str
    what: str
    most: int
    seconds: float
    wait: float | None = None
    after: int = -1

    @property
    def patience(self) -> float:
        """Seconds until it is offered."""
        return self.seconds if self.wait is None else self.wait


def is_written(path: Path) -> None:
    """For a file that is there already: nothing to write."""


class Gifts(Protocol):
    """What a worker gives and takes."""

    def is_wanted(self, what: str) -> bool:
        """See `Giver.is_wanted`."""
        ...

    def offer(self, what: str, path: Path, facts: dict[str, Any], write: Callable[[Path], None] = is_written) -> None:
        """See `Giver.offer`."""
        ...

    def shut(self, what: str) -> None:
        """See `Giver.shut`."""
        ...

    def withdraw(self, what: str) -> None:
        """See `Giver.withdraw`."""
        ...

    def expect(self, comes: Callable[[str], bool]) -> None:
        """See `Giver.expect`."""
        ...

    def take(self, asked: GiftRequest, path: Path) -> dict[str, Any]:
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
    """What this process offers as `name` (a seat, or `LIGHTHOUSE`).

    notice: called with a line for a person where a file could not be written. lost: whether the giver of that name is
    gone, so that nothing is asked of it any more. comes: see `expect`.
    """

    session: Session
    name: str
    notice: Callable[[str], None]
    comes: Callable[[str], bool] = lambda what: True
    lost: Callable[[str], bool] = lambda name: False
    _offers: dict[int, _Offer] = field(default_factory=dict)  # by number, the newest last
    _open: dict[str, int] = field(default_factory=dict)  # what a new taker gets
    _made: int = 0
    _coming: dict[int, tuple[str, threading.Thread]] = field(default_factory=dict)  # by number: being written
    _waiting: list[tuple[str, int, IncomingQuery]] = field(default_factory=list)  # for what is not there yet

    def __post_init__(self) -> None:
        self.session.serve(gift_at(self.name), self._asked)

    def offer(self, what: str, path: Path, facts: dict[str, Any], write: Callable[[Path], None] = is_written) -> None:
        """Give the file at `path` to whoever asks for `what` from now on; it is this giver's, which removes it once
        newer ones have taken its place and that of `_KEPT` before it. Returns at once. facts: JSON-able, told beside.
        write: puts the file there, in a thread of its own.
        """
        self._made += 1
        number = self._made
        thread = threading.Thread(
            target=self._make, args=(number, what, path, facts, write), name="isles-gift", daemon=True
        )
        self._coming[number] = what, thread
        thread.start()

    def is_wanted(self, what: str) -> bool:
        """Whether somebody has asked for what is neither there nor on its way."""
        return any(asked == what for asked, *_ in [*self._waiting]) and not self._is_coming(what)

    def expect(self, comes: Callable[[str], bool]) -> None:
        """comes: whether what is not there may still come, by its name; called in the session's thread. Who asks for
        something else is told so at once, and asks elsewhere.
        """
        self.comes = comes
        self.session.later(self._answer)

    def withdraw(self, what: str) -> None:
        """Stop offering `what`, and remove its files; who waits for it asks elsewhere."""
        self.shut(what)
        for number in [number for number, (coming, _) in [*self._coming.items()] if coming == what]:
            self._coming.pop(number, None)
        for number in [number for number, offer in [*self._offers.items()] if offer.what == what]:
            self._offers.pop(number).path.unlink(missing_ok=True)
        self.session.later(lambda: self._refuse(what))

    def shut(self, what: str) -> None:
        """Offer `what` to nobody new, for it is too old; those who are taking it go on."""
        self._open.pop(what, None)

    def take(self, asked: GiftRequest, path: Path) -> dict[str, Any]:
        """Fetch what another member offers; see `take`."""
        return take(self.session, asked, path, lost=partial(self.lost, asked.giver))

    def close(self) -> None:
        """Wait until files that are being written are whole."""
        for _, thread in [*self._coming.values()]:
            thread.join(_CLOSING)

    def _make(self, number: int, what: str, path: Path, facts: dict[str, Any], write: Callable[[Path], None]) -> None:
        """Write the file, and find its length and checksum; in a thread of its own."""
        made: _Offer | OSError
        try:
            write(path)
            checksum, size = 0, 0
            with path.open("rb") as file:
                while piece := file.read(PIECE):
                    checksum, size = zlib.crc32(piece, checksum), size + len(piece)
            made = _Offer(what, path, size, {**facts, "crc32": checksum})
        except OSError as error:
            made = error
        self.session.later(lambda: self._take_in(number, what, made))

    def _take_in(self, number: int, what: str, made: _Offer | OSError) -> None:
        """Offer a file that was written, or refuse whoever waits for one that could not be. In the session's thread."""
        is_needed = self._coming.pop(number, None) is not None
        if isinstance(made, OSError):
            self.notice(f"what another worker asked for could not be written: {made}; it will ask a third one")
            self._refuse(what)
            return
        if not is_needed:
            made.path.unlink(missing_ok=True)
            return
        self._offers[number] = made
        self._open[what] = number
        for older in [one for one, offer in self._offers.items() if offer.what == what][:-_KEPT]:
            old = self._offers.pop(older)
            if all(offer.path != old.path for offer in self._offers.values()):
                old.path.unlink(missing_ok=True)
        self._answer()

    def _asked(self, query: IncomingQuery) -> None:
        try:
            asked = parse_json(query.payload[:_MOST_FACTS])
            what, number, offset, after = (asked[key] for key in ("what", "number", "offset", "after"))
            numbers = all(isinstance(one, int) for one in (number, offset, after))
            if not (isinstance(what, str) and numbers and offset >= 0):
                raise ValueError
        except (ValueError, KeyError, TypeError):
            self.session.refused.note(-1, "a request for a gift that makes no sense")
            query.refuse(b"never")
            return
        if number < 0:
            self._waiting = [*self._waiting, (what, after, query)][-_MOST_WAITING:]
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
        for what, after, query in waiting:
            number = self._open.get(what)
            offer = None if number is None else self._offers.get(number)
            offer = None if offer is not None and offer.facts.get("round", after + 1) <= after else offer
            if offer is not None:
                query.reply(json.dumps({**offer.facts, "number": number, "size": offer.size}).encode("ascii"))
            elif self.comes(what) or self._is_coming(what):
                self._waiting.append((what, after, query))
            else:
                query.refuse(b"never")

    def _is_coming(self, what: str) -> bool:
        return any(coming == what for coming, _ in [*self._coming.values()])

    def _refuse(self, what: str) -> None:
        """Turn away all who wait for `what`: they ask somebody else."""
        for *_, query in [one for one in self._waiting if one[0] == what]:
            query.refuse(b"never")
        self._waiting = [one for one in self._waiting if one[0] != what]


def take(
    session: Session, asked: GiftRequest, path: Path, *, lost: Callable[[], bool] = lambda: False
) -> dict[str, Any]:
    """Fetch a gift into the file `path`; what is said beside it. lost: whether the giver is gone.

    NotGiven where it does not come, is too long, or is not what was offered. Not to be called in the session's thread.
    """
    taking = _Taking(session, gift_at(asked.giver), asked.what, asked.after, lost)
    facts = taking.open(asked.patience)
    size, number = facts["size"], facts["number"]
    if size > asked.most:
        raise NotGiven(f"it has {size} bytes, more than the {asked.most} that fit this model")
    with path.open("wb") as file:
        checksum = 0
        for piece in taking.pieces(number, size, asked.seconds):
            checksum = zlib.crc32(piece, checksum)
            file.write(piece)
    if checksum != facts.get("crc32"):
        raise NotGiven("it is not what was offered: its checksum differs")
    return facts


class _Taking:
    """One fetch. Answers come in the session's thread; the taker waits for them in its own."""

    def __init__(self, session: Session, key: str, what: str, after: int, lost: Callable[[], bool]) -> None:
        self._session, self._key, self._what, self._after, self._lost = session, key, what, after, lost
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
                raise NotOffered("there is none")
            if self._lost():
                raise NotGiven("it is gone")
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

        said = {"what": self._what, "number": number, "offset": offset, "after": self._after}
        asked = json.dumps(said).encode("ascii")
        try:
            self._session.ask(self._key, asked, answered, seconds=seconds)
        except OSError as error:
            raise NotGiven(str(error)) from None

    def _wait(self, offset: int, seconds: float) -> _Answer:
        until = time.monotonic() + seconds + 1.0
        with self._changed:
            while offset not in self._answers and time.monotonic() < until:
                if self._lost():
                    raise NotGiven("it is gone")
                self._changed.wait_for(lambda: offset in self._answers, min(_AGAIN, seconds + 1.0))
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
