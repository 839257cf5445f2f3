"""The stage that each peer serves, and its changes between two steps: a pure function of agreed values.

    joins    a joining peer gets the stage that it wishes, else the one that needs it most
    moves    otherwise, once a period, at most one peer moves to another stage, to balance the stages' speeds
    rescue   a stage without peers gets a joining peer, else one of another stage, at once

A peer that changes its stage copies the weights and the state from a peer of that stage, and takes part once it has
them; the others wait for it at the end of the step at the latest.

Two policies of moves:

    queue        of SWARM (arXiv 2301.11913): every period, the peer with the shortest queue of the stage with the
                 shortest queues goes to the stage with the longest ones
    throughput   best response, as in Petals: the move that most raises the throughput of the slowest stage, if it
                 raises it by more than the hysteresis

SWARM adds up the queues of a stage. Isles takes their mean: with sums, a stage of twice the work has the longer queue
even when twice as many peers serve it, and a balanced swarm would go on moving.

Guarantees: equal loads give the same move at all peers. At most one peer moves per period. The last peer of a stage
stays. With "throughput" and constant rates the moves come to an end, as each of them raises the slowest stage's rate,
or leaves fewer stages that are as slow.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any, Literal, NamedTuple, get_args

BalancePolicy = Literal["none", "queue", "throughput"]
_ROUNDED = 1 + 1e-9  # equal rates may differ by rounding, and peers would move back and forth because of it


@dataclass(frozen=True, slots=True)
class PeerLoad:
    """A peer's load, from its vote. queue: mean number of microbatches that waited or ran there since the last vote.
    rate: samples per second that it can compute at its stage.
    """

    stage: int
    queue: float
    rate: float


class StageMove(NamedTuple):
    """`peer` leaves its stage and serves stage `to`."""

    peer: int
    to: int


def queue_move(loads: Mapping[int, PeerLoad], hysteresis: float = 0.0) -> StageMove | None:
    """SWARM's move. loads: by peer. None if the longest mean queue is not more than 1 + `hysteresis` times the
    shortest, or the stage of the shortest has one peer.
    """
    members = _members(loads)
    queues = {stage: fmean(loads[peer].queue for peer in peers) for stage, peers in members.items()}
    longest = max(queues, key=lambda stage: (queues[stage], -stage))
    shortest = min(queues, key=lambda stage: (queues[stage], stage))
    if len(members[shortest]) < 2 or queues[longest] <= (1.0 + hysteresis) * queues[shortest]:
        return None
    return StageMove(min(members[shortest], key=lambda peer: (loads[peer].queue, peer)), longest)


def throughput_move(loads: Mapping[int, PeerLoad], costs: Sequence[float], hysteresis: float = 0.0) -> StageMove | None:
    """Best response. costs: of a sample at each stage, in any unit; a peer's rate at another stage scales with their
    ratio. None if no move leaves both of its stages faster than 1 + `hysteresis` times the slowest.
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
    """The stage that needs a joining peer most: one without peers, else the one with the longest mean queue, among
    equals the one of the lowest rate.
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
    """The peer to move to `stage`, which has none: the one after whose move the slowest stage is the fastest. None if
    each other stage has only one peer.
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
    """Decides moves: at most one per period, none with policy "none". costs: see `throughput_move`. period: seconds
    between two looks at the loads.
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
        """The second of the next look."""

    def move(self, now: float, loads: Mapping[int, PeerLoad]) -> StageMove | None:
        """The move at second `now`, if one is due; else None."""
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


NOWHERE = -1
"""The stage of a peer that has not joined yet, or has left."""


class PeerStats(NamedTuple):
    """A peer's vote on a step. holds: 1 if it has its gradient. square: the gradient's square norm, clock: seconds,
    both as the bits of a double. counted: microbatches. nanoseconds: compute time of one, 0 if it had none. queued: its
    mean queue, in thousandths. leaves: 1 if it asks to leave. saves: 1 if it asks all to save their states.
    """

    holds: int
    square: int
    counted: int
    nanoseconds: int
    queued: int
    clock: int
    leaves: int
    saves: int = 0

    @property
    def seconds(self) -> float:
        return self.nanoseconds / 1e9

    @property
    def queue(self) -> float:
        return self.queued / 1000


@dataclass(frozen=True, slots=True)
class StageChange:
    """`peer` serves stage `after` from the next step on. before: `NOWHERE` for a joining peer."""

    peer: int
    before: int
    after: int


class StagePlacement:
    """stages: by position, the stage that it serves, or `NOWHERE`. balance: decides moves, and has the stages' costs
    of a sample.
    """

    def __init__(self, stages: Sequence[int], balance: Rebalancer) -> None:
        self.stages, self.costs, self.balance = list(stages), balance.costs, balance
        self.wishes: dict[int, int] = {}
        """By position of a joining peer, the stage that it wishes to serve, or `NOWHERE`."""
        self.seconds: dict[int, float] = {}
        """By peer, the last measured seconds of a microbatch at its stage."""

    def measured(self, stats: Mapping[int, PeerStats]) -> None:
        """Record the seconds per microbatch in the peers' votes."""
        self.seconds |= {peer: each.seconds for peer, each in stats.items() if each.seconds}

    def cost(self, peer: int) -> float:
        """Estimated seconds of a microbatch at `peer` and its stage: measured, else the median of its stage, else that
        of all peers, scaled by the stages' costs.
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
        """The changes of the next step. now: agreed seconds; asking: joining peers."""
        loads = self._loads(members, {peer: each.queue for peer, each in stats.items()})
        changes = [self._come(peer, loads, self.wishes.get(peer, NOWHERE)) for peer in asking]
        if not changes and (move := self.balance.move(now, loads)) is not None:
            changes.append(StageChange(move.peer, self.stages[move.peer], move.to))
        return changes

    def rescue(self, members: Collection[int], asking: Sequence[int], lost: Sequence[int]) -> list[StageChange]:
        """Assign peers to the stages `lost`, which no member serves, as far as possible: joining peers first. Others of
        `asking` join later.
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
        """Assign a joining peer to the stage that it wishes, else the one that needs it most, and add it to `loads`."""
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
    """Share the microbatches `todo` among the origins so that they end together. seconds: per microbatch, by origin."""
    assigned: dict[int, list[int]] = {peer: [] for peer in sorted(seconds)}
    for microbatch in todo:
        peer = min(assigned, key=lambda peer: ((len(assigned[peer]) + 1) * seconds[peer], peer))
        assigned[peer].append(microbatch)
    return assigned
