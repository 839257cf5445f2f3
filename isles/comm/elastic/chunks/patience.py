"""How long a receipt is waited for until its chunk counts as lost: TCP's rule (RFC 6298), by bytes under way.

    load       bytes that are under way from this worker, to anybody, as a chunk leaves, its own included, and those
               that follow at once: a receipt waits behind what the peer sends meanwhile
    mean       of seconds per byte of load: 7/8 of what was known, 1/8 of the newest receipt's
    spread     of those around the mean: 3/4 of what was known, 1/4 of the newest receipt's
    patience   (2 mean + 4 spread) load, `SHORTEST` at least; twice as long after each chunk without a receipt, until
               one comes in time. Twice the mean, for the first chunk after a pause goes over a relay's two lines one
               after the other, where those behind it have both at once

A small message says nothing of a line's rate. While nothing does, the line counts as a very slow one: what is under way
is hardly ever lost without a word, and what is sent again on a slow line makes it slower still.
"""

from __future__ import annotations

import threading

SHORTEST = 2.0  # seconds
SLOWEST = 50e3  # bytes per second of a line of which nothing is known, where each end has 1 Mbit/s and it is relayed
_GUESS = 120.0  # seconds, at most, while nothing is known
_LONGEST = 600.0  # seconds
_TELLING = 1 << 18  # bytes of load that say how fast a line is; what a shaper lets pass at once is less
_CALMS = 0.9  # of a doubled patience is left after each receipt of a small message


class UnderWay:
    """Bytes under way from one worker. Safe to call from several threads."""

    def __init__(self) -> None:
        self._bytes, self._lock = 0, threading.Lock()

    def add(self, more: int) -> int:
        """So many more, or fewer; how many then."""
        with self._lock:
            self._bytes += more
            return self._bytes


class Patience:
    """With one peer. No clock: told what receipts took."""

    def __init__(self) -> None:
        self._mean: float | None = None
        self._spread = 0.0
        self._times = 1.0

    def seconds(self, load: int) -> float:
        """For a chunk that leaves now; load: bytes."""
        if self._mean is None:
            known = min(SHORTEST + load / SLOWEST, _GUESS)
        else:
            known = max((2 * self._mean + 4 * self._spread) * load, SHORTEST)
        return min(known * self._times, _LONGEST)

    def took(self, seconds: float, load: int) -> None:
        """A receipt came in time; load: bytes, as its chunk left."""
        if load < _TELLING:
            self._times = max(_CALMS * self._times, 1.0)
            return
        self._times = 1.0
        sample = seconds / load
        if self._mean is None:
            self._mean, self._spread = sample, sample / 2
        else:
            self._spread += (abs(sample - self._mean) - self._spread) / 4
            self._mean += (sample - self._mean) / 8

    def passed(self, load: int, seconds: float) -> None:
        """No receipt came within those `seconds`, which were the patience for `load`."""
        if seconds >= self.seconds(load):  # of several that were sent together one doubles it
            self._times *= 2 if seconds < _LONGEST else 1
