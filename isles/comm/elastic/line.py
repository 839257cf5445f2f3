"""What a worker says to the lighthouse in the name of its seat, and what it has heard on rounds."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from isles.comm.elastic.ballot import Word
from isles.comm.elastic.control import ControlSession
from isles.comm.elastic.keys import ASKED, REPORTED, signature
from isles.comm.elastic.links.reports import Reports
from isles.comm.elastic.messages import Entry, Silent, decode, encode
from isles.comm.errors import PeerLost
from isles.comm.tags import Tag
from isles.comm.view import View

_LOG = logging.getLogger(__name__)
BEAT = 1.0
"""Seconds between beats."""
PATIENCE = 3.0
"""Seconds for an answer of the lighthouse."""
LONGEST = 4 << 20
"""Bytes of what the lighthouse says."""
_LATE = 1.0  # seconds behind its time until whoever waits for an answer counts it as none


class Words:
    """The newest `Word` on each round. Fed by whoever hears the lighthouse, under the lock of that line."""

    def __init__(self) -> None:
        self._words: dict[int, Word] = {}

    def hear(self, word: Word) -> None:
        """Note a word; one that comes late, or twice, changes nothing."""
        old = self._words.get(word.round)
        if old is None or (old.verdict != "land" and (word.verdict == "land" or word.attempt > old.attempt)):
            self._words[word.round] = word

    def newer(self, round: int, attempt: int) -> Word | None:
        """The word on `round` where it is one to land, or of a later attempt than `attempt`; else None."""
        word = self._words.get(round)
        return word if word is not None and (word.verdict == "land" or word.attempt > attempt) else None

    def of(self, round: int) -> Word | None:
        """The newest word on `round`."""
        return self._words.get(round)

    def forget_before(self, round: int) -> None:
        """Drop the words on rounds before `round`."""
        self._words = {key: word for key, word in self._words.items() if key >= round}


class PeerWaits(Protocol):
    """What a worker waits for, of others: its transport."""

    def give_up(self, seat: int, why: str | PeerLost) -> None:
        """End all that is under way with `seat`; later messages are tried again."""

    def again(self, tag: Tag) -> None:
        """The attempt of `tag` has begun: nobody waits any more in those of its round before it."""


class SeatLine:
    """What a worker in the seat of `entry` says. changed: held while what callbacks and its own thread share changes.
    waited: seconds for which that thread has waited here; other threads have lines of their own. waits: its transport,
    once there is one. meets: called with each view that it knows of, once it is set.
    """

    waits: PeerWaits | None = None

    def __init__(self, session: ControlSession, entry: Entry) -> None:
        self.meets: Callable[[View], None] | None = None
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

    def connection(self, seat: int, *, broken: bool) -> None:
        """What the network says of `seat`."""

    def lost(self, seat: int) -> bool:
        """Whether nothing of `seat` is taken any more."""
        return False

    def doubt(self, seat: int) -> None:
        """Nothing comes from `seat`, which is waited for: does the lighthouse hear it?"""
        self.send(Silent(seat))

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
        return decode(reply, limit=LONGEST)
    except ValueError as error:
        _LOG.warning("the lighthouse: %s", error)
        return None
