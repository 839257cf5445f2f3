"""The bytes of the device, granted strictly in the order in which they are asked for.

What is asked for first never waits for what comes later: fetching ahead cannot block what runs before it, and a plan
that fits without fetching ahead cannot deadlock.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable


class Arena:
    """`budget` bytes, of which `used` are taken; peak: the most that ever were. Safe among threads."""

    def __init__(self, budget: float, used: float = 0) -> None:
        self.budget, self.used, self.peak = budget, used, used
        self._asked: deque[tuple[float, Callable[[], None]]] = deque()
        self._granted: deque[Callable[[], None]] = deque()
        self._telling = False
        self._lock = threading.Lock()

    def want(self, nbytes: float, then: Callable[[], None]) -> None:
        """Call `then` once the bytes are granted: at once, or from a thread that frees what it waits for. These calls
        come one after the other, in the order of the grants, whichever threads ask and free: whoever is told that it
        has bytes may rely on those before it having been told.
        """
        with self._lock:
            self._asked.append((nbytes, then))
        self._grant()

    def free(self, nbytes: float) -> None:
        """Give bytes back."""
        if nbytes:
            with self._lock:
                self.used -= nbytes
            self._grant()

    def _grant(self) -> None:
        with self._lock:
            while self._asked and self.used + self._asked[0][0] <= self.budget:
                nbytes, then = self._asked.popleft()
                self.used += nbytes
                self.peak = max(self.peak, self.used)
                self._granted.append(then)
            if self._telling:  # a thread is at it, perhaps this one, and goes on until there is none
                return
            self._telling = True
        while (then := self._next()) is not None:
            try:
                then()
            except BaseException:
                with self._lock:
                    self._telling = False
                raise

    def _next(self) -> Callable[[], None] | None:
        with self._lock:
            self._telling = bool(self._granted)
            return self._granted.popleft() if self._granted else None
