"""What the lighthouse tells a seat, as each worker of it hears it: whom nobody is to wait for any more.

`company.Company` is the whole line of a seat, and its first worker's; `PlaceLine` that of another worker of an island.
"""

from __future__ import annotations

import hmac
import logging
from collections.abc import Callable
from typing import Any, Protocol

from isles.comm.elastic.ballot import Word
from isles.comm.elastic.keys import ASKED, number_of, numbered, signature, told_at
from isles.comm.elastic.messages import Entry, Failed, Proposal, Silent, decode, encode
from isles.comm.elastic.session import IncomingQuery, Session
from isles.comm.elastic.transport import ElasticTransport
from isles.comm.tags import Tag

_LOG = logging.getLogger(__name__)
LONGEST = 4 << 20
"""Bytes of what the lighthouse says."""
_PATIENCE = 3.0  # seconds for an answer


class WaitsLine(Protocol):
    """A line on which a worker hears for whom it waits in vain; called in the session's thread.

    left_behind: called with a seat that a view on its way goes on without. fell_silent: with one that gives no sign of
    life. begun_again: with the word on another attempt of a round. failed: with (round, attempt), of which another
    worker of this island has no answer.
    """

    left_behind: Callable[[int], None]
    fell_silent: Callable[[int], None]
    begun_again: Callable[[Word], None]
    failed: Callable[[int, int], None]


def ends_waits(line: WaitsLine, transport: ElasticTransport) -> None:
    """Have what is heard on `line` end what is waited for in vain on `transport`."""
    line.left_behind = lambda seat: transport.give_up(seat, "a view without it is on its way")
    line.fell_silent = transport.fell_silent
    line.begun_again = lambda word: transport.again(Tag("outer", word.round, attempt=word.attempt))
    line.failed = lambda round, attempt: transport.again(Tag("outer", round, attempt=attempt + 1))


def tells_failures(session: Session, entry: Entry, place: int, places: int) -> Callable[[int, int], None]:
    """What tells the others of an island of `places` workers, called with (round, attempt), that the one at `place` has
    no answer of that attempt: so none of them waits for somebody who waits itself for one that was lost.
    """

    def tell(round: int, attempt: int) -> None:
        for other in range(places):
            if other != place:
                _say(session, entry, told_at(entry.seat, other), numbered(0, encode(Failed(round, attempt))))

    return tell


def _say(session: Session, entry: Entry, where: str, said: bytes) -> None:
    """Without waiting for an answer."""
    word = signature(entry.seat, entry.key, where, said)
    try:
        session.ask(where, said, lambda reply, refusal: None, attachment=word, seconds=_PATIENCE, urgent=True)
    except OSError:
        _LOG.debug("the session is closed")


class Orders:
    """What is ordered of the worker at `place` of the seat of `entry`. Called in the session's thread alone."""

    def __init__(self, session: Session, entry: Entry, place: int) -> None:
        self._session, self._entry, self._where = session, entry, told_at(entry.seat, place)
        self._newest = -1

    def take(self, query: IncomingQuery) -> Any:
        """The lighthouse's order, or the word of another worker of this island; None, and counted, where somebody else
        says it, or says again what was overheard, or where it is none.
        """
        said, entry = query.payload, self._entry
        if not hmac.compare_digest(query.attachment, signature(entry.seat, entry.key, self._where, said)):
            return self._refuse(query, "an order that is not the lighthouse's")
        try:
            number, word = number_of(said)
            message = decode(word, limit=LONGEST)
        except ValueError as error:
            query.reply()
            _LOG.warning("the lighthouse: %s", error)
            return None
        if not isinstance(message, Failed):  # which ends nothing that is not over, however often it is said
            if number <= self._newest:
                return self._refuse(query, "an order that was said before")
            self._newest = number
        query.reply()
        return message

    def _refuse(self, query: IncomingQuery, why: str) -> None:
        self._session.refused.note(-1, why)
        query.refuse(b"never")


class PlaceLine:
    """Of the worker at `place` in the island of the seat of `entry`, whose leader decides: it hears the same orders."""

    def __init__(self, session: Session, entry: Entry, place: int) -> None:
        self.left_behind: Callable[[int], None] = lambda seat: None
        self.fell_silent: Callable[[int], None] = lambda seat: None
        self.begun_again: Callable[[Word], None] = lambda word: None
        self.failed: Callable[[int, int], None] = lambda round, attempt: None
        self._session, self._entry, self._orders = session, entry, Orders(session, entry, place)
        session.serve(told_at(entry.seat, place), self._told)

    def doubt(self, seat: int) -> None:
        """Nothing comes from `seat`, which is waited for: does the lighthouse hear it?"""
        _say(self._session, self._entry, ASKED, encode(Silent(seat)))

    def _told(self, query: IncomingQuery) -> None:
        match self._orders.take(query):
            case Proposal(lost=lost):
                for seat in lost:
                    self.left_behind(seat)
            case Silent(seat=seat):
                self.fell_silent(seat)
            case Word() as word:
                self.begun_again(word)
            case Failed(round=round, attempt=attempt):
                self.failed(round, attempt)
