"""When fragments are sent and land."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class EveryH:
    """Each of `fragments` fragments every `sync_every` inner steps (H), spread over the round; fragment q has the
    offset t_q = round(q H / fragments), half to even.

    first_sync: "full_window": a fragment is sent first when it has had H steps; "offset": already at step t_q, where
    that is not 0. overlap_steps (tau): inner steps between sending and landing. rounds_late (d): instead, a fragment
    lands when it is sent for the d-th time after; what is sent first lands d rounds later. every_step_until: up to this
    inner step all fragments are sent after each. origin: the inner step that rounds are counted from.
    """

    sync_every: int
    fragments: int = 1
    overlap_steps: int = 0
    rounds_late: int = 0
    first_sync: str = "full_window"
    every_step_until: int = 0
    origin: int = 0

    @property
    def name(self) -> str:
        """What `legal.AXES` calls it."""
        if self.rounds_late:
            return "one_round" if self.rounds_late == 1 else "more_rounds"
        return "overlap" if self.overlap_steps else "fragments" if self.fragments > 1 else "every_h"

    @cached_property
    def _offsets(self) -> tuple[int, ...]:
        return tuple(round(q * self.sync_every / self.fragments) for q in range(self.fragments))

    def sends(self, step: int) -> tuple[int, ...]:
        if step <= self.every_step_until:
            return tuple(range(self.fragments))
        step -= self.origin
        late = step < self.sync_every and self.first_sync == "full_window"
        return tuple(q for q, offset in enumerate(self._offsets) if not late and (step - offset) % self.sync_every == 0)

    def lands(self, sent: int) -> int:
        return sent + self.overlap_steps + self.rounds_late * self.sync_every
