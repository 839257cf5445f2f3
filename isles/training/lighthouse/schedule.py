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
        self._run, self._pace = run, 0.0  # seconds of a step; 0: not known yet
        self._first = self._saved = step, now

    def is_due(self, step: int, now: float) -> bool:
        """Whether to save a state now, after `step`; with "auto" by the pace so far."""
        every, (saved, at) = self._run.checkpoint_every, self._saved
        if step <= self._first[0]:  # waits for its first workers, or has begun again
            self._first = step, now
        first, began = self._first
        self._pace = (now - began) / (step - first) if step > first else 0.0
        if isinstance(every, int):
            return every > 0 and step // every > saved // every
        return step != saved and now - at >= min(max(self._pace * self._run.steps / PARTS, LEAST), MOST)

    def saved(self, step: int, now: float) -> None:
        """The state after `step` is saved, or asked for."""
        self._saved = step, now

    def ahead(self, step: int) -> int:
        """The step that is done some seconds after `step`, once all have heard of it."""
        return step + 1 + math.ceil(_NOTICE / self._pace if self._pace else 0.0)
