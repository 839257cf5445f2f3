"""The plan of a run whose workers are fixed: whole replicas, islands, or replicas cut into stages.

A worker's memory, exchanges and advice come from the method's own optimizers around a sketch; waiting comes from a
replay of all their messages over the network of [world]. For stages: what each holds, what they send each other
(`staged_steps`), and how long a step takes.
"""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from isles.comm.codecs import codec
from isles.comm.codecs.scaled import Identity
from isles.comm.collectives.mean import sent_bytes
from isles.models import limits
from isles.models.stages import Stage, width_of
from isles.models.subspace import Subspace
from isles.network.exchange_plan import MessagePattern, PlannedExchange, Tree, WorkerMemory, by_size, gathered
from isles.network.links import Links, Topology, links
from isles.network.routing.events import Task, orders_of
from isles.network.routing.plan import PipelinePlan
from isles.network.routing.problem import replay_paths
from isles.network.routing.replay import LinkWire, Sizes, TaskSeconds, in_order, replay
from isles.pipeline.boundaries.base import FullStream
from isles.pipeline.boundaries.names import boundary_name
from isles.pipeline.partial import planned_routes
from isles.pipeline.pipeline import form_of, router_of, ways_of
from isles.pipeline.wire import StageForm
from isles.plan.memory_fit import counted_flops, measured_step
from isles.plan.pipeline_steps import StagedSteps
from isles.plan.record import RunPlan, RunTime, WorkerPlan, device_of
from isles.plan.replay import MESSAGES, RunReplay, TimeAccount
from isles.plan.sketch import HASH_BYTES, RunSketch, clips_model, reduces_first, sketch_run
from isles.plan.worker_classes import wanted_rate
from isles.replicas.exchange_schedule import Outline
from isles.replicas.sync import ReplicaSync
from isles.training.config.conflicts import plan_of
from isles.training.config.reading import resolve
from isles.training.config.sections import Config
from isles.training.config.world import WorldConfig
from isles.training.kinds import layout_of
from isles.training.memory.plans import prepared, step_seconds
from isles.training.optimizer import inner_bytes

_NUMBER = 8  # bytes, float64


@dataclass(frozen=True, kw_only=True)
class SubspaceUpdate:
    """One update of the subspace. columns, stages: as in `StagedSteps`. width, rank: D and K."""

    columns: Sequence[Sequence[int]]
    stages: int
    width: int
    rank: int

    @property
    def workers(self) -> int:
        return sum(map(len, self.columns))

    @property
    def exchanges(self) -> list[PlannedExchange]:
        """The exchanges, one after the other, after the first step. Groups are of ranks."""
        last_stages = [column[self.stages - 1 :: self.stages] for column in self.columns]  # the last stages' workers
        statistic, basis = _NUMBER * self.width**2, _NUMBER * self.width * self.rank
        firsts = range(0, len(self.columns[0]), self.stages)
        replicas = [
            (column[first + self.stages - 1], *column[first : first + self.stages - 1])
            for column in self.columns
            for first in firsts
        ]
        return [
            self._exchange(0, list(zip(*last_stages, strict=True)), lambda size: gathered(statistic, size)),
            self._exchange(1, last_stages, lambda size: gathered(statistic, size)),
            self._exchange(2, replicas, lambda size: Tree(basis)),
        ]

    @property
    def bytes_sent(self) -> tuple[float, ...]:
        """By rank."""
        return tuple(map(sum, zip(*(exchange.bytes_sent for exchange in self.exchanges), strict=True)))

    def account(self, topology: Topology) -> TimeAccount:
        """The waiting time of a worker, if all workers begin the update at once."""
        waits = RunReplay(topology, [0.0] * self.workers).waits(self.exchanges, 1)
        seconds = waits.account_of(1, 1).waiting
        return TimeAccount(0.0, seconds, seconds)

    def _exchange(
        self, number: int, groups: Sequence[Sequence[int]], pattern: Callable[[int], MessagePattern]
    ) -> PlannedExchange:
        alone = set(range(self.workers)).difference(*groups)
        all_groups = (*map(tuple, groups), *((rank,) for rank in sorted(alone)))
        return PlannedExchange(1.0, 1, 0, "turn", all_groups, by_size(all_groups, pattern), number, "inner")


_AS_PLANNED = 1e-6


def message_form(run: RunSketch, stage: int = 0) -> StageForm:
    """The form of the messages between stages."""
    config, piece = run.config, run.pieces[stage]
    assert run.scheme is not None and isinstance(piece, Stage)
    context, vocab = limits(config.model)
    sequences = config.data.batch_size_per_worker(layout_of(config).reader(0)[1])
    return form_of(piece, run.scheme, config.pipeline, batch_size=sequences, context=context, vocab=vocab)


def stream_ratio(run: RunSketch) -> float:
    """Bytes of the full residual stream for each byte that crosses between stages."""
    assert run.scheme is not None
    messages = message_form(run)
    full = FullStream(run.scheme.crossings.width)
    whole = replace(messages, boundary=full, codec=Identity(), gradient_codec=Identity())
    uncompressed, crossing = (form.nbytes(Task("F", 0, 1)) + form.nbytes(Task("B", 0, 0)) for form in (whole, messages))
    return uncompressed / crossing


def staged_steps(run: RunSketch) -> StagedSteps:
    """The steps of a run in stages. With a plan of paths, its nodes together are one replica, and shares of an inner
    step are seconds.
    """
    config, messages, plan = run.config, message_form(run), plan_of(run.config.pipeline)
    pipeline, replicas, inner = config.pipeline, config.replicas_in_all, config.world.inner
    forward, home, backward = (messages.nbytes(task) for task in (Task("F", 0, 1), Task("L", 0, 1), Task("B", 0, 0)))
    if plan is None:
        assert run.cut is not None
        ways = ways_of(pipeline, run.cut, replicas)
        router = router_of(pipeline, replicas, home=run.cut.home, seed=config.run.seed)
        positions, stages = range(replicas * pipeline.stages), pipeline.stages
        columns = [[position * inner + index for position in positions] for index in range(inner)]
    else:
        columns = [list(layout_of(config).sharing(0, "inner"))]
        stages = len(columns[0])
        router, ways = planned_routes(plan, columns[0], pipeline, "plan")
    assert ways.shares is not None
    return StagedSteps(
        routes=router,
        most_in_flight=ways.room,
        shares=ways.shares,
        sizes=Sizes(forward=forward, home=home, backward=backward),
        columns=columns,
        stages=stages,
        exchanges_norm=clips_model(config) and not reduces_first(config),
        listed=ways.tasks,
        rest=ways.rest or (lambda task: 0.0),
    )


def subspace_updates(run: RunSketch, staged: StagedSteps) -> tuple[SubspaceUpdate, int] | None:
    """An update of the subspace, and the number of updates in a run; None if there are none."""
    pipeline = run.config.pipeline
    if not pipeline.boundary.update_every:
        return None
    rank, width = boundary_name(pipeline.boundary.kind).rank, width_of(run.model)
    update = SubspaceUpdate(columns=staged.columns, stages=staged.stages, width=width, rank=rank)
    return update, (run.config.run.steps - 1) // pipeline.boundary.update_every


def stage_workers(run: RunSketch, staged: StagedSteps, memory: Sequence[WorkerMemory]) -> tuple[WorkerPlan, ...]:
    """Worker plans of each stage, or of each node of a plan of paths. memory: of a worker of each stage."""
    plan, layout, sent, forwards = plan_of(run.config.pipeline), layout_of(run.config), staged.sent(), list[int]()
    for rank in range(layout.size):
        in_flight = accumulate({"F": 1, "L": 0, "B": -1}[task.kind] for task in staged.tasks(rank, 1))
        forwards.append(max(in_flight, default=0))
    stage_of = [coordinate.stage for coordinate in layout.coordinates]
    visits = Counter[int]() if plan is None else Counter(node for route in plan.routes for node in route.visits)
    groups = [(rank,) for rank in range(layout.size)]
    if plan is None:
        groups = [tuple(rank for rank in range(layout.size) if stage_of[rank] == at) for at in sorted({*stage_of})]
    workers = []
    for ranks in groups:
        stage = stage_of[ranks[0]]
        piece, form, in_flight = run.pieces[stage], message_form(run, stage), max(forwards[rank] for rank in ranks)
        assert isinstance(piece, Stage)
        came = form.sequences * (form.length + 1) * 8 + (0 if piece.piece.enters else form.held_bytes)
        workers.append(
            WorkerPlan(
                ranks=ranks,
                stage=stage,
                blocks=(piece.piece.blocks.start, piece.piece.blocks.stop),
                parameters=sum(parameter.numel() for parameter in piece.parameters()),
                memory=memory[stage],
                microbatches=None if plan is None else visits[ranks[0]],
                forwards=in_flight,
                saved=in_flight * came,
                step_bytes=max(sent[rank] for rank in ranks),
            )
        )
    return tuple(workers)


def bytes_between(run: RunSketch, staged: StagedSteps) -> list[int]:
    """Bytes that each worker sends to other stages in the run, by rank, without the gradient norms'.

    Before the first step the first stage tells the others of its column whether there is validation text, and all
    exchange hashes.
    """
    config, layout, update = run.config, layout_of(run.config), subspace_updates(run, staged)
    assert run.scheme is not None
    hashes = HASH_BYTES * (run.scheme.compares + (plan_of(config.pipeline) is not None)) * (layout.size - 1)
    totals = []
    for rank, nbytes in enumerate(staged.sent()):  # every route has as many messages in every step
        column = layout.sharing(rank, "replica", "inner")
        totals.append(hashes + int(Tree(1).sent(column.index(rank), len(column))) + config.run.steps * nbytes)
    if update is None:
        return totals
    return [total + update[1] * round(sent) for total, sent in zip(totals, update[0].bytes_sent, strict=True)]


def seconds_of_paths(plan: PipelinePlan, sizes: Sizes, world: WorldConfig, seed: int) -> float:
    """Seconds from the start of a step to the end of its last task. On a virtual run: a replay in the plan's order with
    the run's links and speeds; on real links: the plan's own prediction.
    """
    if not world.is_simulated:
        return plan.step_seconds
    problem, factors, routes = plan.problem, world.factors, plan.routes
    planned, by_number = problem.seconds, {route.microbatch: route for route in routes}
    forward, loss, backward = (
        [seconds * factor for seconds, factor in zip(row, factors, strict=True)]
        for row in (planned.forward, planned.loss, planned.backward)
    )
    return replay(
        routes,
        TaskSeconds(forward=forward, loss=loss, backward=backward),
        LinkWire(Topology(problem.nodes, links(world.virtual.links)), sizes, seed=seed),
        in_order(orders_of(replay_paths(problem, plan.paths).spans)),
        pause=lambda task: problem.rest(task) * factors[by_number[task.microbatch].worker(task)],
    ).makespan


def stage_notices(config: Config, seconds: float | None) -> list[str]:
    """Notices for the user. seconds: of a step with a plan of paths."""
    pipeline, plan, notices = config.pipeline, plan_of(config.pipeline), []
    if plan is not None and not config.world.is_simulated:
        notices.append("a step of the plan has the seconds of the links that it was made for, not of the real ones")
    elif (
        plan is not None and seconds is not None and abs(seconds - plan.step_seconds) > _AS_PLANNED * plan.step_seconds
    ):
        notices.append(
            f"a step takes {seconds:.6g} s, its plan says {plan.step_seconds:.6g}: messages have other bytes, "
            "or nodes are slower than planned; plan again with the run's --message TOKENSxWIDTH, or another --task"
        )
    if pipeline.order == "arrival":
        notices.append('pipeline.order = "arrival" is planned as "plan"; where links vary it waits a little less')
    if pipeline.recovery.stage_loss:
        notices.append("what lost stages cost, and the messages that recover them, are not counted")
    return notices


def message_sizes(tokens: int, width: int, boundary: dict[str, Any]) -> Sizes:
    """Bytes of a microbatch of `tokens` tokens between stages, as float32 unless a codec makes it smaller; token ids
    take four bytes.

    Args:
        tokens: number of tokens of the microbatch.
        width: width of the stream.
        boundary: keys of [pipeline.boundary].

    Raises:
        ValueError: if `boundary` is invalid, or does not fit a stream of this width.
    """
    model = {"d_model": width, "layers": 2, "heads": 1, "ffn": 1, "vocab": 1 << 24, "context": tokens}
    pipeline = {"stages": 2, "microbatches": 1, "boundary": boundary}
    world = {"workers": 2, "backend": "virtual"}
    run = sketch_run(resolve({"model": model, "data": {"batch_size": 1}, "pipeline": pipeline, "world": world}))
    return staged_steps(run).sizes


UTILISATION = 0.95  # the bandwidth that reaches this is reported
_SEARCHED = 10_000  # the most messages to replay for each tried rate
_OWN_RATE = 1e9  # bits per second, where the search begins if the network is not known


def plan_replicas(config: Config, *, probe: bool = False, machines: int = 1) -> RunPlan:
    """The plan of a run with fixed workers, see `plan_run`."""
    world, run, pipeline = config.world, config.run, config.pipeline
    layout, paths, context = layout_of(config), plan_of(pipeline), limits(config.model).context
    readers = layout.reader(0)[1]
    sequences = config.data.batch_size_per_worker(readers) * config.inner.accumulation
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        sketch = sketch_run(config, -(-world.workers // machines))
        flops = counted_flops(config.model, sketch.model, context)
    first, notices = sketch.optimizers[0], list(sketch.notices)
    if type(first).schedule is ReplicaSync.schedule:
        notices.append(f"method {config.method} does not say what it exchanges: give it a schedule()")
    outlines = [one.outline(run.steps) for one in sketch.optimizers]
    outline, staged = max(outlines, key=lambda one: max(one.sent)), staged_steps(sketch) if sketch.cut else None
    seconds = step_seconds(config) if world.is_simulated else None
    if world.is_simulated and outline.about:
        notices.append(
            "the bytes sent depend on the values: bytes and waiting are estimates, and may be far off for a few steps"
        )
    if world.is_simulated and (world.virtual.step_jitter or world.virtual.pauses):
        notices.append(
            "times are of workers whose steps take equally long and who never pause; isles simulate counts more"
        )
    if probe and not world.is_simulated:
        seconds = measured_step(config, sequences, context)
        if sum(parameter.numel() for parameter in sketch.model.parameters()) < sketch.parameters:
            notices.append("the step was measured on the whole model; a worker's part of it takes less")
    if paths is not None and staged is not None:
        seconds = seconds_of_paths(paths, staged.sizes, world, run.seed)
    notices += [] if staged is None else stage_notices(config, seconds)
    time = _time(sketch, outline, seconds, staged)
    if world.is_simulated and time is not None and time.account is None:
        notices.append("waiting is not known: there are too many messages to replay; isles plan methods estimates it")
    total = [0] * layout.size if staged is None else bytes_between(sketch, staged)
    between = sum(total) / len(total)
    for ranks, one in zip(sketch.holders, outlines, strict=True):
        for rank, opening, sent in zip(ranks, one.opening, one.sent, strict=True):
            total[rank] += opening + sent
    dtype = first.parameters[0].dtype
    ddp = [sent_bytes(sketch.parameters, dtype, codec("none"), world.workers, index) for index in range(world.workers)]
    return RunPlan(
        config=config,
        placement=_arrangement(config),
        parameters=sketch.parameters,
        flops=flops,
        tokens_per_step=readers * sequences * context,
        workers=_workers(sketch, staged),
        placed=None if config.memory.method == "none" or pipeline.stages > 1 else prepared(config)[2],
        outline=outline,
        bytes_sent=tuple(total),
        between_stages=None if staged is None else between,
        stream_ratio=None if staged is None else stream_ratio(sketch),
        ddp_bytes=run.steps * sum(ddp) / len(ddp),
        step_seconds=seconds,
        time=time,
        startup=_startup(sketch) if world.is_simulated else None,
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


def _workers(sketch: RunSketch, staged: StagedSteps | None) -> tuple[WorkerPlan, ...]:
    """Worker plans of each stage or node; for whole replicas only one, because all workers are alike."""
    world = sketch.config.world
    memory = [worker_memory(sketch.config, optimizer) for optimizer in sketch.optimizers[:: world.inner]]
    if staged is not None:
        return stage_workers(sketch, staged, memory)
    count = sum(parameter.numel() for parameter in sketch.optimizers[0].model.parameters())
    return (WorkerPlan(ranks=tuple(range(world.workers)), parameters=count, memory=memory[0]),)


def worker_memory(config: Config, optimizer: ReplicaSync) -> WorkerMemory:
    """What the worker of a sketched `optimizer` holds."""
    subspace: Subspace | None = getattr(optimizer.model, "subspace", None)
    basis = 0 if subspace is None else subspace.nbytes
    return WorkerMemory(
        weights=sum(parameter.nbytes for parameter in optimizer.model.parameters()),
        tables=basis + sum(buffer.nbytes for buffer in optimizer.model.buffers()),
        gradients=sum(parameter.nbytes for parameter in optimizer.parameters),
        inner=inner_bytes(optimizer.parameters, optimizer),
        held=tuple(item for item in optimizer.memory() if item.when != "pinned" or device_of(config) != "cpu"),
    )


def _time(sketch: RunSketch, outline: Outline, seconds: float | None, staged: StagedSteps | None) -> RunTime | None:
    """None if nothing is sent, or the seconds of a step are not known."""
    world, steps = sketch.config.world, sketch.config.run.steps
    bits = 8 * (max(outline.sent) - outline.inside) / max(outline.rounds, 1)
    if not seconds or not (bits or outline.inside or staged):
        return None
    rate = latency = account = None
    if world.is_simulated:
        far = sketch.config.network
        rate, latency = far.slowest_rate(world.workers), far.longest_latency(world.workers)
        account = replayed(sketch, far, staged)
    return RunTime(
        account=account,
        step=None if account is None else (account.computing + account.waiting) / steps,
        round_wait=None if account is None else (account.waiting - account.for_stages) / max(outline.rounds, 1),
        rate=rate,
        latency=latency,
        wanted=None if staged is not None or not bits else _wanted_rate(sketch, outline, seconds),
    )


def _topology(config: Config, far: Links) -> Topology:
    world, island = config.world, config.island
    near = links(world.virtual.inner_links) if world.is_simulated else Links(bandwidth=math.inf)
    return Topology(world.workers, far, near if island > 1 else None, island)


def _startup(sketch: RunSketch) -> float | None:
    """Seconds of all exchanges before the first step; None where there are too many messages to replay."""
    config, opening = sketch.config, sketch.opening()
    if sum(exchange.messages for exchange in opening) > MESSAGES:
        return None
    workers, topology = config.world.workers, _topology(config, config.network)
    waits = RunReplay(topology, [0.0] * workers, opening, config.run.seed).waits([], 0)
    return max(moments[0] for moments in waits.waited)


def replayed(
    sketch: RunSketch, far: Links, staged: StagedSteps | None = None, seconds: float | None = None, most: int = MESSAGES
) -> TimeAccount | None:
    """The time account of the whole run over links `far` between islands, see `RunReplay.run`. seconds: of a step;
    None: those of the virtual clock.
    """
    config, topology = sketch.config, _topology(sketch.config, far)
    world, steps = config.world, config.run.steps
    step = step_seconds(config) if seconds is None else seconds
    each = [factor * step for factor in world.factors]
    replays = RunReplay(topology, each, sketch.opening(), config.run.seed, staged, most)
    account = replays.run(sketch.exchanges, sketch.rhythm(steps), steps)
    update = None if staged is None else subspace_updates(sketch, staged)
    if account is None or update is None:
        return account
    return account.plus(update[1], update[0].account(topology))


def _wanted_rate(sketch: RunSketch, outline: Outline, seconds: float) -> float | None:
    """The rate of the slowest link at which workers compute `UTILISATION` of the time, in the method's own schedule, if
    all links between islands are scaled alike. If that is too much to replay, the estimate assumes that no exchange
    overlaps with computing. None: no rate is enough.
    """
    world, waited = sketch.config.world, outline.every * seconds * (1 / UTILISATION - 1)
    far = sketch.config.network if world.is_simulated else Links(bandwidth=_OWN_RATE)
    if math.isinf(far.slowest_rate(world.workers)):
        far = Links(bandwidth=_OWN_RATE, latency=far.latency)

    def played(rate: float) -> TimeAccount | None:
        """The account with links `rate` times as fast."""
        return replayed(sketch, far.scaled(rate), seconds=seconds, most=_SEARCHED)

    if played(1.0) is None:
        pairs = max((len(group) for one in outline.first for group in one.groups), default=1) == 2
        left_over = waited - (1 if pairs else 2) * far.longest_latency(world.workers)
        bits = 8 * (max(outline.sent) - outline.inside) / max(outline.rounds, 1)
        return bits / left_over if left_over > 0 else None
    factor = wanted_rate(lambda rate: 0.0 if (account := played(rate)) is None else account.share, UTILISATION)
    return None if not factor or math.isnan(factor) else factor * far.slowest_rate(world.workers)
