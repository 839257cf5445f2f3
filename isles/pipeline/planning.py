"""How workers are best divided into replicas, stages and workers that share a stage: the step and memory of each split.

    job, split -> tasks of a step, exchanges between replicas and inside islands -> one replay -> SplitPlan

All splits take the same text a step of all workers, so each worker computes as long in all of them; what differs is
waiting. Of a large fleet some replicas are played, on lines as slow and as long as its worst; their workers send other
replicas what those of the whole fleet do. Exchanges are the closed forms of `isles.network.planner.closed`. Left out:
activations, the time to encode.
Loads no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Literal

from isles.models.cuts import Piece, PieceCosts, cut_points, pieces
from isles.network.links import Links
from isles.network.planner.closed import gradients, opening, random_pairs
from isles.network.planner.forms import form_of
from isles.network.planner.job import Job
from isles.network.planner.planned import PlannedExchange, Rhythm, Swap, among, by_size
from isles.network.planner.replay import TimeAccount, long_run
from isles.network.planner.stages import StagedSteps
from isles.network.planner.turning import PlannedTurn
from isles.network.planner.ways import WAYS, Way
from isles.network.routing.orders import in_flight
from isles.network.routing.routes import Route, fixed_routes, random_routes
from isles.network.topology import Topology
from isles.pipeline.boundaries.lengths import PlannedBoundary
from isles.pipeline.shares import task_shares

MESSAGES = 8_000
"""That are played of a split."""
_FLOAT = 4
_INSIDE, _FEWEST = 24_000, 4  # messages that are played where workers share stages, and steps of a round
_EACH = 2_000  # of them, about, of all means that begin together
_ISLANDS = 8  # workers that share a stage, at most
_WORKERS, _REPLICAS = 16, 4  # of a large fleet that are played: about so many workers, and replicas at the least

Routing = Literal["fixed", "random"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSplit:
    """replicas x stages x inner workers."""

    replicas: int
    stages: int
    inner: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StagesJob:
    """What is to be trained by replicas that may be cut. near: the links inside a replica; None: as between replicas.
    microbatches: of a replica's batch. method: between replicas, every so many inner steps. boundary: what
    crosses between stages. heavier: how many times as long as its own is what a part of a fleet sends other replicas.
    """

    job: Job
    routing: Routing = "fixed"
    microbatches: int = 4
    method: str = "diloco"
    every: int = 100
    near: Links | None = None
    boundary: PlannedBoundary = field(default_factory=PlannedBoundary)
    heavier: float = 1.0

    def __post_init__(self) -> None:
        if self.job.step_tokens is None:
            raise ValueError("--stages: give --tokens and --step-tokens too: what stages send each other hangs on them")
        if self.microbatches < 1 or self.every < 1:
            raise ValueError("--microbatches and --sync-every: choose 1 or more")
        planned = sorted({way.method for way in WAYS if not way.settings and way.every is None})
        if self.method not in planned:
            raise ValueError(f"--method {self.method}: with --stages choose one of {', '.join(planned)}")
        if self.tied and self.boundary.is_one_way:
            raise ValueError(
                f"--boundary {self.boundary.boundary}: this model's embedding is its head as well, so the stream must "
                "come home, and what leaves the last stage does not fit through; choose dct:0.75"
            )
        self.boundary.sizes(1, round(_width(self.job)))

    @property
    def way(self) -> Way:
        """Of `method`, with its defaults."""
        return next(way for way in WAYS if way.method == self.method and not way.settings)

    @property
    def costs(self) -> PieceCosts:
        """Of the decoder's blocks and head, by their matrices."""
        matrices, layers = self.job.known_matrices, self.job.layers
        block = 2.0 * sum(rows * columns * number for rows, columns, number in matrices[:4]) / layers
        return PieceCosts(blocks=(block,) * layers, head=2.0 * _head(self.job))

    @property
    def tied(self) -> bool:
        """Whether the head is the embedding, so that the loss is at the first stage."""
        return len(self.job.known_matrices) > 4 and self.job.known_matrices[4][2] == 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitPlan:
    """A split with seconds of an inner step and of what a worker does in it: computes, waits for its pipeline, waits
    for other replicas and inside its stage. bytes_a_step: that a worker sends to other stages in a step, and to other
    replicas on average. memory: bytes of the fullest worker; on_device: those
    where it computes.
    """

    split: WorkerSplit
    step: float
    computing: float
    bubble: float
    waiting: float
    stage_bytes: float
    outer_bytes: float
    memory: float
    on_device: float


def splits(workers: int, layers: int, stages: Sequence[int] | None) -> list[WorkerSplit]:
    """All that fill `workers`; stages: those that are wanted. ValueError where none does."""
    wanted = range(1, min(workers, layers) + 1) if stages is None else stages
    found = [
        WorkerSplit(replicas=workers // (number * inner), stages=number, inner=inner)
        for number in wanted
        for inner in range(1, min(workers // max(number, 1), _ISLANDS) + 1)
        if 1 <= number <= min(layers, 16) and workers % (number * inner) == 0
    ]
    if not found:
        asked = ", ".join(map(str, wanted))
        raise ValueError(f"--stages {asked}: {workers} workers and {layers} layers make no such replicas; choose fewer")
    return found


def plan_splits(asked: StagesJob, found: Sequence[WorkerSplit]) -> list[SplitPlan]:
    """Each of them, that with the shortest step first."""
    return sorted((planned(asked, split) for split in found), key=lambda one: (one.step, one.memory))


def planned(asked: StagesJob, split: WorkerSplit) -> SplitPlan:
    """One split."""
    job = asked.job
    few, part = _played_part(asked, split)
    staged, made = steps_of(few, part), _pieces(asked, split.stages)
    account = replayed(few, part, staged)
    rounds = asked.every
    outer = 0.0
    if split.replicas > 1:
        form = form_of(asked.way.codec, job)
        model = job.parameters / split.stages / split.inner
        outer = asked.way.payloads(split.replicas, form) * form.bits / 8 * model / rounds
    sent = sum(staged.sent()) / few.job.workers
    turn = turn_of(asked, split, staged if part is split else steps_of(asked, split))
    if turn is not None:
        account = account.plus(rounds / asked.boundary.turn_every, turn.account(_topology(asked, split)))
        sent += sum(turn.bytes_sent) / asked.boundary.turn_every / job.workers
    share = max(_held(job, piece) for piece in made)
    on_device, memory = _memory(asked, split, share)
    table = asked.boundary.table_bytes(_vocab(job), round(_width(job))) if split.stages > 1 else 0.0
    return SplitPlan(
        split=split,
        step=(account.computing + account.waiting) / rounds,
        computing=account.computing / rounds,
        bubble=account.for_stages / rounds,
        waiting=(account.waiting - account.for_stages) / rounds,
        stage_bytes=sent,
        outer_bytes=outer,
        memory=memory + table,
        on_device=on_device + table,
    )


def _played_part(asked: StagesJob, split: WorkerSplit) -> tuple[StagesJob, WorkerSplit]:
    """What is played of it: all of it, or some replicas."""
    job, way, island = asked.job, asked.way, split.stages * split.inner
    few = max(_REPLICAS, _WORKERS // island)
    if split.replicas <= few:
        return asked, split
    assert job.step_tokens is not None
    form, slowest = form_of(way.codec, job), job.links.slowest_rate(job.workers)
    part = replace(
        job,
        workers=few * island,
        links=Links(bandwidth=slowest, latency=job.links.longest_latency(job.workers), jitter=job.links.jitter),
        step_tokens=job.step_tokens * few / split.replicas,
    )
    heavier = way.payloads(split.replicas, form) / way.payloads(few, form)
    return replace(asked, job=part, heavier=heavier), replace(split, replicas=few)


def steps_of(asked: StagesJob, split: WorkerSplit) -> StagedSteps:
    """The tasks of its steps."""
    job, stages, replicas = asked.job, split.stages, split.replicas
    assert job.step_tokens is not None
    tokens = job.step_tokens / (replicas * split.inner * asked.microbatches)
    return StagedSteps(
        routes=_Routes(replicas, stages, asked.microbatches, home=asked.tied, routing=asked.routing),
        most_held=in_flight("auto", replicas, stages),
        shares=task_shares(_pieces(asked, stages), asked.costs, asked.microbatches, replicas, recompute=False),
        sizes=asked.boundary.sizes(tokens, round(_width(job))),
        columns=[[position * split.inner + own for position in range(replicas * stages)] for own in range(split.inner)],
        stages=stages,
        asks_norm=stages > 1,
    )


def turn_of(asked: StagesJob, split: WorkerSplit, staged: StagedSteps) -> PlannedTurn | None:
    """What turning the subspace sends; None where nothing is turned."""
    if not asked.boundary.turn_every or split.stages == 1:
        return None
    width = round(_width(asked.job))
    return PlannedTurn(columns=staged.columns, stages=split.stages, width=width, rank=asked.boundary.rank)


def replayed(asked: StagesJob, split: WorkerSplit, staged: StagedSteps) -> TimeAccount:
    """Of a round, in the long run. Where workers share stages, and so exchange in every step, most steps of long rounds
    stand for those that are played.
    """
    if split.inner == 1:
        return _played(asked, split, staged, asked.every, outer=True)
    each = sum(one.messages for one in _exchanges(asked, split, 1, every=2)) + staged.messages
    every = min(asked.every, max(_FEWEST, _INSIDE // (3 * each)))
    played = _played(asked, split, staged, every, outer=True)
    if every == asked.every:
        return played
    return played.plus(asked.every - every, _played(asked, split, staged, 1, outer=False))


def _played(asked: StagesJob, split: WorkerSplit, staged: StagedSteps, every: int, *, outer: bool) -> TimeAccount:
    """Of a round of so many steps; outer: with what replicas exchange."""
    job = asked.job
    found = long_run(
        lambda steps: _exchanges(asked, split, steps, every=every if outer else steps + 1),
        Rhythm(0, every),
        _topology(asked, split),
        [job.step_seconds * split.stages] * job.workers,
        _opening(asked, split),
        messages=MESSAGES if split.inner == 1 else _INSIDE,
        rounds=6,
        staged=staged,
    )
    if found is None:
        raise ValueError(
            f"{split.stages} stages of {split.inner} workers send too many messages to be played: choose fewer "
            "--microbatches, or fewer stages"
        )
    return found


def _topology(asked: StagesJob, split: WorkerSplit) -> Topology:
    job, island = asked.job, split.stages * split.inner
    return Topology(job.workers, job.links, asked.near, island if asked.near is not None else 1)


@dataclass(frozen=True)
class _Routes:
    replicas: int
    stages: int
    microbatches: int
    home: bool
    routing: Routing

    def __call__(self, step: int) -> Sequence[Route]:
        if self.routing == "random" and self.replicas > 1:
            return random_routes(self.replicas, self.stages, self.microbatches, home=self.is_home, seed=0, step=step)
        return fixed_routes(self.replicas, self.stages, self.microbatches, home=self.is_home)

    @property
    def is_home(self) -> bool:
        return self.home and self.stages > 1


def _part(job: Job, pieces: int, workers: int) -> Job:
    """One of so many, of the workers that hold it. What is exchanged does not hang on the lines."""
    return replace(
        job,
        parameters=job.parameters / pieces,
        workers=workers,
        links=Links(bandwidth=1.0),
        matrices=None,
        messages=_EACH * workers / job.workers,
    )


def _exchanges(asked: StagesJob, split: WorkerSplit, steps: int, *, every: int) -> list[PlannedExchange]:
    numbers, made = count(), []
    job, island = asked.job, split.stages * split.inner
    if split.inner > 1:
        own = _part(job, split.stages, split.inner)
        inside = gradients(own, form_of("none", own), 1, None).planned(steps)
        spread = _spreads(asked, split, range(every, steps + 1, every))
        for first in range(0, job.workers, split.inner):
            ranks = range(first, first + split.inner)
            made += [one._replace(channel="inner") for one in among(ranks, inside, numbers)]
            made += among(ranks, spread, numbers)
    if split.replicas > 1 and every <= steps:
        outer = _part(job, island, split.replicas)
        outer = replace(outer, parameters=outer.parameters * asked.heavier)
        course = asked.way.exchanges(
            outer, form_of(asked.way.codec, outer), every, lambda round: random_pairs(split.replicas, round)
        )
        between = course.planned(steps)
        for place in range(island):
            made += among(range(place, job.workers, island), between, numbers)
    return sorted(made, key=lambda one: (-(-one.sent // 1), one.sent, one.what == "spread"))


def _spreads(asked: StagesJob, split: WorkerSplit, moments: Sequence[int]) -> list[PlannedExchange]:
    """What makes the copies of a stage whole again after a landing."""
    if split.replicas == 1:
        return []
    groups = (tuple(range(split.inner)),)
    each = _FLOAT * asked.job.parameters / split.stages / split.inner
    pattern = by_size(groups, lambda size: Swap((each,) * size))
    return [PlannedExchange(at, at, 0, "spread", groups, pattern, at, "inner") for at in moments]


def _opening(asked: StagesJob, split: WorkerSplit) -> list[PlannedExchange]:
    if split.replicas == 1:
        return []
    job, island, numbers = asked.job, split.stages * split.inner, count()
    own = _part(job, island, split.replicas)
    found = [among(range(place, job.workers, island), opening(own), numbers) for place in range(island)]
    return [one for place in found for one in place]


def _memory(asked: StagesJob, split: WorkerSplit, parameters: float) -> tuple[float, float]:
    """Bytes of a worker that holds so many, where it computes, and in all at its fullest. The workers of a stage share
    what the method keeps.
    """
    if split.replicas == 1:
        alone = next(way for way in WAYS if way.method == "ddp").memory(replace(asked.job, parameters=parameters))
        return alone.computing, alone.computing
    own = replace(_part(asked.job, 1, split.replicas), parameters=parameters)
    memory = asked.way.memory(own)
    return memory.computing, memory.computing + (memory.peak - memory.computing) / split.inner


def _pieces(asked: StagesJob, stages: int) -> list[Piece]:
    home = asked.tied and stages > 1
    cuts = cut_points(asked.costs.to_cut(loss_at_origin=home), stages)
    return pieces(cuts, asked.job.layers, loss_at_origin=home)


def _held(job: Job, piece: Piece) -> float:
    """Parameters of a piece."""
    matrices = job.known_matrices
    blocks = sum(rows * columns * number for rows, columns, number in matrices[:4]) / job.layers
    ends = _head(job) * (int(piece.enters) + int(piece.leaves))
    if len(matrices) > 4 and matrices[4][2] == 1:
        ends = _head(job) * int(piece.enters)
    return len(piece.blocks) * blocks + ends


def _head(job: Job) -> float:
    """Parameters of the head; 0 where the vocabulary is not known."""
    matrices = job.known_matrices
    return matrices[4][0] * matrices[4][1] if len(matrices) > 4 else 0.0


def _vocab(job: Job) -> float:
    """Token ids; 0 where they are not known."""
    return _head(job) / _width(job)


def _width(job: Job) -> float:
    """Of the stream."""
    return job.known_matrices[1][1]
