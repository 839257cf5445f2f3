"""Who speaks, and for whom one waits in vain, on the virtual clock: known, where between processes it is heard."""

from __future__ import annotations

from collections.abc import Mapping

from typing_extensions import override

from isles.comm.elastic.ballot import Word
from isles.comm.elastic.guards.presence import Presence
from isles.comm.elastic.line import BEAT
from isles.comm.elastic.told import MemberListener
from isles.comm.errors import PeerLost, PeerSilent
from isles.comm.tags import Tag
from isles.comm.virtual.scheduler import Scheduler
from isles.comm.virtual.wire import VirtualWire


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


class VirtualListener(MemberListener):
    """Ends what the worker in `seat` waits for in vain."""

    def __init__(self, wire: VirtualWire, seat: int) -> None:
        self._wire, self._seat = wire, seat

    @override
    def left_behind(self, seat: int) -> None:
        self._give_up(seat, PeerLost(seat, "a view without it is on its way"))

    @override
    def fell_silent(self, seat: int) -> None:
        self._give_up(seat, PeerSilent(seat))

    @override
    def begun_again(self, word: Word) -> None:
        self._wire.again(self._seat, Tag("outer", word.round, attempt=word.attempt))

    def _give_up(self, seat: int, why: PeerLost) -> None:
        self._wire.end(self._seat, lambda peer, _: peer == seat, lambda _: why)
