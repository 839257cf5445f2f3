"""When fragments are sent and land."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EveryH:
    """The whole model, every `sync_every` inner steps, landing at once: the workers wait for the answer."""

    sync_every: int
    fragments: int = 1

    def sends(self, step: int) -> tuple[int, ...]:
        """See Cadence.sends."""
        return (0,) if step % self.sync_every == 0 else ()

    def lands(self, sent: int) -> int:
        """See Cadence.lands."""
        return sent
