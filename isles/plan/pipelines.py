"""The stages of a run that is only planned: what each holds, what they send each other, and how a step of them goes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from isles.comm.codecs.scaled import Identity
from isles.models import limits
from isles.models.stages import Stage, width_of
from isles.network.exchange_plan import MessagePattern, PlannedExchange, Tree, WorkerMemory, by_size, gathered
from isles.network.links import Topology
from isles.network.networks import links
from isles.network.routing.events import orders_of
from isles.network.routing.plan import PipelinePlan
from isles.network.routing.problem import replay_paths
from isles.network.routing.replay import LinkWire, Sizes, TaskSeconds, in_order, replay
from isles.network.routing.routes import Task
from isles.pipeline.boundaries.base import FullStream
from isles.pipeline.boundaries.names import boundary_name
from isles.pipeline.pipeline import form_of, planned_routes, router_of, ways_of
from isles.pipeline.wire import StageForm
from isles.plan.pipeline_steps import StagedSteps
from isles.plan.record import WorkerPlan
from isles.plan.replay import RunReplay, TimeAccount
from isles.plan.sketch import HASH_BYTES, RunSketch, clips_model, reduces_first, sketch_run
from isles.training.config.conflicts import plan_of
from isles.training.config.reading import resolve
from isles.training.config.sections import Config
from isles.training.config.world import WorldConfig
from isles.training.kinds import layout_of

_NUMBER = 8  # bytes, float64


@dataclass(frozen=True, kw_only=True)
class SubspaceUpdate:
    """One update of the subspace. columns, stages: as of `StagedSteps`. width, rank: D and K."""

    columns: Sequence[Sequence[int]]
    stages: int
    width: int
    rank: int

    @property
    def workers(self) -> int:
        return sum(map(len, self.columns))

    @property
    def exchanges(self) -> list[PlannedExchange]:
        """One after the other, after the first step. Groups are of ranks."""
        own = [column[self.stages - 1 :: self.stages] for column in self.columns]  # the last stages' workers
        statistic, basis = _NUMBER * self.width**2, _NUMBER * self.width * self.rank
        firsts = range(0, len(self.columns[0]), self.stages)
        replicas = [
            (column[first + self.stages - 1], *column[first : first + self.stages - 1])
            for column in self.columns
            for first in firsts
        ]
        return [
            self._one(0, list(zip(*own, strict=True)), lambda size: gathered(statistic, size)),
            self._one(1, own, lambda size: gathered(statistic, size)),
            self._one(2, replicas, lambda size: Tree(basis)),
        ]

    @property
    def bytes_sent(self) -> tuple[float, ...]:
        """By rank."""
        return tuple(map(sum, zip(*(one.bytes_sent for one in self.exchanges), strict=True)))

    def account(self, topology: Topology) -> TimeAccount:
        """What a worker waits for it, where all come to it at once."""
        waits = RunReplay(topology, [0.0] * self.workers).waits(self.exchanges, 1)
        seconds = waits.waiting(1, 1)
        return TimeAccount(0.0, seconds, seconds)

    def _one(
        self, number: int, groups: Sequence[Sequence[int]], pattern: Callable[[int], MessagePattern]
    ) -> PlannedExchange:
        alone = set(range(self.workers)).difference(*groups)
        made = (*map(tuple, groups), *((rank,) for rank in sorted(alone)))
        return PlannedExchange(1.0, 1, 0, "turn", made, by_size(made, pattern), number, "inner")


_AS_PLANNED = 1e-6


def message_form(run: RunSketch, stage: int = 0) -> StageForm:
    """Of the messages between stages."""
    config, piece = run.config, run.pieces[stage]
    assert run.scheme is not None and isinstance(piece, Stage)
    context, vocab = limits(config.model)
    sequences = config.data.batch_size_per_worker(layout_of(config).reader(0)[1])
    return form_of(piece, run.scheme, config.pipeline, batch_size=sequences, context=context, vocab=vocab)


def stream_ratio(run: RunSketch) -> float:
    """Bytes that would cross between stages if all of the stream did, for each of those that do."""
    assert run.scheme is not None
    made = message_form(run)
    full = FullStream(run.scheme.crossings.width)
    whole = replace(made, boundary=full, codec=Identity(), gradient_codec=Identity())
    there, here = (form.nbytes(Task("F", 0, 1)) + form.nbytes(Task("B", 0, 0)) for form in (whole, made))
    return there / here


def staged_steps(run: RunSketch) -> StagedSteps:
    """The steps of a run in stages. By a plan of paths its nodes together are one replica, and a share of an inner step
    is a second.
    """
    config, made, plan = run.config, message_form(run), plan_of(run.config.pipeline)
    pipeline, replicas, inner = config.pipeline, config.replicas_in_all, config.world.inner
    forward, home, backward = (made.nbytes(task) for task in (Task("F", 0, 1), Task("L", 0, 1), Task("B", 0, 0)))
    if plan is None:
        assert run.cut is not None
        ways = ways_of(pipeline, run.cut, replicas)
        router = router_of(pipeline, replicas, home=run.cut.home, seed=config.run.seed)
        positions, stages = range(replicas * pipeline.stages), pipeline.stages
        columns = [[position * inner + own for position in positions] for own in range(inner)]
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
    """An update of the subspace, and how many a run has; None where there is none."""
    pipeline = run.config.pipeline
    if not pipeline.boundary.update_every:
        return None
    rank, width = boundary_name(pipeline.boundary.kind).rank, width_of(run.model)
    update = SubspaceUpdate(columns=staged.columns, stages=staged.stages, width=width, rank=rank)
    return update, (run.config.run.steps - 1) // pipeline.boundary.update_every


def stage_workers(run: RunSketch, staged: StagedSteps, memory: Sequence[WorkerMemory]) -> tuple[WorkerPlan, ...]:
    """Of each stage, or by a plan of paths of each node. memory: of a worker of each stage."""
    plan, layout, sent, forwards = plan_of(run.config.pipeline), layout_of(run.config), staged.sent(), list[int]()
    for rank in range(layout.size):
        held = accumulate({"F": 1, "L": 0, "B": -1}[task.kind] for task in staged.tasks(rank, 1))
        forwards.append(max(held, default=0))
    stage_of = [coordinate.stage for coordinate in layout.coordinates]
    visits = Counter[int]() if plan is None else Counter(node for route in plan.routes for node in route.visits)
    groups = [(rank,) for rank in range(layout.size)]
    if plan is None:
        groups = [tuple(rank for rank in range(layout.size) if stage_of[rank] == one) for one in sorted({*stage_of})]
    found = []
    for ranks in groups:
        stage = stage_of[ranks[0]]
        piece, form, held = run.pieces[stage], message_form(run, stage), max(forwards[rank] for rank in ranks)
        assert isinstance(piece, Stage)
        came = form.sequences * (form.length + 1) * 8 + (0 if piece.piece.enters else form.held_bytes)
        found.append(
            WorkerPlan(
                ranks=ranks,
                stage=stage,
                blocks=(piece.piece.blocks.start, piece.piece.blocks.stop),
                parameters=sum(parameter.numel() for parameter in piece.parameters()),
                memory=memory[stage],
                microbatches=None if plan is None else visits[ranks[0]],
                forwards=held,
                saved=held * came,
                step_bytes=max(sent[rank] for rank in ranks),
            )
        )
    return tuple(found)


def bytes_between(run: RunSketch, staged: StagedSteps) -> list[int]:
    """Bytes that each worker sends to other stages in the run, by rank; those for the gradient's norm are elsewhere.
    Before the first step the first stage tells the others of its column whether it has text to validate with, and all
    tell each other hashes.
    """
    config, layout, update = run.config, layout_of(run.config), subspace_updates(run, staged)
    assert run.scheme is not None
    hashes = HASH_BYTES * (run.scheme.compares + (plan_of(config.pipeline) is not None)) * (layout.size - 1)
    found = []
    for rank, nbytes in enumerate(staged.sent()):  # every route has as many messages in every step
        column = layout.sharing(rank, "replica", "inner")
        found.append(hashes + int(Tree(1).sent(column.index(rank), len(column))) + config.run.steps * nbytes)
    if update is None:
        return found
    return [own + update[1] * round(more) for own, more in zip(found, update[0].bytes_sent, strict=True)]


def seconds_of_paths(plan: PipelinePlan, sizes: Sizes, world: WorldConfig, seed: int) -> float:
    """From the start of a step to the end of its last task: the replay, in the plan's order, over the links and with
    the speeds of a virtual run; on real links what the plan says.
    """
    if not world.is_simulated:
        return plan.step_seconds
    problem, factors, routes = plan.problem, world.factors, plan.routes
    own, by_number = problem.seconds, {route.microbatch: route for route in routes}
    forward, loss, backward = (
        [seconds * factor for seconds, factor in zip(row, factors, strict=True)]
        for row in (own.forward, own.loss, own.backward)
    )
    return replay(
        routes,
        TaskSeconds(forward=forward, loss=loss, backward=backward),
        LinkWire(Topology(problem.nodes, links(world.virtual.links)), sizes, seed=seed),
        in_order(orders_of(replay_paths(problem, plan.paths).spans)),
        pause=lambda task: problem.rest(task) * factors[by_number[task.microbatch].worker(task)],
    ).makespan


def stage_notices(config: Config, seconds: float | None) -> list[str]:
    """What a user should know. seconds: of a step by a plan of paths."""
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
    """Bytes of a microbatch of so many tokens between stages, as float32 where no codec makes it smaller; ids of four
    bytes.

    Args:
        tokens: of the microbatch.
        width: of the stream.
        boundary: keys of [pipeline.boundary].

    Raises:
        ValueError: for what is no boundary, or does not fit such a stream.
    """
    model = {"d_model": width, "layers": 2, "heads": 1, "ffn": 1, "vocab": 1 << 24, "context": tokens}
    pipeline = {"stages": 2, "microbatches": 1, "boundary": boundary}
    world = {"workers": 2, "backend": "virtual"}
    run = sketch_run(resolve({"model": model, "data": {"batch_size": 1}, "pipeline": pipeline, "world": world}))
    return staged_steps(run).sizes
