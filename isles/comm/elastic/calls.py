"""Which call of `Membership` a worker's word is."""

from __future__ import annotations

from typing import Any

from isles.comm.elastic.membership import Membership
from isles.comm.elastic.messages import Accusation, Ack, Beat, Done, Leave, Reload
from isles.comm.elastic.orders import Order


def call(membership: Membership, now: float, seat: int, message: Any) -> list[Order] | None:
    """The orders that follow from what `seat` says; None where no worker says that."""
    match message:
        case Beat():
            return membership.beat(now, seat, message)
        case Ack():
            return membership.ack(now, seat, message)
        case Done():
            return membership.done(now, seat, message)
        case Accusation():
            return membership.accuse(now, seat, message)
        case Leave():
            return membership.leave(now, seat)
        case Reload():
            return membership.reload(now, seat)
    return None
