"""Files that one member of a run hands to another: the state to begin with, what a worker came to, the one model.

    giver       offers a file under a name; a newer one takes its place. Who asks for what is not there yet is answered
                once it is, and `is_wanted` tells the giver.
    taker       asks for its length, then for its pieces, some at a time; checks length and checksum (`taking`)

The giver goes on training meanwhile: pieces are read from the disk as they are asked for.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from isles.comm.elastic.control import Condition, ControlSession, Query, SideWork
from isles.comm.elastic.gifts.taking import MOST_FACTS, PIECE, SEALED, GiftRequest, Guide, Trusting, seat_in, take
from isles.comm.elastic.keys import LIGHTHOUSE, gift_at, sealed
from isles.fields import OneLine, integer, table, value_of
from isles.parsing import parse_json

_MOST_WAITING = 64
_CLOSING = 10.0  # seconds for what is being written when a giver closes
_KEPT = 3  # offers under one name whose takers may still go on


def is_written(path: Path) -> None:
    """For a file that is there already: nothing to write."""


class Gifts(Protocol):
    """What a worker gives and takes: see `Giver`."""

    def is_wanted(self, what: str) -> bool: ...
    def offer(self, what: str, path: Path, facts: dict[str, Any], write: Callable[[Path], None] = ...) -> None: ...
    def shut(self, what: str) -> None: ...
    def withdraw(self, what: str) -> None: ...
    def expect(self, comes: Callable[[str], bool]) -> None: ...
    def take(self, asked: GiftRequest, path: Path) -> dict[str, Any]: ...


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
class Giver:
    """What this process offers as `name` (a seat, or `LIGHTHOUSE`).

    notice: called with a line for a person where a file could not be written. lost: whether the giver of that name is
    gone, so that nothing is asked of it any more; changed: notified when that may be so. guide: by whose introductions
    what seats give is sealed. comes: see `expect`.
    """

    session: ControlSession
    name: str
    notice: Callable[[str], None]
    comes: Callable[[str], bool] = lambda what: True
    lost: Callable[[str], bool] = lambda name: False
    guide: Guide = field(default_factory=Trusting)
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

    def take(self, asked: GiftRequest, path: Path) -> dict[str, Any]:
        """Fetch what another member offers; see `take`."""
        mine = seat_in(self.name)
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
        by_seat = self.name != LIGHTHOUSE
        return sealed(self.guide.expected(taker), SEALED + asked, data) + data if by_seat else data

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
