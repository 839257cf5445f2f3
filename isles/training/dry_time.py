"""How long the workers of a dry run wait for each other: its methods' own exchanges, replayed over its network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count
from math import ceil

from isles.network.named import links
from isles.network.planner.planned import Groups, PlannedExchange, Rhythm, Swap, Tree, among, by_size, gathered
from isles.network.planner.replay import TimeAccount, replay_run
from isles.network.planner.stages import ANSWER, StagedSteps
from isles.network.topology import Topology
from isles.replicas import method
from isles.replicas.island.island import Together
from isles.replicas.loop.outer import OuterSync
from isles.replicas.schedule import Outline
from isles.replicas.sync import ReplicaSync
from isles.training.config.planned import plan_of
from isles.training.config.sections import Config, WorldConfig
from isles.training.dry_stages import turns_of
from isles.training.memory.planned import step_seconds
from isles.training.placement import holders_of, layout_of

UTILISATION = 0.95  # for which a bandwidth is asked

_Together = tuple[Sequence[int], list[PlannedExchange]]
"""Ranks, and what goes between them, by their positions."""


@dataclass(frozen=True, kw_only=True)
class Transfers:
    """How exchanging fits between the steps. Seconds; bits per second.

    rate, latency: of the virtual backend's slowest link; None where the real network is not known. seconds: waiting a
    round on it, for other stages aside; utilisation: computing / (computing + waiting); bubble: the share of that time
    in which a worker waits for other stages; step: of one inner step, all waiting included. All of the whole run and a
    mean over the workers, and None where there is too much to replay. wanted: the upload rate of a worker for a
    utilisation of 95 %, if nothing is hidden behind computing and nobody waits for other stages; None: no rate is
    enough, the latency alone costs more.
    """

    rate: float | None
    latency: float | None
    seconds: float | None
    utilisation: float | None
    bubble: float | None
    step: float | None
    wanted: float | None


def transfers(
    config: Config,
    seats: Sequence[ReplicaSync],
    outline: Outline,
    step_seconds: float | None,
    staged: StagedSteps | None = None,
) -> Transfers | None:
    """seats: the optimizers of one replica's places, stage by stage. None where nothing is sent, or nothing is known of
    the time between rounds.
    """
    bits = 8 * (max(outline.sent) - outline.inside) / max(outline.rounds, 1)
    if not step_seconds or not (bits or outline.inside or staged):
        return None
    world, rate, latency, account = config.world, None, None, None
    if world.is_simulated:
        far = links(world.links)
        rate, latency = far.slowest_rate(world.workers), far.longest_latency(world.workers)
        account = replayed(config, seats, staged)
    phases = 1 if max((len(group) for planned in outline.first for group in planned.groups), default=1) == 2 else 2
    allowed = outline.every * step_seconds * (1 / UTILISATION - 1) - phases * (latency or 0.0)
    times = (None,) * 4 if account is None else _in_short(account, config.run.steps, outline.rounds)
    return Transfers(
        rate=rate,
        latency=latency,
        seconds=times[0],
        utilisation=times[1],
        bubble=times[2],
        step=times[3],
        wanted=bits / allowed if allowed > 0 else None,
    )


def _in_short(account: TimeAccount, steps: int, rounds: int) -> tuple[float, float, float, float]:
    """As in `Transfers`."""
    total = account.computing + account.waiting
    between = account.waiting - account.for_stages
    return between / max(rounds, 1), account.share, account.for_stages / total if total else 0.0, total / steps


def replayed(config: Config, seats: Sequence[ReplicaSync], staged: StagedSteps | None = None) -> TimeAccount | None:
    """The whole run, on the network of [world]."""
    world, steps = config.world, config.run.steps
    island = world.inner * config.pipeline.neighbours
    near = links(world.inner_links) if island > 1 else None
    topology = Topology(world.workers, links(world.links), near, island)
    widest, holders = max(seats, key=lambda seat: seat.group.size), holders_of(layout_of(config))
    rhythms = [one.rhythm(steps) for one in (widest, _island(widest)) if one is not None]
    norms = staged is not None and staged.asks_norm and reduces_first(config)
    if norms and staged is not None:
        staged = replace(staged, asks_norm=False)
    account = replay_run(
        lambda taken: _in_turn(exchanges(seats, holders, world, taken), _norms(world.workers, taken if norms else 0)),
        Rhythm(max(rhythm.start for rhythm in rhythms), rhythms[0].every),
        topology,
        [factor * step_seconds(config) for factor in world.factors],
        steps,
        opening(seats, holders, world) if plan_of(config.pipeline) is None else opening_of_plan(config, seats),
        config.run.seed,
        staged=staged,
    )
    turn = None if staged is None else turns_of(config, staged)
    if account is None or turn is None:
        return account
    return account.plus(turn[1], turn[0].account(topology))


def reduces_first(config: Config) -> bool:
    """Whether the nodes of a plan average their gradients before anybody asks for a norm."""
    return plan_of(config.pipeline) is not None and method(config.method).level == "gradient"


def _norms(workers: int, steps: int) -> list[PlannedExchange]:
    """What all workers tell each other of the gradient's norm."""
    groups = (tuple(range(workers)),)
    pattern = by_size(groups, lambda size: gathered(ANSWER, size))
    return [PlannedExchange(step, step, 0, "norm", groups, pattern, -step, "inner") for step in range(1, steps + 1)]


def _in_turn(*rows: Sequence[PlannedExchange]) -> list[PlannedExchange]:
    return sorted((one for row in rows for one in row), key=lambda one: (ceil(one.sent), one.sent))


def exchanges(
    seats: Sequence[ReplicaSync], holders: Sequence[Sequence[int]], world: WorldConfig, steps: int
) -> list[PlannedExchange]:
    """Of all workers: inside the islands, across them, and what makes islands whole again. Groups are of ranks.
    holders: the ranks that each seat stands for, which exchange with each other.
    """
    places = len(seats)
    found: list[tuple[Sequence[int], list[PlannedExchange]]] = [
        (ranks, seat.schedule(steps)) for ranks, seat in zip(holders, seats, strict=True)
    ]
    before = []
    for first in range(0, places, world.inner):
        own, islands = seats[first : first + world.inner], _islands(world, first, places)
        inside = _island(own[0])
        if inside is None:
            continue
        before += [(island, inside.schedule(steps)) for island in islands]
        if isinstance(own[0], OuterSync):
            landings = zip(*(seat.landings(steps) for seat in own if isinstance(seat, OuterSync)), strict=True)
            whole = [_spread(own, number, at) for number, at in enumerate(landings)]
            found += [(island, whole) for island in islands]
    found = before + found
    numbers = count()
    made = [one for ranks, planned in found for one in among(ranks, planned, numbers)]
    return _in_turn(made)


def opening(
    seats: Sequence[ReplicaSync], holders: Sequence[Sequence[int]], world: WorldConfig
) -> list[PlannedExchange]:
    """What goes before the first step, one after the other."""
    found: list[_Together] = []
    places = len(seats)
    for first in range(0, places, world.inner):
        inside = _island(seats[first])
        theirs = [] if inside is None else inside.opening_exchanges()
        found += [(island, theirs) for island in _islands(world, first, places)]
    found += [(ranks, seat.opening_exchanges()) for ranks, seat in zip(holders, seats, strict=True)]
    numbers = count()
    return [one for ranks, planned in found for one in among(ranks, planned, numbers)]


def opening_of_plan(config: Config, seats: Sequence[ReplicaSync]) -> list[PlannedExchange]:
    """That of a run by a plan: each column is told whether there is text to judge with, and all compare their plans."""
    layout = layout_of(config)
    columns = tuple({tuple(layout.sharing(rank, "replica", "inner")): None for rank in range(layout.size)})
    told = PlannedExchange(0, 0, 0, "opening", columns, by_size(columns, lambda _: Tree(1)), 0, "control")
    all_of_them = (tuple(range(layout.size)),)
    compared = by_size(all_of_them, lambda size: gathered(8, size))
    same = PlannedExchange(0, 0, 0, "opening", all_of_them, compared, 0, "control")
    found = [told, *opening(seats, holders_of(layout), config.world), same]
    return [one._replace(flight=number) for number, one in enumerate(found)]


def _island(seat: ReplicaSync) -> ReplicaSync | None:
    """The method that makes the workers of an island one replica, where there are islands."""
    return seat.replica.inside if isinstance(seat.replica, Together) else None


def _islands(world: WorldConfig, first: int, places: int) -> list[range]:
    """Ranks of each island that holds the stage whose first worker has the place `first`; none where nobody shares
    one.
    """
    firsts = range(first, world.workers, places) if world.inner > 1 else ()
    return [range(one, one + world.inner) for one in firsts]


def _spread(seats: Sequence[ReplicaSync], number: int, landing: Sequence[tuple[int, Sequence[int]]]) -> PlannedExchange:
    """What makes an island whole again where its places have landed."""
    groups: Groups = (tuple(range(len(seats))),)
    each = [seat.replica.spread_bytes(own) / (len(seats) - 1) for seat, (_, own) in zip(seats, landing, strict=True)]
    moment, pattern = landing[0][0], by_size(groups, lambda _: Swap(tuple(each)))
    return PlannedExchange(moment, moment, 0, "spread", groups, pattern, number, "inner")
