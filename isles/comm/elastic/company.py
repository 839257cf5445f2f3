"""A worker's line to the lighthouse.

    beats       from a thread of its own, every second and at the start of each round, one at a time
    told        what the lighthouse pushes (proposals, views, words on rounds), in the session's thread
    reports     lines of metrics, in order; kept while the lighthouse is away

Everything else is called by the training thread, and never waits for the lighthouse longer than it says. One lock
guards the `Member`, the state machine that all three threads share.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from isles.comm.elastic.ballot import Word
from isles.comm.elastic.keys import ASKED, REPORTED, signature, told_at
from isles.comm.elastic.line import Words
from isles.comm.elastic.links.reports import Reports
from isles.comm.elastic.member import Member, Standing
from isles.comm.elastic.messages import (
    Ack,
    BeatReply,
    Entry,
    Examine,
    Failed,
    Leave,
    Load,
    Over,
    Proposal,
    Refusal,
    Reload,
    Silent,
    decode,
    encode,
)
from isles.comm.elastic.session import IncomingQuery, Session
from isles.comm.elastic.told import LONGEST, Orders
from isles.comm.view import View

_LOG = logging.getLogger(__name__)
_BEAT, _SOON = 1.0, 0.2  # seconds between beats; while this worker waits for its first round
_PATIENCE = 3.0  # seconds for an answer
_QUIET = 3.0  # seconds for which nobody waits for one that is said to be silent


class Company:
    """The line of the worker in the seat of `entry`; implements `LighthouseLine`.

    ended: set once this worker has no further part in the run: `Over`, or `Examine` where it is to judge the model.
    words: the newest word on each round. waited: seconds for which the training thread has waited here.
    """

    def __init__(self, session: Session, entry: Entry) -> None:
        self.seat = entry.seat
        self.member = Member(entry.seat)
        self.ended: Over | Examine | None = None
        self._session, self._entry = session, entry
        self._changed = threading.Condition(threading.RLock())
        self._load: Load | None = None
        self.words = Words()
        self._answered_at = -math.inf
        self._training = self._answers = False
        self._poked = self._closed = False
        self.waited = 0.0
        self.left_behind: Callable[[int], None] = lambda seat: None
        """Called with a seat once a view without it is on its way, though it did not ask to leave."""
        self._given_up: frozenset[int] = frozenset()
        self.fell_silent: Callable[[int], None] = lambda seat: None
        """Called with a seat that gives no sign of life, in the session's thread."""
        self._silent: dict[int, float] = {}  # until when
        self.begun_again: Callable[[Word], None] = lambda word: None
        """Called with the word on another attempt, in the session's thread."""
        self.failed: Callable[[int, int], None] = lambda round, attempt: None
        """Called with (round, attempt) of which another worker of this island has no answer, likewise."""
        self._reports = Reports(lambda line: self.ask(line, key=REPORTED) is not None)
        self._orders = Orders(session, entry, 0)
        session.serve(told_at(entry.seat, 0), self._told)
        self._thread = threading.Thread(target=self._beat_on, name="isles-beats", daemon=True)
        self._thread.start()

    # What the training thread asks

    def begin(self, round: int) -> View | None:
        """This worker is in `round` now; the view whose cell it reads, see `Member.begin`.

        Where rounds are shorter than a question to the lighthouse this waits for its answer, as long as it answers.
        """
        with self._changed:
            if self._answers and not self._changed.wait_for(lambda: self._may_begin(round), _SOON):
                self._answers = False
            view = self.member.begin(round)
            self._training = True
            self._poke()
        return view

    def _may_begin(self, round: int) -> bool:
        return self.member.is_known(round) or self.member.call != self.member.ready or self.ended is not None

    def skip(self, round: int) -> None:
        """This worker does no step of `round`, see `Member.skip`."""
        with self._changed:
            self.member.skip(round)
            self._poke()

    def standing(self, round: int) -> Standing:
        """Who takes part in the exchange of `round`."""
        with self._changed:
            return self.member.group(round)

    def lost(self, seat: int) -> bool:
        """Whether nothing of `seat` is taken any more."""
        with self._changed:
            return self.member.lost(seat)

    def is_silent(self, seat: int) -> bool:
        """Whether `seat` gave no sign of life a moment ago: nobody waits for it now."""
        return time.monotonic() < self._silent.get(seat, 0.0)

    def doubt(self, seat: int) -> None:
        """Nothing comes from `seat`, which is waited for: does the lighthouse hear it?"""
        self.say(Silent(seat))

    def accepts(self, round: int, seats: Sequence[int]) -> bool:
        """Whether the answer of a whole exchange may be used; those it came from count as seen."""
        with self._changed:
            return self.member.accept(round, seats)

    def landed(self, word: Word) -> None:
        """This worker has landed that round."""
        with self._changed:
            self.member.landed(word)
            self.words.forget_before(word.round)

    @property
    def is_over(self) -> bool:
        """Whether this worker has no part in the run now: it has ended, or another's state is to be loaded first."""
        return self.ended is not None or self.member.call != self.member.ready

    @property
    def has_answers(self) -> bool:
        """Whether the lighthouse has been heard in the last seconds."""
        return time.monotonic() - self._answered_at < _PATIENCE

    def connection(self, seat: int, *, broken: bool) -> None:
        """What the network says of `seat`."""
        with self._changed:
            self.member.connection(seat, broken=broken)
            self._changed.notify_all()

    @property
    def is_called(self) -> bool:
        """Whether this worker is to begin with another's state, and has not got it yet."""
        with self._changed:
            return self.member.call != self.member.ready

    def load(self, seconds: float) -> Load | None:
        """Whose state to begin with, once the lighthouse says so; None where it does not within `seconds`."""
        with self._changed:
            self._training = False
            self._poke()
            self._changed.wait_for(lambda: self._is_asked() or self.ended is not None, seconds)
            return self._load if self._is_asked() else None

    def _is_asked(self) -> bool:
        return self._load is not None and self._load.call > self.member.ready

    def loaded(self, load: Load, round: int, left_out: Mapping[int, int]) -> None:
        """The state that `load` named, of after `round`, is here."""
        with self._changed:
            self.member.loaded(load, round, left_out)
            self._load = None
            self._poke()

    def reload(self) -> None:
        """The state did not come: ask for another donor."""
        with self._changed:
            self._load = None
        self.ask(Reload())

    def first(self, seconds: float, ahead: int = 0) -> int | None:
        """The first round of this worker, once it is known; None where that takes more than `seconds`, or another state
        is to be loaded first. ahead: so many rounds before others are in it.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self.member.first(ahead) is not None or self.is_called or self.ended is not None, seconds
            )
            return None if self.is_called else self.member.first(ahead)

    def until(self) -> int | None:
        """The first round that goes on without this worker."""
        with self._changed:
            return self.member.until()

    def left_out(self) -> dict[int, int]:
        """Whom this worker knows to be left out, see `Member.left_out`; goes with its state to whoever takes that."""
        with self._changed:
            return dict(self.member.left_out)

    def leaves_out(self, others: Mapping[int, int]) -> None:
        """Add whom the donor of this worker's state knows to be left out: by seat, the newest view at that time."""
        with self._changed:
            self.member.left_out |= others

    def pace(self, seconds: float) -> None:
        """Tell how many seconds an inner step takes here."""
        with self._changed:
            self.member.seconds = seconds

    def leave(self) -> bool:
        """Ask to leave with the next view; False where nobody is there to make one."""
        return self.ask(Leave()) is not None

    def report(self, event: Mapping[str, Any]) -> None:
        """Have the lighthouse note a line of metrics or another event. Returns at once."""
        self._reports.add(event)

    def reported(self, seconds: float) -> None:
        """Wait until all reports have been taken, `seconds` at most."""
        self._reports.settle(seconds)

    def wait(self, over: Callable[[], bool], seconds: float) -> bool:
        """Wait until `over`, asked whenever something has changed, is true, or for `seconds`; what it says then."""
        began = time.monotonic()
        with self._changed:
            is_over = self._changed.wait_for(over, seconds)
            self.waited += time.monotonic() - began
        return is_over

    def ask(self, message: Any, seconds: float = _PATIENCE, key: str = ASKED) -> Any:
        """The lighthouse's answer; None where none comes in time, or it has none. Not for the session's thread."""
        return ask(self._session, self._entry, message, seconds, key)

    def close(self) -> None:
        """End the threads. Safe to call twice."""
        with self._changed:
            self._closed = True
            self._poke()
        self._reports.close()
        self._thread.join(_PATIENCE + 2.0)

    # Threads

    def _poke(self) -> None:
        self._poked = True
        self._changed.notify_all()

    def _beat_on(self) -> None:
        while True:
            with self._changed:
                if self._closed:
                    return
                self._poked = False
                beat = self.member.beat()
            began = time.monotonic()
            answer, ack = self.ask(beat), None
            with self._changed:
                if isinstance(answer, BeatReply):
                    self._answers, self._answered_at = True, time.monotonic()
                    ack = self.member.answered(beat, answer)
                elif isinstance(answer, Refusal):
                    self.ended = self.ended or Over(answer.reason)
                self._changed.notify_all()
            self._give_up()
            if ack is not None:
                self.ask(ack)
            with self._changed:
                pause = (_BEAT if self._training else _SOON) - (time.monotonic() - began)
                self._changed.wait_for(lambda: self._poked or self._closed, max(pause, 0.01))

    def _give_up(self) -> None:
        """Call `left_behind` for each seat that a view on its way goes on without."""
        with self._changed:
            before, self._given_up = self._given_up, self.member.given_up()
            new = self._given_up - before
        for seat in new:
            self.left_behind(seat)

    def _told(self, query: IncomingQuery) -> None:
        """Take in an order of the lighthouse. In the session's thread, so nothing here waits."""
        message = self._orders.take(query)
        if message is None:
            return
        if isinstance(message, Silent):
            self._note_silent(message.seat)
            return
        if isinstance(message, Failed):
            self.failed(message.round, message.attempt)
            return
        ack = self._take_in(message)
        self._give_up()
        if isinstance(message, Word):
            self.begun_again(message)
        if ack is not None:
            self.say(ack)

    def _note_silent(self, seat: int) -> None:
        now = time.monotonic()
        self._silent = {other: end for other, end in self._silent.items() if end > now} | {seat: now + _QUIET}
        self.fell_silent(seat)

    def _take_in(self, message: Any) -> Ack | None:
        """Note an order of the lighthouse; the answer where it is a proposal."""
        ack = None
        with self._changed:
            if message == self._load:  # said again: another beat would only have it said once more
                return None
            match message:
                case Proposal():
                    ack = self.member.proposed(message)
                case View():
                    self.member.told(message)
                case Load():
                    self._load = message
                    self.member.call = max(self.member.call, message.call)
                case Word():
                    self.words.hear(message)
                case Over() | Examine():
                    self.ended = message
                case Refusal(reason=reason):
                    self.ended = Over(reason)
            self._poke()
        return ack

    def say(self, message: Any) -> None:
        """Send `message` to the lighthouse without waiting; a word on a round that it answers with is heard."""

        def answered(reply: bytes | None, refusal: bytes | None) -> None:
            try:
                word = decode(reply, limit=LONGEST) if reply else None
            except ValueError as error:
                _LOG.warning("the lighthouse: %s", error)
                return
            if isinstance(word, Word):
                with self._changed:
                    self.words.hear(word)
                    self._changed.notify_all()

        said = encode(message)
        word = signature(self._entry.seat, self._entry.key, ASKED, said)
        try:
            self._session.ask(ASKED, said, answered, attachment=word, seconds=_PATIENCE, urgent=True)
        except OSError:
            _LOG.debug("the session is closed")


def ask(session: Session, entry: Entry, message: Any, seconds: float = _PATIENCE, key: str = ASKED) -> Any:
    """What the lighthouse answers to `message` of the seat of `entry`; see `Company.ask`."""
    said = message if isinstance(message, bytes) else encode(message)
    word = signature(entry.seat, entry.key, key, said)
    try:
        reply, _ = session.answer(key, said, attachment=word, seconds=seconds, urgent=True)
    except OSError:
        return None
    if not reply:
        return None if reply is None else True
    try:
        return decode(reply, limit=LONGEST)
    except ValueError as error:
        _LOG.warning("the lighthouse: %s", error)
        return None
