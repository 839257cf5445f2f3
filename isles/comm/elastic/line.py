"""What a worker's training thread asks of its line to the lighthouse: `company.Company` between processes, and one on
the virtual clock. And what it heard on it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from isles.comm.elastic.ballot import Word
from isles.comm.elastic.member import Member, Standing
from isles.comm.elastic.messages import Examine, Load, Over
from isles.comm.view import View


class Words:
    """The newest word on each round. Fed by whoever hears the lighthouse, under its lock."""

    def __init__(self) -> None:
        self._words: dict[int, Word] = {}

    def hear(self, word: Word) -> None:
        """One that comes late, or twice, changes nothing."""
        old = self._words.get(word.round)
        if old is None or (old.verdict != "land" and (word.verdict == "land" or word.attempt > old.attempt)):
            self._words[word.round] = word

    def newer(self, round: int, attempt: int) -> Word | None:
        """What was said of a round since that attempt of it."""
        word = self._words.get(round)
        return word if word is not None and (word.verdict == "land" or word.attempt > attempt) else None

    def of(self, round: int) -> Word | None:
        """The newest on a round."""
        return self._words.get(round)

    def forget_before(self, round: int) -> None:
        """Earlier rounds are over here."""
        self._words = {key: word for key, word in self._words.items() if key >= round}


class LighthouseLine(Protocol):
    """See `isles.comm.elastic.company.Company` for each."""

    seat: int
    member: Member
    ended: Over | Examine | None

    words: Words

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
    def accepts(self, round: int, seats: Sequence[int]) -> bool: ...
    def landed(self, word: Word) -> None: ...
    def load(self, seconds: float) -> Load | None: ...
    def loaded(self, load: Load, round: int, left_out: Mapping[int, int]) -> None: ...
    def reload(self) -> None: ...
    def first(self, seconds: float, ahead: int = 0) -> int | None: ...
    def until(self) -> int | None: ...
    def left_out(self) -> dict[int, int]: ...
    def pace(self, seconds: float) -> None: ...
    def leave(self) -> bool: ...
    def report(self, event: Mapping[str, Any]) -> None: ...
    def reported(self, seconds: float) -> None: ...
    def wait(self, over: Callable[[], bool], seconds: float) -> bool: ...
    def ask(self, message: Any, seconds: float = 3.0) -> Any: ...
    def say(self, message: Any) -> None: ...
