"""A mean whose messages are reckoned, on the virtual clock: each member brings its share to a place where all of them
meet, and when the last one is there, all have the mean after the time that the messages would take. What N members send
each other is N² messages, too many to play for a thousand.

A ring of receives stands in for all the others: who waits for a lost neighbour hears of it at once, and all with it.
"""

from __future__ import annotations

from contextlib import suppress
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from isles.comm.call import Call
from isles.comm.collectives.averaging import Averaging
from isles.comm.collectives.basic import Stamp
from isles.comm.errors import CommError, PeerLost
from isles.comm.transport import AnyOf, Steps, WaitEvent
from isles.network.exchange_plan import MessagePattern

_RATE, _LATENCY, _WAYS = 50e6, 0.01, 3  # bits per second of an uplink, seconds of a way, ways of a mean one by one


class Place:
    """Where the members of one attempt meet."""

    def __init__(self) -> None:
        self.shares: dict[int, Tensor] = {}
        self.bells: dict[int, WaitEvent] = {}
        self.digests: set[int] = set()
        self.mean: Tensor | None = None
        self.error: CommError | None = None

    def ring(self, error: CommError | None = None) -> None:
        """For all who wait."""
        self.error = self.error or error
        for event in self.bells.values():
            event.set()


class MeetingPlaces:
    """By round, attempt and members; a place is forgotten with those of rounds long ago."""

    def __init__(self) -> None:
        self._places: dict[tuple[int, int, tuple[int, ...]], Place] = {}

    def of(self, call: Call) -> Place:
        """Where this call's members meet."""
        key = call.round or 0, call.attempt, call.group.ranks
        if key not in self._places:
            self._places = {other: place for other, place in self._places.items() if other[0] > key[0] - 4}
        return self._places.setdefault(key, Place())


class Reckoned(Averaging):
    """As `played`, but for its messages."""

    def __init__(self, played: Averaging, places: MeetingPlaces) -> None:
        self.played, self._places = played, places
        self.preserves_signs = played.preserves_signs
        self.sent_bytes = lru_cache(maxsize=64)(played.sent_bytes)  # type: ignore[method-assign]

    def pattern(self, round: int, size: int) -> MessagePattern:
        return self.played.pattern(round, size)

    def working_bytes(self, size: int) -> int:
        return self.played.working_bytes(size)

    def share(self, buffer: Tensor, round: int, fragment: int, member: int, out: Tensor) -> None:
        self.played.share(buffer, round, fragment, member, out)

    def mean(
        self, call: Call, buffer: Tensor, stamp: Stamp, own: Tensor | None, residual: Tensor | None, part: int
    ) -> Steps[tuple[int, ...]]:
        group = call.group
        if group.size == 1 or own is not None or residual is not None:
            return (yield from self.played.mean(call, buffer, stamp, own, residual, part))
        return (yield from self._met(call, buffer, stamp))

    def _met(self, call: Call, buffer: Tensor, stamp: Stamp) -> Steps[tuple[int, ...]]:
        group, place, transport = call.group, self._places.of(call), call.group.transport
        after, before = (group.rank + 1) % group.size, (group.rank - 1) % group.size
        neighbour = call.recv(after, torch.empty(1, dtype=torch.uint8))
        place.shares[group.rank], place.bells[group.rank] = buffer, transport.event()
        place.digests.add(stamp.digest)
        assert len(place.digests) == 1, "members with other anchors"
        try:
            if len(place.shares) == group.size:
                nbytes = self.sent_bytes(call.round or 0, group.size, 0)
                yield AnyOf([transport.event(8 * nbytes / _RATE + _WAYS * _LATENCY), neighbour])
                place.mean = torch.stack([place.shares[rank] for rank in sorted(place.shares)]).mean(0)
                place.ring()
            while place.mean is None and place.error is None:
                yield AnyOf([place.bells[group.rank], neighbour])
        except PeerLost as error:
            place.ring(error)
        if place.error is not None:
            raise PeerLost(getattr(place.error, "peer", -1), "it was lost while all met")
        assert place.mean is not None
        buffer.copy_(place.mean)
        with suppress(PeerLost):  # it has the mean, too, or will never need it
            yield [call.send(before, torch.zeros(1, dtype=torch.uint8))]
        return tuple(range(group.size))

    def state_dict(self) -> dict[str, Any]:
        return self.played.state_dict()
