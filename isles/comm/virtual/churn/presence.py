"""Who speaks, on the virtual clock: known, where between processes it is heard."""

from __future__ import annotations

from collections.abc import Mapping

from typing_extensions import override

from isles.comm.elastic.guards.presence import Presence
from isles.comm.elastic.line import BEAT
from isles.comm.virtual.scheduler import Scheduler


class KnownPresence(Presence):
    """Whoever is not paused has just spoken; whoever is, half a beat before that. paused_at: when each was last."""

    def __init__(self, scheduler: Scheduler, paused_at: Mapping[int, float]) -> None:
        super().__init__()
        self._scheduler, self._paused_at = scheduler, paused_at

    @override
    def others_of(self, seat: int) -> list[int]:
        self._pass(self._scheduler.timeline.now)
        return super().others_of(seat)

    @override
    def _pass(self, at: float) -> None:
        self._now, workers = at, self._scheduler.workers
        for seat in self._heard:
            is_away = workers[seat].back(at) > at
            self._heard[seat] = self._paused_at.get(seat, at) - BEAT / 2 if is_away else at
