"""Which method of `Membership` handles a worker's message, and which messages are refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from isles.comm.elastic.membership import Membership
from isles.comm.elastic.messages import (
    MARGIN,
    Accusation,
    Ack,
    Beat,
    Delivered,
    Done,
    Leave,
    MemberNow,
    Reload,
    RunNow,
)
from isles.comm.elastic.orders import Order

_FAR, _LONGEST = 1 << 40, 1e6  # the last round of a run without an end; seconds of a step, or of a round


class RoundsAssembly(Membership):
    """`Membership` behind the `Assembly` interface that a lighthouse drives."""

    def hear(self, now: float, seat: int, message: Any) -> list[Order] | None:
        """What a worker says; None where no worker says that. ValueError for what cannot be."""
        unfit(self, message)
        match message:
            case Beat():
                return self.beat(now, seat, message)
            case Ack():
                return self.ack(now, seat, message)
            case Done():
                return self.done(now, seat, message)
            case Delivered():
                return self.deliver(now, seat, message)
            case Accusation():
                return self.accuse(now, seat, message)
            case Leave():
                return self.leave(now, seat)
            case Reload():
                return self.reload(now, seat)
        return None

    def about(self) -> tuple[int, int, int]:
        """(members, the newest round that anybody has begun, the last one or 0)."""
        return len(self.members()), self.newest_round, self.rules.last or 0

    def now(self, seen: Callable[[int], str], refused: Sequence[tuple[int, int, str, int]]) -> RunNow:
        """How the run stands, for a person. seen: the address of a seat. refused: see `RunNow`."""
        rows = tuple(
            MemberNow(one.seat, one.state, one.round, one.seconds, one.identity, seen(one.seat))
            for one in self.workers.here
        )
        view = -1 if self.view is None else self.view.number
        return RunNow(view, self.newest_round, self.last or 0, rows, tuple(refused))


def unfit(membership: Membership, message: Any) -> None:
    """ValueError for a word about rounds, seats, steps or seconds that cannot be: it would be kept, or others would
    follow it.
    """
    last, said = membership.rules.last or _FAR, getattr(message, "beat", message)
    seconds = said.seconds if isinstance(said, Beat | Delivered) else 0.0
    steps = said.steps if isinstance(said, Delivered) else 1
    if not 0 <= seconds <= _LONGEST or not 0 < steps <= last * membership.rules.sync_every:
        raise ValueError("seconds that no step takes, or steps that nobody can have done")
    match said:
        case Beat(round=round, skipped=skipped, seen=seen):
            if not all(0 <= one <= last for one in (round, *skipped, *(newest for _, newest in seen))):
                raise ValueError("a round that this run has not")
            if not all(seat in membership.workers for seat, _ in seen):
                raise ValueError("the work of a seat that this run has not")
        case Done() | Accusation() | Delivered():
            attempt, whose = getattr(said, "attempt", 0), getattr(said, "seat", None)
            if not 0 < said.round <= membership.newest_round + MARGIN or not 0 <= attempt < 1 << 20:
                raise ValueError("an answer of a round that nobody is in")
            if whose is not None and whose not in membership.workers:
                raise ValueError("the share of a seat that this run has not")
