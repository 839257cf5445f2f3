"""Who serves which stage, and how that changes between two steps: a pure function of what all have agreed on.

    joins    who has asked to come gets the stage that wants it most
    moves    else, once a period, one peer at most goes to another stage (`isles.pipeline.swarm.rebalancer`)

Who changes its stage takes the weights and the state of one that serves it already, and joins in as soon as it has
them; the others wait for it at the end of the step at the latest.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

from isles.pipeline.swarm.rebalancer import PeerLoad, Rebalancer, stage_for_joiner

NOWHERE = -1
"""The stage of who is not there: not yet, or not any more."""


class PeerTold(NamedTuple):
    """Of one peer in a step: the seconds that it computed for a microbatch, 0 where it had none, its mean queue, and
    the microbatches that it counted.
    """

    seconds: float
    queue: float
    counted: int


@dataclass(frozen=True, slots=True)
class StageChange:
    """`peer` serves stage `after` from the next step on. before: `NOWHERE` for one that comes."""

    peer: int
    before: int
    after: int


class Arrangement:
    """stages: by position, which stage it serves, or `NOWHERE`. costs: what a sample costs at each stage, in any unit.
    balance: None where nobody moves.
    """

    def __init__(self, stages: Sequence[int], costs: Sequence[float], balance: Rebalancer | None = None) -> None:
        self.stages, self.costs, self.balance = list(stages), tuple(costs), balance
        self.seconds: dict[int, float] = {}
        """By peer, what it was last measured to compute for a microbatch at its stage."""

    def measured(self, told: Mapping[int, PeerTold]) -> None:
        """Remember what peers have said of themselves."""
        self.seconds |= {peer: each.seconds for peer, each in told.items() if each.seconds}

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
        self, now: float, members: Collection[int], told: Mapping[int, PeerTold], asking: Sequence[int]
    ) -> list[StageChange]:
        """Of the next step. now: seconds that all agree on; asking: who wants to come."""
        for gone in set(self.seconds) - set(members):
            del self.seconds[gone]
        queues = {peer: told[peer].queue if peer in told else 0.0 for peer in members}
        loads = {peer: PeerLoad(self.stages[peer], queues[peer], 1.0 / self.cost(peer)) for peer in sorted(members)}
        changes = []
        for peer in asking:
            stage = stage_for_joiner(loads, len(self.costs))
            changes.append(StageChange(peer, NOWHERE, stage))
            mean = sum(load.rate * self.costs[load.stage] for load in loads.values()) / len(loads)
            queue = min((load.queue for load in loads.values() if load.stage == stage), default=0.0)
            loads[peer] = PeerLoad(stage, queue, mean / self.costs[stage])
        if self.balance is not None and not changes:
            move = self.balance.move(now, loads)
            if move is not None:
                changes.append(StageChange(move.peer, self.stages[move.peer], move.to))
        return changes

    def apply(self, changes: Sequence[StageChange]) -> None:
        """From now on."""
        for change in changes:
            if change.before != NOWHERE and change.peer in self.seconds:
                self.seconds[change.peer] *= self.costs[change.after] / self.costs[change.before]
            self.stages[change.peer] = change.after
