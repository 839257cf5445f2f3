"""What a worker of a seat says to the lighthouse, and what it is told: whom nobody is to wait for any more.

`company.Company` is the whole line of a seat, and its first worker's; `PlaceLine` that of another worker of an island.
"""

from __future__ import annotations

import hmac
import logging
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from isles.comm.elastic.ballot import Word
from isles.comm.elastic.control import ControlSession, Query
from isles.comm.elastic.keys import ASKED, REPORTED, number_of, numbered, signature, told_at
from isles.comm.elastic.links.reports import Reports
from isles.comm.elastic.messages import Entry, Failed, Proposal, Silent, decode, encode
from isles.comm.elastic.transport import ElasticTransport
from isles.comm.tags import Tag

_LOG = logging.getLogger(__name__)
BEAT = 1.0
"""Seconds between beats."""
PATIENCE = 3.0
"""Seconds for an answer of the lighthouse."""
_LATE = 1.0  # seconds behind its time until whoever waits for an answer counts it as none
_LONGEST = 4 << 20  # bytes of what the lighthouse says


class SeatLine:
    """What a worker in the seat of `entry` says. changed: held while what callbacks and its own thread share changes.
    waited: seconds for which that thread has waited here; other threads have lines of their own.
    """

    def __init__(self, session: ControlSession, entry: Entry) -> None:
        self.session, self.entry, self.changed, self.waited = session, entry, session.condition(), 0.0
        self._reports = Reports(session, self._hand_in)
        self._closed = False

    def report(self, event: Mapping[str, Any]) -> None:
        """Have the lighthouse note a line of metrics or another event. Returns at once."""
        self._reports.add(event)

    def reported(self, seconds: float) -> None:
        """Wait until all reports have been taken, `seconds` at most."""
        self._reports.settle(seconds)

    def wait(self, over: Callable[[], bool], seconds: float) -> bool:
        """Wait until `over`, asked whenever something has changed, is true, or for `seconds`; what it says then."""
        began = self.session.now()
        with self.changed:
            is_over = self.changed.wait_for(over, seconds)
            self.waited += self.session.now() - began
        return is_over

    def ask(self, message: Any, seconds: float = PATIENCE, key: str = ASKED) -> Any:
        """The lighthouse's answer; None where none comes in time, or it has none. Not for callbacks."""
        answers: list[Any] = []

        def answered(answer: Any) -> None:
            with self.changed:
                answers.append(answer)
                self.changed.notify_all()

        self.send(message, answered, seconds, key)
        self.wait(lambda: bool(answers), seconds + _LATE)
        return answers[0] if answers else None

    def send(
        self,
        message: Any,
        answered: Callable[[Any], None] = lambda answer: None,
        seconds: float = PATIENCE,
        key: str = ASKED,
    ) -> None:
        """`ask` whoever serves `key` without waiting: `answered` is called with the answer. message: or its bytes."""
        said = message if isinstance(message, bytes) else encode(message)
        word = signature(self.entry.seat, self.entry.key, key, said)
        try:
            self.session.ask(
                key, said, lambda reply, _: answered(_read(reply)), attachment=word, seconds=seconds, urgent=True
            )
        except OSError:
            _LOG.debug("the session is closed")
            answered(None)

    def close(self) -> None:
        """Say nothing more by itself. Safe to call twice."""
        with self.changed:
            self._closed = True
        self._reports.close()

    def _hand_in(self, line: bytes, taken: Callable[[bool], None]) -> None:
        self.send(line, lambda answer: taken(answer is not None), key=REPORTED)


def _read(reply: bytes | None) -> Any:
    """What an answer says: None for none, True for one without a word."""
    if not reply:
        return None if reply is None else True
    try:
        return decode(reply, limit=_LONGEST)
    except ValueError as error:
        _LOG.warning("the lighthouse: %s", error)
        return None


class WaitsLine(Protocol):
    """A line on which a worker hears for whom it waits in vain; called in callbacks.

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
            message = decode(word, limit=_LONGEST)
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
        self.left_behind: Callable[[int], None] = lambda seat: None
        self.fell_silent: Callable[[int], None] = lambda seat: None
        self.begun_again: Callable[[Word], None] = lambda word: None
        self.failed: Callable[[int, int], None] = lambda round, attempt: None
        self._orders = Orders(session, entry, place)
        session.serve(told_at(entry.seat, place), self._told)

    def doubt(self, seat: int) -> None:
        """Nothing comes from `seat`, which is waited for: does the lighthouse hear it?"""
        self.send(Silent(seat))

    def _told(self, query: Query) -> None:
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
