"""The stages of a run that is only planned: what each holds, what they send each other, and how a step of them goes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate

from isles.comm.codecs.casts import Identity
from isles.comm.layout import Layout
from isles.models import limits, sketch
from isles.models.stages import Stage, width_of
from isles.network.planner.memory import WorkerMemory
from isles.network.planner.planned import Tree
from isles.network.planner.stages import StagedSteps
from isles.network.planner.turning import PlannedTurn
from isles.network.routing.routes import Task
from isles.network.routing.wires import Sizes
from isles.pipeline.boundaries.base import FullStream
from isles.pipeline.boundaries.names import boundary_name
from isles.pipeline.boundaries.scheme import Scheme
from isles.pipeline.pipeline import form_of, router_of, ways_of
from isles.pipeline.wire import StageForm
from isles.training.config.planned import plan_of
from isles.training.config.sections import Config
from isles.training.dry_plans import plan_steps
from isles.training.placement import layout_of
from isles.training.plan.sketch import RunSketch, clips_model, reduces_first

_HASH_BYTES = 8


@dataclass(frozen=True, kw_only=True)
class StagePlan:
    """One stage of a replica. blocks: [first, stop) of the model's. forwards: that it keeps for their backward at the
    most. kept: bytes of what it got for them. bytes_a_step: that each of its workers sends to other stages in a step;
    of a plan, the one that sends most.
    """

    blocks: tuple[int, int]
    parameters: int
    memory: WorkerMemory
    forwards: int
    kept: int
    bytes_a_step: int


def form(config: Config, scheme: Scheme, stage: Stage) -> StageForm:
    """Of the messages between stages. stage: fitted to `scheme`."""
    context, vocab = limits(config.model)
    sequences = config.data.batch_size_per_worker(layout_of(config).reader(0)[1])
    return form_of(stage, scheme, config.pipeline, batch_size=sequences, context=context, vocab=vocab)


def stream_ratio(made: StageForm, width: int) -> float:
    """Bytes that cross between stages where all of a stream of `width` does, for each of those that do."""
    whole = replace(made, boundary=FullStream(width), codec=Identity(), gradient_codec=Identity())
    there, here = (form.nbytes(Task("F", 0, 1)) + form.nbytes(Task("B", 0, 0)) for form in (whole, made))
    return there / here


def staged_steps(run: RunSketch) -> StagedSteps | None:
    """The steps of a run in stages; None without them."""
    config, cut, scheme, stage = run.config, run.cut, run.scheme, run.pieces[0]
    if cut is None or scheme is None or not isinstance(stage, Stage):
        return None
    made, plan = form(config, scheme, stage), plan_of(config.pipeline)
    asks_norm = clips_model(config) and not reduces_first(config)
    sizes = Sizes(
        forward=made.nbytes(Task("F", 0, 1)),
        home=made.nbytes(Task("L", 0, 1)),
        backward=made.nbytes(Task("B", 0, 0)),
    )
    if plan is not None:
        return plan_steps(plan, config.pipeline, layout_of(config), sizes, asks_norm=asks_norm)
    replicas, stages, inner = config.replicas_in_all, config.pipeline.stages, config.world.inner
    ways = ways_of(config.pipeline, cut, replicas)
    assert ways.shares is not None
    return StagedSteps(
        routes=router_of(config.pipeline, replicas, home=cut.home, seed=config.run.seed).routes,
        most_held=ways.room,
        shares=ways.shares,
        sizes=sizes,
        columns=[[position * inner + own for position in range(replicas * stages)] for own in range(inner)],
        stages=stages,
        asks_norm=asks_norm,
    )


def turns_of(config: Config, staged: StagedSteps) -> tuple[PlannedTurn, int] | None:
    """How the subspace is turned, and how often in the run; None where it is not."""
    every = config.pipeline.subspace_update
    if not every:
        return None
    rank = boundary_name(config.pipeline.boundary).rank
    width = width_of(sketch(config.model))
    turn = PlannedTurn(columns=staged.columns, stages=staged.stages, width=width, rank=rank)
    return turn, (config.run.steps - 1) // every


def most_forwards(staged: StagedSteps) -> list[int]:
    """Forwards that each rank holds at once at the most, in the first step."""
    found = []
    for rank in range(sum(map(len, staged.columns))):
        held = accumulate({"F": 1, "L": 0, "B": -1}[task.kind] for task in staged.tasks(rank, 1))
        found.append(max(held, default=0))
    return found


def opening_bytes(layout: Layout, hashes: int) -> list[int]:
    """By rank: the first stage tells the others of its column whether it has text to judge with, and all tell each
    other so many `hashes`.
    """
    asked = _HASH_BYTES * hashes * (layout.size - 1)
    columns = (layout.sharing(rank, "replica", "inner") for rank in range(layout.size))
    return [asked + int(Tree(1).sent(column.index(rank), len(column))) for rank, column in enumerate(columns)]
