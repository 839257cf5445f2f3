"""The plan of a run whose workers are fixed: whole replicas, islands, or replicas cut into stages.

A worker's memory, exchanges and advice come from the method's own optimizers around a sketch; waiting from a replay of
all their messages over the network of [world].
"""

from __future__ import annotations

import math
import warnings

from isles.comm.codecs import codec
from isles.comm.collectives.mean import sent_bytes
from isles.models import limits
from isles.models.subspace import Subspace
from isles.network.exchange_plan import WorkerMemory
from isles.network.links import Links, Topology, links
from isles.plan.computing import counted_flops, device_of, measured_step
from isles.plan.pipeline_steps import StagedSteps
from isles.plan.pipelines import (
    bytes_between,
    seconds_of_paths,
    stage_notices,
    stage_workers,
    staged_steps,
    stream_ratio,
    subspace_updates,
)
from isles.plan.record import RunPlan, RunTime, WorkerPlan
from isles.plan.replay import MESSAGES, RunReplay, TimeAccount
from isles.plan.sketch import RunSketch, sketch_run
from isles.plan.worker_classes import wanted_rate
from isles.replicas.exchange_schedule import Outline
from isles.replicas.sync import ReplicaSync
from isles.training.config.conflicts import plan_of
from isles.training.config.inner import inner_kind
from isles.training.config.sections import Config
from isles.training.kinds import layout_of
from isles.training.memory.plans import prepared, step_seconds
from isles.training.optimizer import inner_bytes

UTILISATION = 0.95  # for which a bandwidth is asked
_SEARCHED = 10_000  # messages that are played for each rate that is tried
_OWN_RATE = 1e9  # bits per second, from which the search goes out where the network is not known


def plan_replicas(config: Config, *, probe: bool = False, machines: int = 1) -> RunPlan:
    """As `plan_run`."""
    world, run, pipeline = config.world, config.run, config.pipeline
    layout, paths, context = layout_of(config), plan_of(pipeline), limits(config.model).context
    readers = layout.reader(0)[1]
    sequences = config.data.batch_size_per_worker(readers) * config.inner.accumulation
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made = sketch_run(config, -(-world.workers // machines))
        flops = counted_flops(config.model, made.model, context)
    first, notices = made.optimizers[0], list(made.notices)
    if type(first).schedule is ReplicaSync.schedule:
        notices.append(f"method {config.method} does not say what it exchanges: give it a schedule()")
    outlines = [one.outline(run.steps) for one in made.optimizers]
    outline, staged = max(outlines, key=lambda one: max(one.sent)), staged_steps(made) if made.cut else None
    seconds = step_seconds(config) if world.is_simulated else None
    if world.is_simulated and outline.about:
        notices.append(
            "what is sent depends on the numbers: bytes and waiting are about right, of a few steps perhaps not"
        )
    if world.is_simulated and (world.virtual.step_jitter or world.virtual.pauses):
        notices.append(
            "times are of workers whose steps take equally long and who never pause; isles simulate counts more"
        )
    if probe and not world.is_simulated:
        seconds = measured_step(config, sequences, context)
        if sum(parameter.numel() for parameter in made.model.parameters()) < made.parameters:
            notices.append("the step was measured on the whole model; a worker's part of it takes less")
    if paths is not None and staged is not None:
        seconds = seconds_of_paths(paths, staged.sizes, world, run.seed)
    notices += [] if staged is None else stage_notices(config, seconds)
    time = _time(made, outline, seconds, staged)
    if world.is_simulated and time is not None and time.account is None:
        notices.append("waiting is not known: there are too many messages to replay; isles plan methods estimates it")
    total = [0] * layout.size if staged is None else bytes_between(made, staged)
    between = sum(total) / len(total)
    for ranks, one in zip(made.holders, outlines, strict=True):
        for rank, opening, sent in zip(ranks, one.opening, one.sent, strict=True):
            total[rank] += opening + sent
    dtype = first.parameters[0].dtype
    ddp = [sent_bytes(made.parameters, dtype, codec("none"), world.workers, index) for index in range(world.workers)]
    return RunPlan(
        config=config,
        placement=_arrangement(config),
        parameters=made.parameters,
        flops=flops,
        tokens_per_step=readers * sequences * context,
        workers=_workers(made, staged),
        placed=None if config.memory.method == "none" or pipeline.stages > 1 else prepared(config)[2],
        outline=outline,
        bytes_sent=tuple(total),
        between_stages=None if staged is None else between,
        stream_ratio=None if staged is None else stream_ratio(made),
        ddp_bytes=run.steps * sum(ddp) / len(ddp),
        step_seconds=seconds,
        time=time,
        startup=_startup(made) if world.is_simulated else None,
        notices=(*dict.fromkeys(str(one.message) for one in caught), *notices),
    )


def _arrangement(config: Config) -> str:
    pipeline, world, paths = config.pipeline, config.world, plan_of(config.pipeline)
    if paths is not None:
        return f"stages of {', '.join(str(len(nodes)) for nodes in paths.problem.stages)} by a plan"
    if pipeline.stages == 1:
        return ""
    inner = f" x {world.inner} inside" if world.inner > 1 else ""
    return f"{config.replicas_in_all} replicas x {pipeline.stages} stages{inner}"


def _workers(made: RunSketch, staged: StagedSteps | None) -> tuple[WorkerPlan, ...]:
    """Of each stage or node; of whole replicas one, for the workers of an island are alike."""
    world = made.config.world
    memory = [worker_memory(made.config, one) for one in made.optimizers[:: world.inner]]
    if staged is not None:
        return stage_workers(made, staged, memory)
    held = sum(parameter.numel() for parameter in made.optimizers[0].model.parameters())
    return (WorkerPlan(ranks=tuple(range(world.workers)), parameters=held, memory=memory[0]),)


def worker_memory(config: Config, optimizer: ReplicaSync) -> WorkerMemory:
    """What the worker of a sketched `optimizer` holds."""
    subspace: Subspace | None = getattr(optimizer.model, "subspace", None)
    basis = 0 if subspace is None else subspace.nbytes
    return WorkerMemory(
        weights=sum(parameter.nbytes for parameter in optimizer.model.parameters()),
        tables=basis + sum(buffer.nbytes for buffer in optimizer.model.buffers()),
        gradients=sum(parameter.nbytes for parameter in optimizer.parameters),
        inner=inner_bytes(optimizer.parameters, inner_kind(config.inner, optimizer.usual_inner)),
        held=tuple(one for one in optimizer.memory() if one.when != "pinned" or device_of(config) != "cpu"),
    )


def _time(made: RunSketch, outline: Outline, seconds: float | None, staged: StagedSteps | None) -> RunTime | None:
    """None where nothing is sent, or nothing is known of the seconds of a step."""
    world, steps = made.config.world, made.config.run.steps
    bits = 8 * (max(outline.sent) - outline.inside) / max(outline.rounds, 1)
    if not seconds or not (bits or outline.inside or staged):
        return None
    rate = latency = account = None
    if world.is_simulated:
        far = made.config.network
        rate, latency = far.slowest_rate(world.workers), far.longest_latency(world.workers)
        account = replayed(made, far, staged)
    return RunTime(
        account=account,
        step=None if account is None else (account.computing + account.waiting) / steps,
        round_wait=None if account is None else (account.waiting - account.for_stages) / max(outline.rounds, 1),
        rate=rate,
        latency=latency,
        wanted=None if staged is not None or not bits else _wanted_rate(made, outline, seconds),
    )


def _topology(config: Config, far: Links) -> Topology:
    world, island = config.world, config.island
    near = links(world.virtual.inner_links) if world.is_simulated else Links(bandwidth=math.inf)
    return Topology(world.workers, far, near if island > 1 else None, island)


def _startup(made: RunSketch) -> float | None:
    """Seconds of all exchanges before the first step; None where there are too many messages to replay."""
    config, opening = made.config, made.opening()
    if sum(one.messages for one in opening) > MESSAGES:
        return None
    workers, topology = config.world.workers, _topology(config, config.network)
    waits = RunReplay(topology, [0.0] * workers, opening, config.run.seed).waits([], 0)
    return max(moments[0] for moments in waits.waited)


def replayed(
    made: RunSketch, far: Links, staged: StagedSteps | None = None, seconds: float | None = None, most: int = MESSAGES
) -> TimeAccount | None:
    """The whole run over such links between islands; `RunReplay.run`. seconds: of a step; None: those of the clock."""
    config, topology = made.config, _topology(made.config, far)
    world, steps = config.world, config.run.steps
    own = step_seconds(config) if seconds is None else seconds
    each = [factor * own for factor in world.factors]
    replays = RunReplay(topology, each, made.opening(), config.run.seed, staged, most)
    account = replays.run(made.exchanges, made.rhythm(steps), steps)
    update = None if staged is None else subspace_updates(made, staged)
    if account is None or update is None:
        return account
    return account.plus(update[1], update[0].account(topology))


def _wanted_rate(made: RunSketch, outline: Outline, seconds: float) -> float | None:
    """The rate of the slowest link at which workers compute `UTILISATION` of the time in the method's own schedule, all
    links between islands scaled alike; where that is too much to replay, as if nothing were hidden behind computing.
    None: no rate is enough.
    """
    world, waited = made.config.world, outline.every * seconds * (1 / UTILISATION - 1)
    far = made.config.network if world.is_simulated else Links(bandwidth=_OWN_RATE)
    if math.isinf(far.slowest_rate(world.workers)):
        far = Links(bandwidth=_OWN_RATE, latency=far.latency)

    def played(rate: float) -> TimeAccount | None:
        """With links so many times as fast."""
        return replayed(made, far.scaled(rate), seconds=seconds, most=_SEARCHED)

    if played(1.0) is None:
        pairs = max((len(group) for one in outline.first for group in one.groups), default=1) == 2
        left_over = waited - (1 if pairs else 2) * far.longest_latency(world.workers)
        bits = 8 * (max(outline.sent) - outline.inside) / max(outline.rounds, 1)
        return bits / left_over if left_over > 0 else None
    factor = wanted_rate(lambda rate: 0.0 if (found := played(rate)) is None else found.share, UTILISATION)
    return None if not factor or math.isnan(factor) else factor * far.slowest_rate(world.workers)
