"""Who serves which stage, and how that changes between two steps: a pure function of what all have agreed on.

    joins    who has asked to come gets the stage that it wishes, else the one that wants it most
    moves    else, once a period, one peer at most goes to another stage (`isles.pipeline.swarm.rebalancer`)
    rescue   a stage that nobody serves any more gets who has asked to come, else one of another stage, at once

Who changes its stage takes the weights and the state of one that serves it already, and joins in as soon as it has
them; the others wait for it at the end of the step at the latest.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

from isles.pipeline.swarm.rebalancer import PeerLoad, Rebalancer, rescuer, stage_for_joiner

NOWHERE = -1
"""The stage of who is not there: not yet, or not any more."""


class PeerStats(NamedTuple):
    """What a peer says of itself in the verdict on a step. square: of its gradient, as the bits of a double, as clock.
    counted: microbatches. nanoseconds: that it computed for one, 0 where it had none. queued: its mean queue, in
    thousandths.
    """

    holds: int
    square: int
    counted: int
    nanoseconds: int
    queued: int
    clock: int
    leaves: int

    @property
    def seconds(self) -> float:
        return self.nanoseconds / 1e9

    @property
    def queue(self) -> float:
        return self.queued / 1000


@dataclass(frozen=True, slots=True)
class StageChange:
    """`peer` serves stage `after` from the next step on. before: `NOWHERE` for one that comes."""

    peer: int
    before: int
    after: int


class StagePlacement:
    """stages: by position, which stage it serves, or `NOWHERE`. balance: who moves; what a sample costs at each stage,
    in any unit.
    """

    def __init__(self, stages: Sequence[int], balance: Rebalancer) -> None:
        self.stages, self.costs, self.balance = list(stages), balance.costs, balance
        self.wishes: dict[int, int] = {}
        """By who asks to come, the stage that it wishes to serve, or `NOWHERE`."""
        self.seconds: dict[int, float] = {}
        """By peer, what it was last measured to compute for a microbatch at its stage."""

    def measured(self, stats: Mapping[int, PeerStats]) -> None:
        """Remember what peers have said of themselves."""
        self.seconds |= {peer: each.seconds for peer, each in stats.items() if each.seconds}

    def cost(self, peer: int) -> float:
        """Seconds that `peer` is taken to need for a microbatch at its stage: as measured, or as its stage's others,
        or as other stages' by what a sample costs there.
        """
        if peer in self.seconds:
            return self.seconds[peer]
        here = self.stages[peer]
        alike = [seconds for other, seconds in self.seconds.items() if self.stages[other] == here]
        any_unit = [seconds / self.costs[self.stages[other]] for other, seconds in self.seconds.items()]
        if alike:
            return median(alike)
        return median(any_unit) * self.costs[here] if any_unit else self.costs[here]

    def change(
        self, now: float, members: Collection[int], stats: Mapping[int, PeerStats], asking: Sequence[int]
    ) -> list[StageChange]:
        """Of the next step. now: seconds that all agree on; asking: who wants to come."""
        loads = self._loads(members, {peer: each.queue for peer, each in stats.items()})
        changes = [self._come(peer, loads, self.wishes.get(peer, NOWHERE)) for peer in asking]
        if not changes and (move := self.balance.move(now, loads)) is not None:
            changes.append(StageChange(move.peer, self.stages[move.peer], move.to))
        return changes

    def rescue(self, members: Collection[int], asking: Sequence[int], lost: Sequence[int]) -> list[StageChange]:
        """Who goes to the stages `lost`, which no member serves any more, as far as there is anybody. What is left of
        `asking` comes some other time.
        """
        loads = self._loads(members, {})
        changes = [self._come(peer, loads) for peer, _ in zip(asking, lost, strict=False)]
        for stage in lost[len(changes) :]:
            move = rescuer(loads, self.costs, stage)
            if move is None:
                break
            load = loads[move.peer]
            rate = load.rate * self.costs[load.stage] / self.costs[stage]
            loads[move.peer] = PeerLoad(stage, 0.0, rate)
            changes.append(StageChange(move.peer, load.stage, stage))
        return changes

    def _loads(self, members: Collection[int], queues: Mapping[int, float]) -> dict[int, PeerLoad]:
        for lost_peer in set(self.seconds) - set(members):
            del self.seconds[lost_peer]
        return {
            peer: PeerLoad(self.stages[peer], queues.get(peer, 0.0), 1.0 / self.cost(peer)) for peer in sorted(members)
        }

    def _come(self, peer: int, loads: dict[int, PeerLoad], wish: int = NOWHERE) -> StageChange:
        """Where one that comes wishes to go, or is wanted most; it is among `loads` from then on."""
        stage = wish if 0 <= wish < len(self.costs) else stage_for_joiner(loads, len(self.costs))
        mean = sum(load.rate * self.costs[load.stage] for load in loads.values()) / len(loads)
        queue = min((load.queue for load in loads.values() if load.stage == stage), default=0.0)
        loads[peer] = PeerLoad(stage, queue, mean / self.costs[stage])
        return StageChange(peer, NOWHERE, stage)

    def apply(self, changes: Sequence[StageChange]) -> None:
        for change in changes:
            if change.before != NOWHERE and change.peer in self.seconds:
                self.seconds[change.peer] *= self.costs[change.after] / self.costs[change.before]
            self.stages[change.peer] = change.after

    def state_dict(self) -> dict[str, Any]:
        seconds = {str(peer): seconds for peer, seconds in self.seconds.items()}
        return {"stages": list(self.stages), "seconds": seconds, "next_look": self.balance.next_look}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.stages[:] = state["stages"]
        self.seconds = {int(peer): seconds for peer, seconds in state["seconds"].items()}
        self.balance.next_look = state["next_look"]


def origins(todo: Sequence[int], seconds: Mapping[int, float]) -> dict[int, list[int]]:
    """Who begins which of the microbatches `todo`, so that origins of such seconds a microbatch end together."""
    assigned: dict[int, list[int]] = {peer: [] for peer in sorted(seconds)}
    for microbatch in todo:
        peer = min(assigned, key=lambda peer: ((len(assigned[peer]) + 1) * seconds[peer], peer))
        assigned[peer].append(microbatch)
    return assigned
