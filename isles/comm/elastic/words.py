"""What a worker has heard of rounds that all land together."""

from __future__ import annotations

from isles.comm.elastic.ballot import Word


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

    def forget_before(self, round: int) -> None:
        """Earlier rounds are over here."""
        self._words = {key: word for key, word in self._words.items() if key >= round}
