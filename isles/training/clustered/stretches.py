"""Where the stretches of a run in clusters end: all nodes are drained there, at the same step."""

from __future__ import annotations

from dataclasses import dataclass

from isles.training.config.sections import RunConfig

LONGEST = 200
"""Updates after which a cluster drains to hear whether it should stop."""


@dataclass(frozen=True)
class Stretches:
    """every: updates between averages; 0: there are none. judges: whether text was kept for validation."""

    run: RunConfig
    every: int
    judges: bool

    def until(self, step: int) -> int:
        """The update after which the stretch behind `step` ends."""
        run = self.run
        marks = [
            (step // every + 1) * every for every in (self.every, run.validate_every, run.checkpoint_every) if every
        ]
        return min([*marks, step + LONGEST, run.steps])

    def averages(self, step: int) -> bool:
        """Whether clusters average there."""
        return bool(self.every) and (step % self.every == 0 or step == self.run.steps)

    def validates(self, step: int) -> bool:
        """Whether clusters judge there; at the end they do so anyway."""
        every = self.run.validate_every
        return self.judges and bool(every) and step % every == 0 and step != self.run.steps

    def settles(self, step: int) -> bool:
        """Whether all agree on who is left there, though they do not average: who judges must know of losses."""
        every = self.run.validate_every
        return bool(self.every) and not self.averages(step) and self.judges and every > 0 and step % every == 0
