"""For how long the other side has said nothing."""

from __future__ import annotations

import time

BEAT = 2.0  # seconds between signs of life
_STOOD = 2.0  # seconds between two looks that count at most: beyond it this side stood still itself


class Silence:
    """For how long the other side has said nothing, as seen by one that looks often.

    seconds: after which it counts as lost. first: the same until its first word, for programs start slowly.
    """

    def __init__(self, seconds: float, first: float | None = None) -> None:
        self.seconds = seconds
        self._first: float | None = seconds if first is None else max(first, seconds)
        self._heard = self._looked = time.monotonic()
        self._longer = 0.0

    def heard(self) -> None:
        """Something came."""
        self._heard, self._first, self._longer = time.monotonic(), None, 0.0

    @property
    def has_heard(self) -> bool:
        """Whether anything ever came."""
        return self._first is None

    @property
    def limit(self) -> float:
        """Seconds after which it counts as lost now."""
        return self.seconds if self._first is None else self._first

    def over(self, longer: float = 0.0) -> bool:
        """A look: whether the silence exceeds the limit and `longer`: the largest in this silence, and at most the
        limit once more (the other side's kernel waits about as long as this one). What has come must be read first.
        """
        now = time.monotonic()
        self._heard = min(self._heard + max(now - self._looked - _STOOD, 0.0), now)
        self._looked = now
        self._longer = max(self._longer, min(longer, self.seconds))
        return now - self._heard > self.limit + self._longer
