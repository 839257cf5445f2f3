"""The stages of a run that is only planned: what each holds, what they send each other, and how a step of them goes."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

from isles.comm.codecs.casts import Identity
from isles.models import limits, sketch
from isles.models.stages import Stage, width_of
from isles.network.planner.memory import WorkerMemory
from isles.network.planner.planned import Tree
from isles.network.planner.stages import StagedSteps
from isles.network.planner.turning import PlannedTurn
from isles.network.routing.routes import Task
from isles.network.routing.wires import Sizes
from isles.pipeline.boundaries.names import boundary_name
from isles.pipeline.boundaries.none import FullStream
from isles.pipeline.boundaries.scheme import Scheme
from isles.pipeline.pipeline import Cut, form_of, router_of, ways_of
from isles.pipeline.wire import StageForm
from isles.training.config.sections import Config

_HASH_BYTES = 8


@dataclass(frozen=True, kw_only=True)
class StagePlan:
    """One stage of a replica. blocks: [first, stop) of the model's. forwards: that it keeps for their backward at the
    most. kept: bytes of what it got for them. bytes_a_step: that each of its workers sends to other stages in a step.
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
    readers = config.world.workers // config.pipeline.stages
    sequences = config.data.batch_size_per_worker(readers)
    return form_of(stage, scheme, config.pipeline, batch_size=sequences, context=context, vocab=vocab)


def stream_ratio(made: StageForm, width: int) -> float:
    """Bytes that cross between stages where all of a stream of `width` does, for each of those that do."""
    whole = replace(made, boundary=FullStream(width), codec=Identity(), gradient_codec=Identity())
    there, here = (form.nbytes(Task("F", 0, 1)) + form.nbytes(Task("B", 0, 0)) for form in (whole, made))
    return there / here


def staged_steps(config: Config, cut: Cut, scheme: Scheme, stage: Stage, *, asks_norm: bool) -> StagedSteps:
    """The steps of the run. stage: one of them."""
    replicas, stages, inner = config.replicas_in_all, config.pipeline.stages, config.world.inner
    ways = ways_of(config.pipeline, cut, replicas)
    made = form(config, scheme, stage)
    assert ways.shares is not None
    return StagedSteps(
        routes=router_of(config.pipeline, replicas, home=cut.home, seed=config.run.seed).routes,
        most_held=ways.room,
        shares=ways.shares,
        sizes=Sizes(
            forward=made.nbytes(Task("F", 0, 1)),
            home=made.nbytes(Task("L", 0, 1)),
            backward=made.nbytes(Task("B", 0, 0)),
        ),
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
    """Forwards that the workers of the first replica's stages hold at once at the most, in the first step."""
    held: Counter[int] = Counter()
    most: Counter[int] = Counter()
    for rank in staged.columns[0][: staged.stages]:
        for task in staged.tasks(rank, 1):
            held[rank] += {"F": 1, "L": 0, "B": -1}[task.kind]
            most[rank] = max(most[rank], held[rank])
    return [most[rank] for rank in staged.columns[0][: staged.stages]]


def opening_bytes(stages: int, inner: int, compared: int) -> list[int]:
    """By place in a replica: the first stage tells the others whether it has text to judge with, and all tell the
    `compared` workers which subspace they have.
    """
    hashes = _HASH_BYTES * (compared - 1) if compared else 0
    return [int(Tree(1).sent(stage, stages)) + hashes for stage in range(stages) for _ in range(inner)]
