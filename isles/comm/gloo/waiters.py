"""Threads that wait, so that nobody else has to.

torch.distributed offers no way to poll a gloo receive (`is_completed` stays False until somebody waits), and a wait
with a time-out closes every pair of the rank when it expires. So each posted message gets a thread that waits without
limit, and deadlines are kept elsewhere. Idle threads are reused; a thread stuck on a silent peer harms nobody until the
process ends. Then it must have ended before the interpreter does: one that wakes up meanwhile, in the middle of torch,
takes the process down (SIGABRT).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from queue import SimpleQueue

WaitingJob = Callable[[], Callable[[], None]]
"""Waits, and returns what then tells of it; neither raises."""


class Waiters:
    """A pool that never queues: a job gets an idle thread, or a new one."""

    def __init__(self) -> None:
        self._idle: list[SimpleQueue[WaitingJob | None]] = []
        self._threads: set[threading.Thread] = set()
        self._lock = threading.Lock()
        self._closed = False

    def submit(self, job: WaitingJob) -> None:
        """Run `job` on a thread of its own. It is idle again before anybody is told: who then has another job finds it,
        so there are never more threads than jobs have waited at once.
        """
        with self._lock:
            inbox = self._idle.pop() if self._idle else None
        if inbox is None:
            inbox = SimpleQueue()
            thread = threading.Thread(target=self._serve, args=(inbox,), name="isles-waiter", daemon=True)
            self._threads.add(thread)
            thread.start()
        inbox.put(job)

    def close(self, seconds: float) -> bool:
        """Let idle threads end, and busy ones after their job. True if all have ended within `seconds`."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for inbox in idle:
            inbox.put(None)
        ends_at = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(ends_at - time.monotonic(), 0.0))
        return not any(thread.is_alive() for thread in self._threads)

    def _serve(self, inbox: SimpleQueue[WaitingJob | None]) -> None:
        while (job := inbox.get()) is not None:
            tell = job()
            with self._lock:
                closed = self._closed
                if not closed:
                    self._idle.append(inbox)
            tell()
            del job, tell  # an idle thread keeps no message, and so no buffer, alive
            if closed:
                return
