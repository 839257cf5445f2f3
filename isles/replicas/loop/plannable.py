"""What a method of the outer loop says of a run before it runs: all of it follows from its parts and fragments."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from typing_extensions import override

from isles.base.staging import pinned_bytes
from isles.network.exchange_plan import PINNED, MemoryItem, PlannedExchange, Rhythm
from isles.replicas import start
from isles.replicas.config import rounds_for_momentum, uneven_fragments
from isles.replicas.exchange_schedule import landings, opening_exchanges, outer_memory, planned_rounds
from isles.replicas.loop.fragment import Fragment
from isles.replicas.loop.round_exchange import RoundExchange
from isles.replicas.loop.weights import weights_of
from isles.replicas.parts.choices import EveryH
from isles.replicas.parts.interfaces import Cadence, Composition
from isles.replicas.parts.legal import warnings
from isles.replicas.plannable import idle_low_rank, rounds_to_leave_behind
from isles.replicas.sync import ReplicaSync


class OuterForetold(ReplicaSync):
    """The part of `OuterSync`, whose attributes these are, that a plan asks."""

    parts: Composition
    cadence: Cadence
    fragments: list[Fragment]
    round_exchange: RoundExchange

    @override
    def schedule(self, steps: int) -> list[PlannedExchange]:
        return planned_rounds(self.parts, self.fragments, self.group.size, steps)

    @override
    def spread_bytes(self, steps: int) -> int:
        """A fragment after each landing, everything at the end."""
        return sum(self.replica.spread_bytes(places) for _, places in self.landings(steps))

    def landings(self, steps: int) -> list[tuple[int, Sequence[int]]]:
        """(moment, numbers of the parameters that are written to) of each landing, that of `finish` too."""
        landed = landings(self.schedule(steps), self.parts.cadence.rounds_late)
        return [*((at, self.fragments[index].indices) for at, index in landed), (steps + 1, self.everything)]

    @override
    def rhythm(self, steps: int) -> Rhythm:
        if not isinstance(self.cadence, EveryH):
            return super().rhythm(steps)
        dense = max(fragment.averaging.starting for fragment in self.fragments)
        return Rhythm(self.cadence.every_step_until + dense * self.cadence.sync_every, self.cadence.sync_every)

    @override
    def memory(self) -> list[MemoryItem]:
        outer = outer_memory(self.parts, self.fragments, self.group.size)
        pinned = sum(pinned_bytes(fragment.flat.parameters) for fragment in self.fragments)
        return [
            *super().memory(),
            *outer,
            MemoryItem(PINNED, pinned, "pinned"),
            *self.round_exchange.extra_memory(self.fragments),
        ]

    @override
    def opening_exchanges(self) -> list[PlannedExchange]:
        hashes = 2 if weights_of(self.config) == "equal" else 3  # numbers of samples are as long as one
        return opening_exchanges(start.bytes_by_format(self._shared()), self.group.size, hashes)

    @override
    def advise(self, steps: int) -> list[str]:
        rounds = _rounds(self.parts.cadence, steps)
        if not rounds:
            raise ValueError(f"sync_every: no exchange falls into a run of {steps} steps; choose sync_every <= {steps}")
        if self.parts.on_peer_failure == "solo":
            largest = max(fragment.flat.numel for fragment in self.fragments)
            rounds_to_leave_behind(rounds, len(self.fragments), largest)
        notices = super().advise(steps) + warnings(self.parts.choice) + idle_low_rank(self.parts.codec, self.shares)
        if isinstance(self.cadence, EveryH):
            notices += uneven_fragments(self.cadence.sync_every, len(self.fragments))
        return notices + rounds_for_momentum(rounds, self.parts.rule.momentum)


@lru_cache(maxsize=64)
def _rounds(cadence: Cadence, steps: int) -> int:  # which a plan asks again and again
    return sum(0 in cadence.sends(step) for step in range(1, steps + 1))
