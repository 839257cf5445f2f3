"""Who moves to which stage, so that no stage holds up the others: pure functions of a table that all peers share.

Two policies:

    queue        of SWARM (arXiv 2301.11913): every period, the peer with the shortest queue of the stage with the
                 shortest queues goes to the stage with the longest ones
    throughput   best response, as Petals has it: the move that most raises the throughput of the slowest stage, if it
                 raises it by more than the hysteresis

SWARM adds up the queues of a stage. Here it is their mean: with sums, a stage of twice the work has the longer queue
even when twice as many peers serve it, and a balanced swarm would go on moving.

Guarantees: the same table gives the same answer everywhere. At most one peer moves a period. The last peer of a stage
stays. With "throughput" and constant rates the moves come to an end, for each of them raises the slowest stage, or
leaves fewer that are as slow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal, NamedTuple, get_args

BalancePolicy = Literal["none", "queue", "throughput"]
_ROUNDED = 1 + 1e-9  # equal rates differ by their rounding, and peers would go to and fro for it


@dataclass(frozen=True, slots=True)
class PeerLoad:
    """What a peer told of itself. queue: microbatches that waited there or were under way, on average since the last
    table. rate: samples a second that it can compute at its stage.
    """

    stage: int
    queue: float
    rate: float


class StageMove(NamedTuple):
    """`peer` leaves its stage and serves stage `to`."""

    peer: int
    to: int


def queue_move(loads: Mapping[int, PeerLoad], hysteresis: float = 0.0) -> StageMove | None:
    """SWARM's. loads: by peer. None where the longest queues are not more than 1 + `hysteresis` times the shortest, or
    the stage of the shortest has one peer.
    """
    members = _members(loads)
    queues = {stage: fmean(loads[peer].queue for peer in peers) for stage, peers in members.items()}
    longest = max(queues, key=lambda stage: (queues[stage], -stage))
    shortest = min(queues, key=lambda stage: (queues[stage], stage))
    if len(members[shortest]) < 2 or queues[longest] <= (1.0 + hysteresis) * queues[shortest]:
        return None
    return StageMove(min(members[shortest], key=lambda peer: (loads[peer].queue, peer)), longest)


def throughput_move(loads: Mapping[int, PeerLoad], costs: Sequence[float], hysteresis: float = 0.0) -> StageMove | None:
    """Best response. costs: what a sample costs at each stage, in any unit; a peer's rate at another stage is as their
    ratio. None where no move makes the two stages that it touches faster than 1 + `hysteresis` times the slowest.
    """
    members = _members(loads)
    rates = {stage: sum(loads[peer].rate for peer in peers) for stage, peers in members.items()}
    slowest = min(rates, key=lambda stage: (rates[stage], stage))
    best, found = (1.0 + hysteresis) * rates[slowest], None
    for peer, load in sorted(loads.items()):
        if load.stage == slowest or len(members[load.stage]) < 2:
            continue
        there = rates[slowest] + load.rate * costs[load.stage] / costs[slowest]
        after = min(rates[load.stage] - load.rate, there)
        if after > best * _ROUNDED:
            best, found = after, StageMove(peer, slowest)
    return found


def stage_for_joiner(loads: Mapping[int, PeerLoad], stages: int) -> int:
    """Where a peer that comes is wanted most: at a stage that nobody serves, else at the one with the longest queues,
    among equals the one of the least rate.
    """
    members = _members(loads)
    for stage in range(stages):
        if stage not in members:
            return stage

    def need(stage: int) -> tuple[float, float, int]:
        mine = [loads[peer] for peer in members[stage]]
        return fmean(load.queue for load in mine), -sum(load.rate for load in mine), -stage

    return max(members, key=need)


def rescuer(loads: Mapping[int, PeerLoad], costs: Sequence[float], stage: int) -> StageMove | None:
    """Who goes to `stage`, which nobody serves: whoever leaves the slowest of the other stages the fastest. None where
    each of those has one peer.
    """
    members = _members(loads)
    rates = {at: sum(loads[peer].rate for peer in peers) for at, peers in members.items()}
    best, found = 0.0, None
    for peer, load in sorted(loads.items()):
        if len(members[load.stage]) < 2:
            continue
        here = rates[load.stage] - load.rate
        there = load.rate * costs[load.stage] / costs[stage]
        after = min([here, there, *(rate for at, rate in rates.items() if at != load.stage)])
        if after > best:
            best, found = after, StageMove(peer, stage)
    return found


class Rebalancer:
    """At most one move a period, none with policy "none". costs: see `throughput_move`. period: seconds from one table
    to the next.
    """

    def __init__(
        self, policy: BalancePolicy, costs: Sequence[float], *, period: float = 300.0, hysteresis: float = 0.25
    ) -> None:
        if policy not in get_args(BalancePolicy):
            raise ValueError(f"policy = {policy!r}: choose one of {', '.join(get_args(BalancePolicy))}")
        if not period > 0:
            raise ValueError(f"period = {period}: choose seconds above 0, such as 300")
        if not hysteresis >= 0:
            raise ValueError(f"hysteresis = {hysteresis}: choose 0 or more, such as 0.25")
        self.policy, self.costs = policy, tuple(costs)
        self.period, self.hysteresis = period, hysteresis
        self.next_look = 0.0 if policy == "none" else period
        """Second of the next table."""

    def move(self, now: float, loads: Mapping[int, PeerLoad]) -> StageMove | None:
        """The move of the table at second `now`; None where there is none, or none yet."""
        if self.policy == "none" or now < self.next_look or not loads:
            return None
        self.next_look += self.period * ((now - self.next_look) // self.period + 1)
        if self.policy == "queue":
            return queue_move(loads, self.hysteresis)
        return throughput_move(loads, self.costs, self.hysteresis)


def _members(loads: Mapping[int, PeerLoad]) -> dict[int, list[int]]:
    """The peers of each stage that has any."""
    members: dict[int, list[int]] = {}
    for peer, load in sorted(loads.items()):
        members.setdefault(load.stage, []).append(peer)
    return members
