"""How long who is late may take until a mean is taken without it: never so long that somebody's next exchange waits.

A member that has delivered is at its next exchange one round later. By then the exchange of this one must be over, so
the grace ends a round after the first delivery at the latest, less what the last exchange has taken and some more; and
after a quarter of a round, for what is landed late is learned from late.
"""

from __future__ import annotations

_SHARE, _SPARE = 0.25, 1.25  # of a round; of the time of an exchange
_LEAST = 0.02  # of a round: words take their time, too


class Graces:
    """By round, when it ends. Seconds of the clock that calls come with."""

    def __init__(self) -> None:
        self._ends: dict[int, float] = {}
        self._began: dict[int, float] = {}
        self._exchange = 0.0  # seconds that the last one took

    def delivered(self, now: float, round: int, seconds: float) -> None:
        """A member has delivered, whose next round takes so long; 0: nobody knows."""
        if seconds <= 0:
            return
        grace = max(min(_SHARE * seconds, seconds - _SPARE * self._exchange), _LEAST * seconds)
        self._ends[round] = min(self._ends.get(round, now + grace), now + grace)

    def exchanging(self, now: float, round: int) -> None:
        """The exchange of `round` begins, for the first time or again."""
        self._ends.pop(round, None)
        self._began.setdefault(round, now)

    def landed(self, now: float, round: int) -> None:
        """It is over."""
        self._exchange = now - self._began.pop(round, now)
        self._began = {other: at for other, at in self._began.items() if other > round}
        self._ends = {other: at for other, at in self._ends.items() if other > round}

    def over(self, now: float) -> set[int]:
        """Rounds whose grace is over."""
        return {round for round, end in self._ends.items() if end <= now}

    @property
    def next(self) -> float | None:
        """When the next one ends."""
        return min(self._ends.values(), default=None)
