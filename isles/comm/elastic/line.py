"""A worker's line to the lighthouse as its training thread sees it: what it may ask, and what was heard.

`company.Company` is such a line between processes, `comm.virtual.churn.company.VirtualCompany` on the virtual clock.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from isles.comm.elastic.ballot import Word
from isles.comm.elastic.member import Member, Standing
from isles.comm.elastic.messages import Ack, Examine, Leave, Load, Over, Proposal, Refusal, Reload
from isles.comm.view import View

SOON = 0.2
"""Seconds until the next beat of a worker that waits for its first round, or for an answer before it begins one."""


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


class LighthouseLine(ABC):
    """The line of the worker in `seat`. lock: held while its `Member` is asked or changes.

    ended: set once this worker has no further part in the run: `Over`, or `Examine` where it is to judge the model.
    words: the newest word on each round. waited: seconds for which the training thread has waited here.
    """

    def __init__(self, seat: int, lock: AbstractContextManager[Any]) -> None:
        self.seat, self.member, self.words, self.waited = seat, Member(seat), Words(), 0.0
        self.ended: Over | Examine | None = None
        self._lock = lock
        self._load: Load | None = None
        self._training, self._answers = False, True

    @abstractmethod
    def poke(self) -> None:
        """Beat soon. Under the lock."""

    @property
    @abstractmethod
    def has_answers(self) -> bool:
        """Whether the lighthouse has been heard in the last seconds."""

    @abstractmethod
    def report(self, event: Mapping[str, Any]) -> None:
        """Have the lighthouse note a line of metrics or another event. Returns at once."""

    @abstractmethod
    def reported(self, seconds: float) -> None:
        """Wait until all reports have been taken, `seconds` at most."""

    @abstractmethod
    def wait(self, over: Callable[[], bool], seconds: float) -> bool:
        """Wait until `over`, asked whenever something has changed, is true, or for `seconds`; what it says then."""

    @abstractmethod
    def ask(self, message: Any, seconds: float = 3.0) -> Any:
        """The lighthouse's answer; None where none comes in time, or it has none. Not for the session's thread."""

    @abstractmethod
    def say(self, message: Any) -> None:
        """Send `message` to the lighthouse without waiting; a word on a round that it answers with is heard."""

    # The same on all lines

    def is_silent(self, seat: int) -> bool:
        """Whether `seat` gave no sign of life a moment ago: nobody waits for it now."""
        return False

    def pace(self, seconds: float) -> None:
        """Tell how many seconds an inner step takes here."""
        with self._lock:
            is_new, self.member.seconds = not self.member.seconds, seconds
            if is_new:
                self.poke()

    def take_in(self, message: Any) -> Ack | None:
        """Note an order of the lighthouse; the answer where it is a proposal. Under the lock."""
        match message:
            case Proposal():
                return self.member.proposed(message)
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
        return None

    def begin(self, round: int) -> View | None:
        """This worker is in `round` now; the view whose cell it reads, see `Member.begin`.

        Where rounds are shorter than a question to the lighthouse this waits for its answer, as long as it answers.
        """
        if self._answers and not self.wait(lambda: self.member.is_known(round) or self.is_over, SOON):
            self._answers = False
        with self._lock:
            view = self.member.begin(round)
            self._training = True
            self.poke()
        return view

    def skip(self, round: int) -> None:
        """This worker does no step of `round`, see `Member.skip`."""
        with self._lock:
            self.member.skip(round)
            self.poke()

    def standing(self, round: int) -> Standing:
        """Who takes part in the exchange of `round`."""
        with self._lock:
            return self.member.group(round)

    def lost(self, seat: int) -> bool:
        """Whether nothing of `seat` is taken any more."""
        with self._lock:
            return self.member.lost(seat)

    def accepts(self, round: int, seats: Sequence[int]) -> bool:
        """Whether the answer of a whole exchange may be used; those it came from count as seen."""
        with self._lock:
            return self.member.accept(round, seats)

    def landed(self, word: Word) -> None:
        """This worker has landed that round."""
        with self._lock:
            self.member.landed(word)
            self.words.forget_before(word.round)

    @property
    def is_over(self) -> bool:
        """Whether this worker has no part in the run now: it has ended, or another's state is to be loaded first."""
        return self.ended is not None or self.member.call != self.member.ready

    @property
    def is_called(self) -> bool:
        """Whether this worker is to begin with another's state, and has not got it yet."""
        with self._lock:
            return self.member.call != self.member.ready

    def load(self, seconds: float) -> Load | None:
        """Whose state to begin with, once the lighthouse says so; None where it does not within `seconds`."""
        with self._lock:
            self._training = False
            self.poke()
        self.wait(lambda: self._is_asked() or self.ended is not None, seconds)
        with self._lock:
            return self._load if self._is_asked() else None

    def _is_asked(self) -> bool:
        return self._load is not None and self._load.call > self.member.ready

    def loaded(self, load: Load, round: int, left_out: Mapping[int, int]) -> None:
        """The state that `load` named, of after `round`, is here."""
        with self._lock:
            self.member.loaded(load, round, left_out)
            self._load = None
            self.poke()

    def reload(self) -> None:
        """The state did not come: ask for another donor."""
        with self._lock:
            self._load = None
        self.ask(Reload())

    def first(self, seconds: float, ahead: int = 0) -> int | None:
        """The first round of this worker, once it is known; None where that takes more than `seconds`, or another state
        is to be loaded first. ahead: so many rounds before others are in it.
        """
        self.wait(lambda: self.member.first(ahead) is not None or self.is_over, seconds)
        with self._lock:
            return None if self.member.call != self.member.ready else self.member.first(ahead)

    def until(self) -> int | None:
        """The first round that goes on without this worker."""
        with self._lock:
            return self.member.until()

    def left_out(self) -> dict[int, int]:
        """Whom this worker knows to be left out, see `Member.left_out`; goes with its state to whoever takes that."""
        with self._lock:
            return dict(self.member.left_out)

    def leaves_out(self, others: Mapping[int, int]) -> None:
        """Add whom the donor of this worker's state knows to be left out: by seat, the newest view at that time."""
        with self._lock:
            self.member.left_out |= others

    def leave(self) -> bool:
        """Ask to leave with the next view; False where nobody is there to make one."""
        return self.ask(Leave()) is not None
