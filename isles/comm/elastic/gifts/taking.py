"""The taking side of `giving`: a file in pieces, each of which bears the giver's seal.

What a seat gives is sealed over the request and the answer, by the introduction of the taker (`keys`): whoever has the
token may hear requests, and what it answers in the giver's place is not taken. Where the lighthouse gives nobody else
can answer.
"""

from __future__ import annotations

import hmac
import json
import math
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from isles.comm.elastic.control import Condition, ControlSession
from isles.comm.elastic.keys import LIGHTHOUSE, PROOF, gift_at, sealed
from isles.fields import Unfit, integer, table
from isles.parsing import parse_json

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


class Guide(Protocol):
    """What givers and takers ask about each other: `Pairs`."""

    def introduction(self, peer: int) -> bytes | None:
        """By which a message to `peer` is sealed (16 bytes); None while that is not known. May wait."""

    def expected(self, sender: int) -> bytes:
        """By which a message of `sender` must be sealed."""


class Trusting:
    """Where all are one program's, as in a test: nobody is introduced."""

    def introduction(self, peer: int) -> bytes:
        return bytes(16)

    def expected(self, sender: int) -> bytes:
        return bytes(16)


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


def seat_in(name: str) -> int:
    """Whose seat a giver's name is of; -1 for the lighthouse's."""
    return -1 if name == LIGHTHOUSE else int(name.partition("/")[0])


def take(
    session: ControlSession,
    asked: GiftRequest,
    path: Path,
    taker: int = -1,
    introduction: Callable[[int], bytes | None] = lambda seat: bytes(16),
    *,
    lost: Callable[[], bool] = lambda: False,
    changed: Condition | None = None,
) -> dict[str, Any]:
    """Fetch a gift into the file `path`; what is said beside it. taker: the seat that asks; -1: the lighthouse.
    introduction: of the taker to a seat, see `Guide`. lost: whether the giver is gone; looked at
    when `changed` is notified, and without it several times a second.

    NotGiven where it does not come, is too long, or is not what was offered. Not for callbacks.
    """
    look = _AGAIN if changed is None else math.inf
    taking = _Taking(session, asked, taker, introduction, lost, changed or session.condition(), look)
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


@dataclass
class _Taking:
    """One fetch. Answers come in callbacks; the taker waits for them in its own thread."""

    session: ControlSession
    asked: GiftRequest
    taker: int
    introduction: Callable[[int], bytes | None]
    lost: Callable[[], bool]
    changed: Condition
    look: float  # seconds between looks at whether the giver is lost
    _word: bytes = b""
    _answers: dict[int, _Answer] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._key, self._giver = gift_at(self.asked.giver), seat_in(self.asked.giver)

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
                raise NotOffered("there is none")
            if self.lost():
                raise NotGiven("it is gone")
            with self.changed:
                self.changed.wait_for(lambda: False, _AGAIN)
        raise NotGiven(f"nothing came within {seconds:g} s")

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
                raise NotGiven("it broke off")
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
            raise NotGiven(str(error)) from None

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
                    raise NotGiven("it is gone")
                self.changed.wait_for(lambda: offset in self._answers or self.lost(), min(self.look, left))
            return self._answers.pop(offset, (None, None))


def _facts(answer: bytes, rounds: range) -> dict[str, Any]:
    """What a giver says of its gift, which is of one of `rounds`; all numbers of it are checked here. NotGiven."""
    try:
        facts = table(parse_json(answer[:MOST_FACTS]), "what is said of it")
        left_out, whole = table(facts.get("left_out", {}), "left_out"), facts.get("whole", False)
        if not isinstance(whole, bool) or not all(seat.isdecimal() and len(seat) < 10 for seat in left_out):
            raise Unfit("whole is neither true nor false, or left_out names no seats")
        facts["left_out"] = {int(seat): integer(left_out, seat, -1, 1 << 53) for seat in left_out}
        bounds = _NUMBERS | {"round": (rounds.start, rounds.stop - 1)}
        for key in facts.keys() & bounds.keys() | {"size", "number", "crc32"}:
            integer(facts, key, *bounds[key])
        return facts
    except ValueError as error:
        raise NotGiven(f"what is said of it makes no sense: {error}") from None
