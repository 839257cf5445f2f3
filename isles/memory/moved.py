"""How many bytes went over each lane."""

from __future__ import annotations

import threading
from collections import Counter


class MovedBytes:
    """Counts of any thread. moved: by lane. stayed: what did not go over the lane, because a slot was granted for its
    next use before the last one had ended; with it, a step moves what its plan says.
    """

    def __init__(self) -> None:
        self._moved, self._stayed = Counter[str](), Counter[str]()
        self._lock = threading.Lock()

    def add(self, lane: str, nbytes: int) -> None:
        """These go over the lane."""
        with self._lock:
            self._moved[lane] += nbytes

    def stay(self, lane: str, nbytes: int) -> None:
        """These need not."""
        with self._lock:
            self._stayed[lane] += nbytes

    @property
    def moved(self) -> dict[str, int]:
        return {lane: self._moved[lane] for lane in ("up", "down")}

    @property
    def stayed(self) -> dict[str, int]:
        return {lane: self._stayed[lane] for lane in ("up", "read")}
