"""Files that one member of a run hands to another: the state to begin with, what a worker came to, the one model.

    giver       offers a file under a name; a newer one takes its place. Who asks for what is not there yet is answered
                once it is, and `is_wanted` tells the giver.
    taker       asks for its length, then for its pieces, some at a time; checks length and checksum (`taking`)

The giver goes on training meanwhile: pieces are read from the disk as they are asked for.

The taking side of `giving`: a file in pieces, each of which bears the giver's seal.

What a member gives is sealed over the request and the answer, by the introduction of the taker (`keys`): whoever has the
token may hear requests, and what it answers in the giver's place is not taken. Where the lighthouse gives nobody else
can answer.
"""

from __future__ import annotations

import hmac
import json
import math
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from isles.base.parsing import OneLine, Unfit, integer, parse_json, table, value_of
from isles.membership.keys import LIGHTHOUSE, PROOF, gift_at, sealed
from isles.membership.session import Condition, ControlSession, Query, SideWork

PIECE = 1 << 20
WINDOW = 4
MOST_FACTS = 1 << 16
"""Bytes of what is said beside a file, and of a request."""
SEALED = b"isles gift "
"""Before a request, under a seal."""
_NUMBERS = {"size": (0, 1 << 62), "number": (0, 1 << 53), "crc32": (0, (1 << 32) - 1), "step": (0, 1 << 53)}
_NUMBERS |= {"parts": (1, 1 << 16), "participants": (1, 1 << 30), "digest": (-1 << 63, (1 << 63) - 1)}
_AGAIN = 0.2  # seconds
_Answer = tuple[bytes | None, bytes | None]  # a reply, or why there is none


class PeerKeys(Protocol):
    """What givers and takers ask about each other: `PeerConnections`."""

    def introduction(self, peer: int) -> bytes | None:
        """By which a message to `peer` is sealed (16 bytes); None while that is not known. May wait."""

    def expected(self, sender: int) -> bytes:
        """By which a message of `sender` must be sealed."""


class NoPeerKeys:
    """Where all are one program's, as in a test: nobody is introduced."""

    def introduction(self, peer: int) -> bytes:
        return bytes(16)

    def expected(self, sender: int) -> bytes:
        return bytes(16)


class StateUnavailable(Exception):
    """A gift did not come; the reason is a line for a person."""


class StateNotFound(StateUnavailable):
    """Its giver has nothing of that name, and will have nothing."""


class StateRejected(StateUnavailable):
    """A state came with which nobody can begin, and what its taker had before is gone."""


@dataclass(frozen=True, kw_only=True)
class FetchRequest:
    """A request for the file that `giver` offers under the name `what`.

    most: bytes that are accepted. seconds: without a piece until the gift counts as lost. wait: seconds until it must
    be offered; None: as long as `seconds`. after, newest: only a gift of a later round than the one, and of none later
    than the other, will do.
    """

    giver: str
    what: str
    most: int
    seconds: float
    wait: float | None = None
    after: int = -1
    newest: int = 1 << 53

    @property
    def patience(self) -> float:
        """Seconds until it is offered."""
        return self.seconds if self.wait is None else self.wait


def member_in(name: str) -> int:
    """Whose member a giver's name is of; -1 for the lighthouse's."""
    return -1 if name == LIGHTHOUSE else int(name.partition("/")[0])


def take(
    session: ControlSession,
    asked: FetchRequest,
    path: Path,
    taker: int = -1,
    introduction: Callable[[int], bytes | None] = lambda member: bytes(16),
    *,
    lost: Callable[[], bool] = lambda: False,
    changed: Condition | None = None,
) -> dict[str, Any]:
    """Fetch a gift into the file `path`; what is said beside it. taker: the member that asks; -1: the lighthouse.
    introduction: of the taker to a member, see `PeerKeys`. lost: whether the giver is gone; looked at
    when `changed` is notified, and without it several times a second.

    StateUnavailable where it does not come, is too long, or is not what was offered. Not for callbacks.
    """
    look = _AGAIN if changed is None else math.inf
    taking = _Taking(session, asked, taker, introduction, lost, changed or session.condition(), look)
    facts = taking.open(asked.patience)
    size, number = facts["size"], facts["number"]
    if size > asked.most:
        raise StateUnavailable(f"it has {size} bytes, more than the {asked.most} that fit this model")
    with path.open("wb") as file:
        checksum = 0
        for piece in taking.pieces(number, size, asked.seconds):
            checksum = zlib.crc32(piece, checksum)
            file.write(piece)
    if checksum != facts.get("crc32"):
        raise StateUnavailable("it is not what was offered: its checksum differs")
    return facts


@dataclass
class _Taking:
    """One fetch. Answers come in callbacks; the taker waits for them in its own thread."""

    session: ControlSession
    asked: FetchRequest
    taker: int
    introduction: Callable[[int], bytes | None]
    lost: Callable[[], bool]
    changed: Condition
    look: float  # seconds between looks at whether the giver is lost
    _word: bytes = b""
    _answers: dict[int, _Answer] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._key, self._giver = gift_at(self.asked.giver), member_in(self.asked.giver)

    def open(self, seconds: float) -> dict[str, Any]:
        """Length, number and facts, once it is offered."""
        until = self.session.now() + seconds
        while self.session.now() < until:
            reply = refusal = None
            if self._is_introduced():
                self._post(-1, 0, min(seconds, 5.0))
                reply, refusal = self._wait(0, min(seconds, 5.0))
            if reply is not None:
                return _facts(reply, range(self.asked.after + 1, self.asked.newest + 1))
            if refusal == b"never":
                raise StateNotFound("there is none")
            if self.lost():
                raise StateUnavailable("it is gone")
            with self.changed:
                self.changed.wait_for(lambda: False, _AGAIN)
        raise StateUnavailable(f"nothing came within {seconds:g} s")

    def _is_introduced(self) -> bool:
        """Whether what the giver says can be known to be its own."""
        if self._giver >= 0 and not self._word:
            self._word = self.introduction(self._giver) or b""
        return self._giver < 0 or bool(self._word)

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
                raise StateUnavailable("it broke off")
            yield piece

    def _post(self, number: int, offset: int, seconds: float) -> None:
        said = {
            "what": self.asked.what,
            "number": number,
            "offset": offset,
            "after": self.asked.after,
            "taker": self.taker,
        }
        asked = json.dumps(said).encode("ascii")

        def answered(reply: bytes | None, refusal: bytes | None) -> None:
            with self.changed:
                self._answers[offset] = None if reply is None else self._unsealed(asked, reply), refusal
                self.changed.notify_all()

        try:
            self.session.ask(self._key, asked, answered, seconds=seconds)
        except OSError as error:
            raise StateUnavailable(str(error)) from None

    def _unsealed(self, asked: bytes, reply: bytes) -> bytes | None:
        """What the giver says; None, and counted, where somebody else does."""
        if self._giver < 0:
            return reply
        seal, data = reply[:PROOF], reply[PROOF:]
        if hmac.compare_digest(seal, sealed(self._word, SEALED + asked, data)):
            return data
        self.session.refused.note(-1, "a gift in another's name")
        return None

    def _wait(self, offset: int, seconds: float) -> _Answer:
        until = self.session.now() + seconds + 1.0
        with self.changed:
            while offset not in self._answers and (left := until - self.session.now()) > 0:
                if self.lost():
                    raise StateUnavailable("it is gone")
                self.changed.wait_for(lambda: offset in self._answers or self.lost(), min(self.look, left))
            return self._answers.pop(offset, (None, None))


def _facts(answer: bytes, rounds: range) -> dict[str, Any]:
    """What a giver says of its gift, which is of one of `rounds`; all numbers of it are checked here. StateUnavailable."""
    try:
        facts = table(parse_json(answer[:MOST_FACTS]), "what is said of it")
        left_out, whole = table(facts.get("left_out", {}), "left_out"), facts.get("whole", False)
        if not isinstance(whole, bool) or not all(member.isdecimal() and len(member) < 10 for member in left_out):
            raise Unfit("whole is neither true nor false, or left_out names no members")
        facts["left_out"] = {int(member): integer(left_out, member, -1, 1 << 53) for member in left_out}
        bounds = _NUMBERS | {"round": (rounds.start, rounds.stop - 1)}
        for key in facts.keys() & bounds.keys() | {"size", "number", "crc32"}:
            integer(facts, key, *bounds[key])
        return facts
    except ValueError as error:
        raise StateUnavailable(f"what is said of it makes no sense: {error}") from None


_MOST_WAITING = 64
_CLOSING = 10.0  # seconds for what is being written when a giver closes
_KEPT = 3  # offers under one name whose takers may still go on


def is_written(path: Path) -> None:
    """For a file that is there already: nothing to write."""


class StateTransfer(Protocol):
    """What a worker gives and takes: see `StateServer`."""

    def is_wanted(self, what: str) -> bool: ...
    def offer(self, what: str, path: Path, facts: dict[str, Any], write: Callable[[Path], None] = ...) -> None: ...
    def shut(self, what: str) -> None: ...
    def withdraw(self, what: str) -> None: ...
    def expect(self, comes: Callable[[str], bool]) -> None: ...
    def take(self, asked: FetchRequest, path: Path) -> dict[str, Any]: ...


@dataclass(frozen=True)
class _Offer:
    what: str
    path: Path
    size: int
    facts: dict[str, Any]
    is_own: bool

    def drop(self) -> None:
        """Remove the file, unless it was there before: then it is somebody else's, who removes it."""
        if self.is_own:
            self.path.unlink(missing_ok=True)


@dataclass
class StateServer:
    """What this process offers as `name` (a member, or `LIGHTHOUSE`).

    notice: called with a line for a person where a file could not be written. lost: whether the giver of that name is
    gone, so that nothing is asked of it any more; changed: notified when that may be so. guide: by whose introductions
    what members give is sealed. comes: see `expect`.
    """

    session: ControlSession
    name: str
    notice: Callable[[str], None]
    comes: Callable[[str], bool] = lambda what: True
    lost: Callable[[str], bool] = lambda name: False
    guide: PeerKeys = field(default_factory=NoPeerKeys)
    changed: Condition | None = None
    _offers: dict[int, _Offer] = field(default_factory=dict)  # by number, the newest last
    _open: dict[str, int] = field(default_factory=dict)  # what a new taker gets
    _made: int = 0
    _coming: dict[int, tuple[str, SideWork]] = field(default_factory=dict)  # by number: being written
    _waiting: list[tuple[str, int, int, Query]] = field(default_factory=list)  # for what is not there yet

    def __post_init__(self) -> None:
        self.session.serve(gift_at(self.name), self._asked)

    def offer(self, what: str, path: Path, facts: dict[str, Any], write: Callable[[Path], None] = is_written) -> None:
        """Give the file at `path` to whoever asks for `what` from now on. Returns at once. facts: JSON-able, told
        beside. write: puts the file there, beside all else; what it wrote is this giver's, which removes it once newer
        ones have taken its place and that of `_KEPT` before it.
        """
        self._made += 1
        number = self._made
        work = self.session.aside(partial(self._make, number, what, path, facts, write))
        self._coming[number] = what, work
        work.start()

    def is_wanted(self, what: str) -> bool:
        """Whether somebody has asked for what is neither there nor on its way."""
        return any(asked == what for asked, *_ in [*self._waiting]) and not self._is_coming(what)

    def expect(self, comes: Callable[[str], bool]) -> None:
        """comes: whether what is not there may still come, by its name; called in a callback. Who asks for
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
            self._offers.pop(number).drop()
        self.session.later(lambda: self._refuse(what))

    def shut(self, what: str) -> None:
        """Offer `what` to nobody new, for it is too old; those who are taking it go on."""
        self._open.pop(what, None)

    def take(self, asked: FetchRequest, path: Path) -> dict[str, Any]:
        """Fetch what another member offers; see `take`."""
        mine = member_in(self.name)
        lost = partial(self.lost, asked.giver)
        return take(self.session, asked, path, mine, self.guide.introduction, lost=lost, changed=self.changed)

    def close(self) -> None:
        """Wait until files that are being written are whole."""
        for _, work in [*self._coming.values()]:
            work.join(_CLOSING)

    def _make(self, number: int, what: str, path: Path, facts: dict[str, Any], write: Callable[[Path], None]) -> None:
        """Write the file, and find its length and checksum; beside all else."""
        made: _Offer | OSError
        try:
            write(path)
            checksum, size = 0, 0
            with path.open("rb") as file:
                while piece := file.read(PIECE):
                    checksum, size = zlib.crc32(piece, checksum), size + len(piece)
            made = _Offer(what, path, size, {**facts, "crc32": checksum}, write is not is_written)
        except OSError as error:
            made = error
        self.session.later(lambda: self._take_in(number, what, made))

    def _take_in(self, number: int, what: str, made: _Offer | OSError) -> None:
        """Offer a file that was written, or refuse whoever waits for one that could not be. In a callback."""
        is_needed = self._coming.pop(number, None) is not None
        if isinstance(made, OSError):
            self.notice(f"what another worker asked for could not be written: {made}; it will ask a third one")
            self._refuse(what)
            return
        if not is_needed or number < self._open.get(what, -1):  # a newer one was written before it
            self._drop(made)
            return
        self._offers[number] = made
        self._open[what] = number
        for older in [one for one, offer in self._offers.items() if offer.what == what][:-_KEPT]:
            self._drop(self._offers.pop(older))
        self._answer()

    def _drop(self, old: _Offer) -> None:
        if all(offer.path != old.path for offer in self._offers.values()):
            old.drop()

    def _asked(self, query: Query) -> None:
        try:
            asked = table(parse_json(query.payload[:MOST_FACTS]), "a request")
            what, offset = value_of(asked, "what", OneLine), integer(asked, "offset", 0, 1 << 62)
            number, after, taker = (integer(asked, key, -1, 1 << 62) for key in ("number", "after", "taker"))
        except ValueError:
            self.session.refused.note(-1, "a request for a gift that makes no sense")
            query.refuse(b"never")
            return
        if number < 0:
            self._waiting = [*self._waiting, (what, after, taker, query)][-_MOST_WAITING:]
            self._answer()
            return
        offer = self._offers.get(number)
        if offer is None or offer.what != what or offset > offer.size:
            query.refuse(b"never")
        else:
            query.reply(partial(self._piece, query.payload, taker, offer.path, offset))

    def _piece(self, asked: bytes, taker: int, path: Path, offset: int) -> bytes:
        data = b""  # of a file that was removed meanwhile: then the taker asks elsewhere
        with suppress(FileNotFoundError), path.open("rb") as file:
            file.seek(offset)
            data = file.read(PIECE)
        return self._sealed(asked, taker, data)

    def _give(self, query: Query, taker: int, data: bytes) -> None:
        query.reply(self._sealed(query.payload, taker, data))

    def _sealed(self, asked: bytes, taker: int, data: bytes) -> bytes:
        """`data` as this giver's answer to what `taker` has asked."""
        by_member = self.name != LIGHTHOUSE
        return sealed(self.guide.expected(taker), SEALED + asked, data) + data if by_member else data

    def _answer(self) -> None:
        """Tell those who wait for what is there now. In a callback."""
        waiting, self._waiting = self._waiting, []
        for what, after, taker, query in waiting:
            number = self._open.get(what)
            offer = None if number is None else self._offers.get(number)
            offer = None if offer is not None and offer.facts.get("round", after + 1) <= after else offer
            if offer is not None:
                facts = {**offer.facts, "number": number, "size": offer.size}
                self._give(query, taker, json.dumps(facts).encode("ascii"))
            elif self.comes(what) or self._is_coming(what):
                self._waiting.append((what, after, taker, query))
            else:
                query.refuse(b"never")

    def _is_coming(self, what: str) -> bool:
        return any(coming == what for coming, _ in [*self._coming.values()])

    def _refuse(self, what: str) -> None:
        """Turn away all who wait for `what`: they ask somebody else."""
        for *_, query in [one for one in self._waiting if one[0] == what]:
            query.refuse(b"never")
        self._waiting = [one for one in self._waiting if one[0] != what]
