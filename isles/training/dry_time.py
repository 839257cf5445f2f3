"""How long the workers of a dry run wait for each other: its methods' own exchanges, replayed over its network."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from math import ceil

from isles.network.named import links
from isles.network.planner.planned import Groups, PlannedExchange, Rhythm, Swap, by_size
from isles.network.planner.replay import TimeAccount, replay_run
from isles.network.topology import Topology
from isles.replicas.island.island import Together
from isles.replicas.loop.outer import OuterSync
from isles.replicas.schedule import Outline
from isles.replicas.sync import ReplicaSync
from isles.training.config.sections import Config, WorldConfig
from isles.training.memory import step_seconds

UTILISATION = 0.95  # for which a bandwidth is asked


@dataclass(frozen=True, kw_only=True)
class Transfers:
    """How exchanging fits between the steps. Seconds; bits per second.

    rate, latency: of the virtual backend's slowest link; None where the real network is not known. seconds: waiting a
    round on it; utilisation: computing / (computing + waiting); both of the whole run and a mean over the workers, and
    None where there is too much to replay. wanted: the upload rate of a worker for a utilisation of 95 %, if nothing is
    hidden behind computing; None: no rate is enough, the latency alone costs more.
    """

    rate: float | None
    latency: float | None
    seconds: float | None
    utilisation: float | None
    wanted: float | None


def transfers(
    config: Config, seats: Sequence[ReplicaSync], outline: Outline, step_seconds: float | None
) -> Transfers | None:
    """seats: the optimizers of one island's places. None where nothing is sent, or nothing is known of the time between
    rounds.
    """
    bits = 8 * (max(outline.sent) - outline.inside) / max(outline.rounds, 1)
    if not step_seconds or not (bits or outline.inside):
        return None
    world, rate, latency, account = config.world, None, None, None
    if world.is_simulated:
        far = links(world.links)
        rate, latency = far.slowest_rate(world.workers), far.longest_latency(world.workers)
        account = replayed(config, seats)
    phases = 1 if max(len(group) for planned in outline.first for group in planned.groups) == 2 else 2
    allowed = outline.every * step_seconds * (1 / UTILISATION - 1) - phases * (latency or 0.0)
    return Transfers(
        rate=rate,
        latency=latency,
        seconds=None if account is None else account.waiting / outline.rounds,
        utilisation=None if account is None else account.share,
        wanted=bits / allowed if allowed > 0 else None,
    )


def replayed(config: Config, seats: Sequence[ReplicaSync]) -> TimeAccount | None:
    """The whole run, on the network of [world]."""
    world, steps = config.world, config.run.steps
    near = links(world.inner_links) if world.inner > 1 else None
    rhythms = [one.rhythm(steps) for one in (seats[0], _island(seats[0])) if one is not None]
    return replay_run(
        lambda taken: exchanges(seats, world, taken),
        Rhythm(max(rhythm.start for rhythm in rhythms), rhythms[0].every),
        Topology(world.workers, links(world.links), near, world.inner),
        [factor * step_seconds(config) for factor in world.factors],
        steps,
        opening(seats, world),
        config.run.seed,
    )


def exchanges(seats: Sequence[ReplicaSync], world: WorldConfig, steps: int) -> list[PlannedExchange]:
    """Of all workers: inside the islands, across them, and what makes islands whole again. Groups are of ranks."""
    found = [(across, seat.schedule(steps)) for across, seat in zip(_across(world), seats, strict=True)]
    inside = _island(seats[0])
    if inside is not None:
        found = [(island, inside.schedule(steps)) for island in _inside(world)] + found
    if inside is not None and isinstance(seats[0], OuterSync):
        landings = zip(*(seat.landings(steps) for seat in seats if isinstance(seat, OuterSync)), strict=True)
        whole = [_spread(seats, number, at) for number, at in enumerate(landings)]
        found += [(island, whole) for island in _inside(world)]
    numbers = count()
    made = [one for ranks, planned in found for one in _among(ranks, planned, numbers)]
    return sorted(made, key=lambda one: (ceil(one.sent), one.sent))


def opening(seats: Sequence[ReplicaSync], world: WorldConfig) -> list[PlannedExchange]:
    """What goes before the first step, one after the other."""
    inside = _island(seats[0])
    theirs = [] if inside is None else inside.opening_exchanges()
    found = [(island, theirs) for island in _inside(world)]
    found += [(across, seat.opening_exchanges()) for across, seat in zip(_across(world), seats, strict=True)]
    numbers = count()
    return [one for ranks, planned in found for one in _among(ranks, planned, numbers)]


def _island(seat: ReplicaSync) -> ReplicaSync | None:
    """The method that makes the workers of an island one replica, where there are islands."""
    return seat.replica.inside if isinstance(seat.replica, Together) else None


def _across(world: WorldConfig) -> list[range]:
    """Ranks that exchange across islands, by their place in one."""
    return [range(place, world.workers, world.inner) for place in range(world.inner)]


def _inside(world: WorldConfig) -> list[range]:
    """Ranks of each island; none where nobody shares a replica."""
    firsts = range(0, world.workers, world.inner) if world.inner > 1 else ()
    return [range(first, first + world.inner) for first in firsts]


def _spread(seats: Sequence[ReplicaSync], number: int, landing: Sequence[tuple[int, Sequence[int]]]) -> PlannedExchange:
    """What makes an island whole again where its places have landed."""
    groups: Groups = (tuple(range(len(seats))),)
    each = [seat.replica.spread_bytes(own) / (len(seats) - 1) for seat, (_, own) in zip(seats, landing, strict=True)]
    moment, pattern = landing[0][0], by_size(groups, lambda _: Swap(tuple(each)))
    return PlannedExchange(moment, moment, 0, "spread", groups, pattern, number, "inner")


def _among(ranks: range, planned: Sequence[PlannedExchange], numbers: Iterator[int]) -> list[PlannedExchange]:
    """With ranks for positions, and flights that no others have."""
    flights: dict[int, int] = {}
    for one in planned:
        flights.setdefault(one.flight, len(flights))
    first = [next(numbers) for _ in flights]
    return [
        one._replace(
            groups=tuple(tuple(ranks[position] for position in group) for group in one.groups),
            flight=first[flights[one.flight]],
        )
        for one in planned
    ]
