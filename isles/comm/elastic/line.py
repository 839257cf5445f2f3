"""A worker's line to the lighthouse as its training thread sees it: what it may ask, and what was heard.

`company.Company` is such a line between processes, `comm.virtual.churn.company.VirtualCompany` on the virtual clock.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from isles.comm.elastic.ballot import Word
from isles.comm.elastic.member import Member, Standing
from isles.comm.elastic.messages import Examine, Load, Over
from isles.comm.view import View


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


class LighthouseLine(Protocol):
    """What the training thread may call; each is documented at `isles.comm.elastic.company.Company`."""

    seat: int
    member: Member
    ended: Over | Examine | None

    words: Words
    waited: float
    """Seconds for which the training thread has waited for words."""

    @property
    def is_over(self) -> bool: ...
    @property
    def has_answers(self) -> bool: ...
    @property
    def is_called(self) -> bool: ...
    def begin(self, round: int) -> View | None: ...
    def skip(self, round: int) -> None: ...
    def standing(self, round: int) -> Standing: ...
    def lost(self, seat: int) -> bool: ...
    def is_silent(self, seat: int) -> bool: ...
    def accepts(self, round: int, seats: Sequence[int]) -> bool: ...
    def landed(self, word: Word) -> None: ...
    def load(self, seconds: float) -> Load | None: ...
    def loaded(self, load: Load, round: int, left_out: Mapping[int, int]) -> None: ...
    def reload(self) -> None: ...
    def first(self, seconds: float, ahead: int = 0) -> int | None: ...
    def until(self) -> int | None: ...
    def left_out(self) -> dict[int, int]: ...
    def leaves_out(self, others: Mapping[int, int]) -> None: ...
    def pace(self, seconds: float) -> None: ...
    def leave(self) -> bool: ...
    def report(self, event: Mapping[str, Any]) -> None: ...
    def reported(self, seconds: float) -> None: ...
    def wait(self, over: Callable[[], bool], seconds: float) -> bool: ...
    def ask(self, message: Any, seconds: float = 3.0) -> Any: ...
    def say(self, message: Any) -> None: ...
