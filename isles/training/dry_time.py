"""How long the workers of a dry run wait for each other: its methods' own exchanges, replayed over its network."""

from __future__ import annotations

from dataclasses import dataclass

from isles.network.named import links
from isles.network.planner.replay import TimeAccount, replay_run
from isles.network.planner.stages import StagedSteps
from isles.network.topology import Topology
from isles.replicas.schedule import Outline
from isles.training.dry_stages import turns_of
from isles.training.memory.planned import step_seconds
from isles.training.plan.sketch import RunSketch

UTILISATION = 0.95  # for which a bandwidth is asked


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
    made: RunSketch,
    outline: Outline,
    step_seconds: float | None,
    staged: StagedSteps | None = None,
) -> Transfers | None:
    """None where nothing is sent, or nothing is known of the time between rounds."""
    bits = 8 * (max(outline.sent) - outline.inside) / max(outline.rounds, 1)
    if not step_seconds or not (bits or outline.inside or staged):
        return None
    world, rate, latency, account = made.config.world, None, None, None
    if world.is_simulated:
        far = links(world.links)
        rate, latency = far.slowest_rate(world.workers), far.longest_latency(world.workers)
        account = replayed(made, staged)
    phases = 1 if max((len(group) for planned in outline.first for group in planned.groups), default=1) == 2 else 2
    allowed = outline.every * step_seconds * (1 / UTILISATION - 1) - phases * (latency or 0.0)
    times = (None,) * 4 if account is None else _in_short(account, made.config.run.steps, outline.rounds)
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


def replayed(made: RunSketch, staged: StagedSteps | None = None) -> TimeAccount | None:
    """The whole run, on the network of [world]."""
    config = made.config
    world, steps = config.world, config.run.steps
    island = world.inner * config.pipeline.neighbours
    near = links(world.inner_links) if island > 1 else None
    topology = Topology(world.workers, links(world.links), near, island)
    account = replay_run(
        made.exchanges,
        made.rhythm(steps),
        topology,
        [factor * step_seconds(config) for factor in world.factors],
        steps,
        made.opening(),
        config.run.seed,
        staged=staged,
    )
    turn = None if staged is None else turns_of(config, staged)
    if account is None or turn is None:
        return account
    return account.plus(turn[1], turn[0].account(topology))
