"""A run in a swarm that is only planned: what each peer holds and sends, and how long a step takes."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import ceil
from typing import Any

from isles.models import limits, sketch
from isles.models.stages import Stage
from isles.network.named import links
from isles.network.routing.routes import Task
from isles.network.topology import Topology
from isles.pipeline.pipeline import form_of
from isles.pipeline.shares import stage_shares
from isles.pipeline.swarm.arrangement import origins
from isles.pipeline.swarm.books import words_for
from isles.pipeline.swarm.forecast import HEAD, SwarmLoad, forecast
from isles.pipeline.swarm.swarm import COMERS
from isles.pipeline.swarm.told import PeerWord
from isles.training.config.inner import inner_bytes, inner_kind
from isles.training.config.sections import Config
from isles.training.config.swarmed import stages_of
from isles.training.memory.planned import step_seconds
from isles.training.staged import planned_cut, run_scheme
from isles.training.swarmed.step import ways_of

_OF_BOOKS, _OF_VERDICT = 2, len(PeerWord._fields) + COMERS
"""Numbers that a peer says of itself in the two agreements of a step; in the first its book is beside them."""
_STEPS = 5
"""Steps that are played behind the first."""


@dataclass(frozen=True, kw_only=True)
class SwarmSeat:
    """A peer. blocks: [first, stop). Bytes of memory: weights, gradients, inner optimizer's state; under_way: what it
    holds of microbatches until their gradients come; books: what it keeps of those that it has counted until the step
    counts. counted: microbatches a step, bytes_sent: in a step, both None where nobody says how fast peers are.
    """

    rank: int
    stage: int
    blocks: tuple[int, int]
    parameters: int
    weights: int
    gradients: int
    inner: int
    under_way: int | None
    books: int | None
    counted: float | None
    bytes_sent: int | None

    @property
    def memory(self) -> int:
        """At the peak, activations of its blocks left out."""
        return self.weights + self.gradients + self.inner + (self.under_way or 0) + (self.books or 0)


@dataclass(frozen=True, kw_only=True)
class SwarmRun:
    """The plan. bytes_a_step: of all peers, exact while nobody is lost and no deadline passes; seconds: of a step, None
    where nobody says how fast peers are; reached: share of what the slowest stage's peers can do together.
    """

    method: str
    backend: str
    steps: int
    parameters: int
    tokens_per_step: int
    microbatches: int
    bytes_a_microbatch: int
    bytes_a_step: int
    seconds: float | None
    reached: float | None
    seats: tuple[SwarmSeat, ...]

    @property
    def notices(self) -> tuple[str, ...]:
        """There are none."""
        return ()

    def as_json(self) -> dict[str, Any]:
        """For machines."""
        return asdict(self) | {"peak_bytes": [seat.memory for seat in self.seats]}


def dry_swarm(config: Config) -> SwarmRun:
    """The plan of a run in a swarm. ValueError for what the run would refuse, and for methods that exchange weights."""
    if config.method != "none":
        raise ValueError(
            f'replicas.method = "{config.method}" in a swarm is not planned: try `isles simulate`, or plan "none"'
        )
    if config.pipeline.delay_updates:
        raise ValueError("pipeline.delay_updates = 1 is not planned: try `isles simulate`, or plan 0")
    cut, pipeline, world = planned_cut(config), config.pipeline, config.world
    scheme, model = run_scheme(config, cut), sketch(config.model)
    scheme.fit(model)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    pieces = [Stage(model, piece) for piece in cut.pieces]
    context, vocab = limits(config.model)
    rows = config.data.batch_size_per_worker(1)
    form = form_of(pieces[0], scheme, pipeline, batch_size=rows, context=context, vocab=vocab)
    stages = [at for at, ranks in enumerate(stages_of(pipeline, world.workers)) for _ in ranks]
    down, up = HEAD + form.nbytes(Task("F", 0, 1)), HEAD + form.nbytes(Task("B", 0, 0))
    weights = [sum(own.nbytes for own in piece.parameters()) for piece in pieces]
    sums = [sum(own.nbytes for own in piece.parameters() if own.requires_grad) for piece in pieces]
    shares = [stage_shares(piece, cut.costs, pipeline.microbatches, recompute=False) for piece in cut.pieces]
    last, made, rates = len(pieces) - 1, None, [0.0] * len(pieces)
    if world.is_simulated:
        step, factors = step_seconds(config), world.factors
        both = [share.both if at == last else share.forward + share.backward for at, share in enumerate(shares)]
        forward = [shares[at].forward * step * factor for at, factor in zip(stages, factors, strict=True)]
        load = SwarmLoad(
            stages=stages,
            forward=forward,
            backward=[both[at] * step * factor - own for at, factor, own in zip(stages, factors, forward, strict=True)],
            down=down,
            up=up,
            microbatches=pipeline.microbatches,
            room=ways_of(pipeline, stages, 1.0).room,
            words=[_words(config, stages)[0] // world.workers] * world.workers,
            sums=[sums[at] for at in stages],
            topology=Topology(world.workers, links(world.links)),
        )
        made = forecast(load, lambda seconds: origins(range(pipeline.microbatches), seconds), steps=_STEPS)
        for at, factor in zip(stages, factors, strict=True):
            rates[at] += 1.0 / (both[at] * step * factor)
    seats = []
    for rank, at in enumerate(stages):
        stage, piece = pieces[at], cut.pieces[at]
        trained = [own for own in stage.parameters() if own.requires_grad]
        counted = None if made is None else made.counted[rank]
        came, left = (0 if piece.enters else down - HEAD), (0 if at == last else down - HEAD)
        back = up - HEAD
        kept = came + left + (0 if at == last else back) + (0 if piece.enters else back)
        seats.append(
            SwarmSeat(
                rank=rank,
                stage=at,
                blocks=(piece.blocks.start, piece.blocks.stop),
                parameters=sum(own.numel() for own in stage.parameters()),
                weights=weights[at],
                gradients=sums[at],
                inner=inner_bytes(trained, inner_kind(config.inner, "adamw")),
                under_way=None if made is None else made.held[rank] * (came + left),
                books=_books(config, counted, kept),
                counted=counted,
                bytes_sent=_sent(config, stages, rank, counted, down, up, sums[at]),
            )
        )
    each = (len(pieces) - 1) * (down + HEAD + up) - HEAD  # the last stage tells nobody that it has taken one
    summed = sum(
        2 * (count - 1) * (sums[at] + count * HEAD) for at in range(len(pieces)) if (count := stages.count(at)) > 1
    )
    bytes_a_step = pipeline.microbatches * each + sum(_words(config, stages)) + summed
    seconds = None if made is None else made.seconds
    return SwarmRun(
        method=config.method,
        backend=world.backend,
        steps=config.run.steps,
        parameters=parameters,
        tokens_per_step=rows * context,
        microbatches=pipeline.microbatches,
        bytes_a_microbatch=each,
        bytes_a_step=bytes_a_step,
        seconds=seconds,
        reached=None if seconds is None else pipeline.microbatches / min(rates) / seconds,
        seats=tuple(seats),
    )


def _words(config: Config, stages: list[int]) -> tuple[int, int]:
    """Bytes that all peers send in a step to agree, twice; and to say that they have all of their gradients."""
    workers = len(stages)
    ways, parts = workers * (workers - 1), config.pipeline.microbatches
    book = (
        _OF_BOOKS + {"exact": words_for(parts), "relaxed": words_for(parts), "strict": 1}[config.pipeline.consistency]
    )
    rows = [8 * (1 + words_for(workers) + said) for said in (book, _OF_VERDICT)]
    agreed = sum(ways * (2 * HEAD + (1 + workers) * row) for row in rows)
    return agreed, stages.count(0) * (workers - 1) * HEAD


def _books(config: Config, counted: float | None, kept: int) -> int | None:
    if config.pipeline.consistency != "exact":
        return 0
    return None if counted is None else ceil(counted) * kept


def _sent(
    config: Config, stages: list[int], rank: int, counted: float | None, down: int, up: int, gradients: int
) -> int | None:
    if counted is None:
        return None
    workers, at, last = len(stages), stages[rank], max(stages)
    alike = stages.count(at)
    agreed = _words(config, stages)[0] // workers + (0 if at else (workers - 1) * HEAD)
    summed = 2 * (alike - 1) * (gradients // alike + HEAD) if alike > 1 else 0
    taken = HEAD if 0 < at < last else 0
    return round(counted * ((down if at < last else 0) + (up + taken if at else 0))) + agreed + summed
