"""Stop running workers after a common inner step.

Workers may be up to `sync_every` steps apart, and a worker that waits for a partner cannot reply. So the launcher first
pauses each worker at its next step boundary, and asks which step it may have reached. Every worker can still reach the
largest reply, with all exchanges before it. Then the launcher sends that step to all workers.

    worker's main thread    boundary(step) between steps; True: stop here
    its watcher thread      pause() -> bound, then stop_after(step)
"""

from __future__ import annotations

import threading
from collections.abc import Callable


class StopControl:
    """Pauses one worker process at a step boundary, and sets the step after which it stops."""

    def __init__(self) -> None:
        self._changed = threading.Condition()  # the worker's main thread waits, its watcher thread notifies
        self._step = 0
        self._is_paused = False
        self._last: int | None = None

    def boundary(self, step: int) -> bool:
        """Called by the worker after `step` steps. Waits while the worker is paused. True: it must stop here."""
        with self._changed:
            self._step = step
            while self._is_paused and self._last is None:
                # Without a bound: the watcher thread ends the process if the launcher is gone.
                self._changed.wait()
            return self._last is not None and step >= self._last

    def pause(self) -> int:
        """Pause the worker at its next boundary. Returns the most steps that it can have done by then."""
        with self._changed:
            # One more: the worker may have passed the boundary of `_step`, and holds only at the next one.
            self._is_paused = True
            return self._step + 1

    def stop_after(self, step: int) -> None:
        """Let the worker continue until `step` steps are done, and stop it there."""
        with self._changed:
            self._last = step
            self._changed.notify_all()


class LeaveControl:
    """Asks one worker to end. If it can leave, the others continue; otherwise all workers must stop."""

    def __init__(self, stop_all: Callable[[], None] = lambda: None) -> None:
        self._stop_all = stop_all
        self._leave = stop_all
        self.has_left = False
        """Whether the worker has ended before the others, so that its process need not wait for them."""

    def can(self, leave: Callable[[], None]) -> None:
        """Set the function to call, in any thread, when this worker is asked to end."""
        self._leave = leave

    def ask(self) -> None:
        """Ask this worker to end."""
        self._leave()

    def decline(self) -> None:
        """Ask all workers to stop, because the others cannot continue without this one."""
        self._stop_all()


class SharedStopControl:
    """`StopControl` for virtual workers, which are threads of the process that asks."""

    def __init__(self, workers: int) -> None:
        self._lock = threading.Lock()
        self._steps = [0] * workers
        self._last: int | None = None
        self._asked = False

    def ask(self) -> None:
        """Request a stop. Safe in a signal handler: it takes no lock, which the interrupted thread may hold."""
        self._asked = True

    def boundary(self, worker: int, step: int) -> bool:
        """See StopControl.boundary. The first call after the request sets the last step: one beyond the furthest."""
        with self._lock:
            self._steps[worker] = step
            if self._asked and self._last is None:
                self._last = max(self._steps) + 1
            return self._last is not None and step >= self._last
