"""How long who is late may take until a mean is taken without it: never so long that somebody's next exchange waits.

A member that has delivered is at its next exchange one round later. By then the exchange of this one must be over, so
the grace ends a round after the first delivery at the latest, less what the last exchange has taken and some more; and
a quarter of a round after a quorum is there, for what is landed late is learned from late. Not after the first one:
a member that is far ahead of the others, as a newcomer may be, would have them all come too late.
"""

from __future__ import annotations

_SHARE, _SPARE = 0.25, 1.25  # of a round, once a quorum is there; of the time of an exchange
_LEAST = 0.02  # of a round: words take their time, too


class Graces:
    """By round, when it ends. Seconds of the clock that calls come with."""

    def __init__(self) -> None:
        self._ends: dict[int, float] = {}
        self._shares: dict[int, float] = {}  # seconds that remain once a quorum is there, while it is not
        self._began: dict[int, float] = {}
        self._exchange = 0.0  # seconds that the last one took

    def delivered(self, now: float, round: int, seconds: float) -> None:
        """A member has delivered, whose next round takes so long; 0: nobody knows."""
        if seconds <= 0:
            return
        end = now + max(seconds - _SPARE * self._exchange, _LEAST * seconds)
        if round not in self._ends:
            self._shares[round] = _SHARE * seconds
        self._ends[round] = min(self._ends.get(round, end), end)

    def enough(self, now: float, round: int) -> None:
        """So many have delivered by now that they are a quorum; said again, it changes nothing."""
        share = self._shares.pop(round, None)
        if share is not None:
            self._ends[round] = min(self._ends[round], now + share)

    def exchanging(self, now: float, round: int) -> None:
        """The exchange of `round` begins, or begins again: what the last attempt takes is what the next one will."""
        self._ends.pop(round, None)
        self._shares.pop(round, None)
        self._began[round] = now

    def landed(self, now: float, round: int) -> None:
        """The exchange of `round` is over: how long it took is known."""
        self._exchange = now - self._began.pop(round, now)
        self._began = {other: at for other, at in self._began.items() if other > round}
        self._ends = {other: at for other, at in self._ends.items() if other > round}
        self._shares = {other: share for other, share in self._shares.items() if other > round}

    def over(self, now: float) -> set[int]:
        """Rounds whose grace is over."""
        return {round for round, end in self._ends.items() if end <= now}

    @property
    def next(self) -> float | None:
        """When the next one ends."""
        return min(self._ends.values(), default=None)
