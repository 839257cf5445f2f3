"""What the lighthouse tells a seat, as each worker of it hears it: whom nobody is to wait for any more.

`company.Company` is the whole line of a seat, and its first worker's; `PlaceLine` that of another worker of an island.
"""

from __future__ import annotations

import hmac
import logging
from collections.abc import Callable
from typing import Any

from isles.comm.elastic.ballot import Word
from isles.comm.elastic.control import ControlSession, Query
from isles.comm.elastic.keys import number_of, numbered, signature, told_at
from isles.comm.elastic.line import LONGEST, PeerWaits, SeatLine
from isles.comm.elastic.messages import Entry, Failed, Proposal, Silent, decode, encode
from isles.comm.errors import PeerSilent
from isles.comm.tags import Tag
from isles.comm.view import View

_LOG = logging.getLogger(__name__)
LEFT_BEHIND = "a view without it is on its way"
"""Why one is not waited for any more that did not ask to leave."""


def end_waits(waits: PeerWaits | None, message: Any) -> None:
    """Have what `message` says is waited for in vain be waited for no longer."""
    if waits is None:
        return
    match message:
        case Proposal(lost=lost):
            for seat in lost:
                waits.give_up(seat, LEFT_BEHIND)
        case Silent(seat=seat):
            waits.give_up(seat, PeerSilent(seat))
        case Word(round=round, attempt=attempt):
            waits.again(Tag("outer", round, attempt=attempt))
        case Failed(round=round, attempt=attempt):
            waits.again(Tag("outer", round, attempt=attempt + 1))


def tells_failures(line: SeatLine, place: int, places: int) -> Callable[[int, int], None]:
    """What tells the others of an island of `places` workers, called with (round, attempt), that the one at `place` has
    no answer of that attempt: so none of them waits for somebody who waits itself for one that was lost.
    """

    def tell(round: int, attempt: int) -> None:
        for other in range(places):
            if other != place:
                line.send(numbered(0, encode(Failed(round, attempt))), key=told_at(line.entry.seat, other))

    return tell


class Orders:
    """What is ordered of the worker at `place` of the seat of `entry`. Called in callbacks alone."""

    def __init__(self, session: ControlSession, entry: Entry, place: int) -> None:
        self._session, self._entry, self._where = session, entry, told_at(entry.seat, place)
        self._newest = -1

    def take(self, query: Query) -> Any:
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

    def _refuse(self, query: Query, why: str) -> None:
        self._session.refused.note(-1, why)
        query.refuse(b"never")


class PlaceLine(SeatLine):
    """Of the worker at `place` in the island of the seat of `entry`, whose leader decides: it hears the same orders."""

    def __init__(self, session: ControlSession, entry: Entry, place: int) -> None:
        super().__init__(session, entry)
        self._orders = Orders(session, entry, place)
        session.serve(told_at(entry.seat, place), self._told)

    def _told(self, query: Query) -> None:
        message = self._orders.take(query)
        if isinstance(message, View) and self.meets is not None:
            self.meets(message)
        end_waits(self.waits, message)
