"""When a lighthouse saves the run's states (`run.checkpoint_every`)."""

from __future__ import annotations

import math

from isles.training.config.sections import RunConfig

RETAINED = 2
"""Steps or rounds whose states stay: a worker may still be fetching the older one."""
LEAST, MOST, PARTS = 60.0, 600.0, 20
"""With "auto": seconds between states are a `PARTS`th of the run, but `LEAST` to `MOST`."""
_NOTICE = 3.0  # seconds until all peers have heard that states are wanted


class StateSchedule:
    """Of the run `run`, from inner step `step` on. now: seconds of any clock."""

    def __init__(self, run: RunConfig, step: int, now: float) -> None:
        self._run = run
        self._first = self._saved = step, now

    def is_due(self, step: int, now: float) -> bool:
        """Whether to save a state now, after `step`."""
        every, (saved, at) = self._run.checkpoint_every, self._saved
        if step <= self._first[0]:  # waits for its first workers, or has begun again
            self._first = step, now
        if isinstance(every, int):
            return every > 0 and step // every > saved // every
        return step != saved and now - at >= self.period(step, now)

    def saved(self, step: int, now: float) -> None:
        """The state after `step` is saved, or asked for."""
        self._saved = step, now

    def period(self, step: int, now: float) -> float:
        """Seconds between states, by the pace so far."""
        return min(max(self._pace(step, now) * self._run.steps / PARTS, LEAST), MOST)

    def ahead(self, step: int, now: float) -> int:
        """The step that is done some seconds after `step`, once all have heard of it."""
        pace = self._pace(step, now)
        return step + 1 + math.ceil(_NOTICE / pace if pace else 0.0)

    def _pace(self, step: int, now: float) -> float:
        """Seconds of a step; 0: not known yet."""
        return (now - self._first[1]) / (step - self._first[0]) if step > self._first[0] else 0.0
