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
        self._requested: deque[tuple[float, Callable[[], None]]] = deque()
        self._granted: deque[Callable[[], None]] = deque()
        self._notifying = False
        self._lock = threading.Lock()

    def want(self, nbytes: float, then: Callable[[], None]) -> None:
        """Call `then` once the bytes are granted: at once, or from a thread that frees what it waits for. These calls
        come one after the other, in the order of the grants, whichever threads ask and free: a callback may rely on
        those of earlier grants having run.
        """
        with self._lock:
            self._requested.append((nbytes, then))
        self._grant()

    def free(self, nbytes: float) -> None:
        if nbytes:
            with self._lock:
                self.used -= nbytes
            self._grant()

    def _grant(self) -> None:
        # Callbacks run outside the lock, for they may ask and free themselves; one thread runs them, in their order.
        with self._lock:
            while self._requested and self.used + self._requested[0][0] <= self.budget:
                nbytes, then = self._requested.popleft()
                self.used += nbytes
                self.peak = max(self.peak, self.used)
                self._granted.append(then)
            if self._notifying:  # a thread, perhaps this one, runs callbacks until none is left
                return
            self._notifying = True
        while (then := self._next()) is not None:
            try:
                then()
            except BaseException:
                with self._lock:
                    self._notifying = False
                raise

    def _next(self) -> Callable[[], None] | None:
        with self._lock:
            self._notifying = bool(self._granted)
            return self._granted.popleft() if self._granted else None
