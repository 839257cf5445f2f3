"""Members that beat while their training stands still: the end of the run would wait for them for ever.

Who is in a round that others have left behind, and begins none for ten times its usual time, a minute at least, is
named. What it may wait for comes on top: another member's part; or validation, for the first of a view and in the last
round; the same in its first round, before which a model may be compiled. Where all stand still nobody is named.

Seconds are those in which the lighthouse looked: while it was held up itself nobody could be heard.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from statistics import median

from isles.comm.elastic.orders import Rules, Worker

_TIMES, _LEAST = 10, 60.0  # of the usual time of a round; seconds
_MOST = 10  # of all members' usual time, that one's own word is taken for
_LOOK = 1.0  # seconds from one look to the next that count, at most


class Stalls:
    """For a lighthouse that looks several times a second."""

    def __init__(self) -> None:
        self._looked_at, self._now = -math.inf, 0.0
        self._behind: dict[int, tuple[int, float]] = {}  # by seat: its round, and since when others are further

    def look(
        self, at: float, rules: Rules, members: Sequence[Worker], first: int, last: int | None, over: Collection[int]
    ) -> dict[int, float]:
        """Look, at a moment of any clock. first: the seat of the view that validates. over: who has done the last
        round. Seconds that each has stood still for that stands still.
        """
        self._now += min(at - self._looked_at, _LOOK)
        self._looked_at, now = at, self._now
        rounds = {one.seat: max(one.round, one.entered - 1) + (one.seat in over) for one in members}
        newest = max(rounds.values(), default=0)
        since = {seat: self._behind.get(seat, (-1, now)) for seat, round in rounds.items() if round < newest}
        self._behind = {seat: was if was[0] == rounds[seat] else (rounds[seat], now) for seat, was in since.items()}
        usual = median([one.seconds for one in members if one.seconds] or [math.inf])
        found = {}
        for one in (one for one in members if one.seat in self._behind):
            still = now - self._behind[one.seat][1]
            own = rules.sync_every * min(one.seconds or usual, _MOST * usual)
            is_busy = one.seat == first or rounds[one.seat] == last or one.round <= one.entered
            if still > max(_TIMES * own, _LEAST) + (rules.judges if is_busy else rules.waits):
                found[one.seat] = still
        return found
