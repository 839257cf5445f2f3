"""Which method of `Membership` handles a worker's message, and which messages are refused."""

from __future__ import annotations

from typing import Any

from isles.comm.elastic.membership import Membership
from isles.comm.elastic.messages import MARGIN, Accusation, Ack, Beat, Delivered, Done, Leave, Reload
from isles.comm.elastic.orders import Order


class RoundsAssembly(Membership):
    """`Membership` behind the `Assembly` interface that a lighthouse drives."""

    def hear(self, now: float, seat: int, message: Any) -> list[Order] | None:
        """What a worker says; None where no worker says that. ValueError for what cannot be."""
        unfit(self, message)
        return call(self, now, seat, message)

    def about(self) -> tuple[int, int, int]:
        """(members, the newest round that anybody has begun, the last one or 0)."""
        return len(self.members()), self.newest_round, self.rules.last or 0


def unfit(membership: Membership, message: Any) -> None:
    """ValueError for a word about rounds or seats that cannot be: it would be kept, or others would follow it."""
    match message:
        case Ack(beat=beat) | (Beat() as beat):
            last = membership.rules.last
            rounds = [beat.round, *beat.skipped, *(round for _, round in beat.seen)]
            if not all(0 <= round <= (1 << 40 if last is None else last) for round in rounds):
                raise ValueError("a round that this run has not")
            if not all(seat in membership.workers for seat, _ in beat.seen):
                raise ValueError("the work of a seat that this run has not")
        case Done(round=round) | Accusation(round=round):
            if not 0 < round <= membership.newest_round + MARGIN or not 0 <= message.attempt < 1 << 20:
                raise ValueError("an answer of a round that nobody is in")


def call(membership: Membership, now: float, seat: int, message: Any) -> list[Order] | None:
    """The orders that follow from what `seat` says; None where no worker says that."""
    match message:
        case Beat():
            return membership.beat(now, seat, message)
        case Ack():
            return membership.ack(now, seat, message)
        case Done():
            return membership.done(now, seat, message)
        case Delivered():
            return membership.deliver(now, seat, message)
        case Accusation():
            return membership.accuse(now, seat, message)
        case Leave():
            return membership.leave(now, seat)
        case Reload():
            return membership.reload(now, seat)
    return None
