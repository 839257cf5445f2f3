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
from isles.pipeline.swarm.forecast import HEAD, SwarmForecast, SwarmLoad, forecast
from isles.pipeline.swarm.swarm import COMERS
from isles.pipeline.swarm.told import PeerWord
from isles.training.config.inner import inner_kind
from isles.training.config.sections import Config
from isles.training.config.swarmed import stages_of
from isles.training.inner_optimizer import inner_bytes
from isles.training.memory.planned import step_seconds
from isles.training.staged import planned_cut, run_scheme
from isles.training.swarmed.step import ways_of

_OF_BOOKS, _OF_VERDICT = 2, len(PeerWord._fields) + COMERS
"""Numbers that a peer says of itself in the two agreements of a step; in the first its book is beside them."""
_STEPS = 5
"""Steps that are played behind the first."""


@dataclass(frozen=True, kw_only=True)
class SwarmSeat:
    """One peer of the plan.

    blocks: [first, stop). Bytes of memory: weights, gradients, inner (the optimizer's state), under_way (what it holds
    of microbatches until their gradients come), books (what it keeps of those that it has counted, until the step is
    over). counted: microbatches of a step. bytes_sent: in a step. The last four are None where the backend does not
    say how fast peers are.
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
        """Bytes at the peak, without the activations inside its blocks."""
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
    return _Planner(config).run()


class _Planner:
    """What the stages of a run take, from which its seats, bytes and seconds follow.

    stages: by rank. pieces: by stage. down, up: bytes of a microbatch's letters forward and backward, heads included.
    sums: by stage, bytes of its gradients.
    """

    def __init__(self, config: Config) -> None:
        self.config, self.cut = config, planned_cut(config)
        pipeline = config.pipeline
        scheme, self.model = run_scheme(config, self.cut), sketch(config.model)
        scheme.fit(self.model)
        self.pieces = [Stage(self.model, piece) for piece in self.cut.pieces]
        self.context, vocab = limits(config.model)
        self.rows = config.data.batch_size_per_worker(1)
        form = form_of(self.pieces[0], scheme, pipeline, batch_size=self.rows, context=self.context, vocab=vocab)
        self.down, self.up = HEAD + form.nbytes(Task("F", 0, 1)), HEAD + form.nbytes(Task("B", 0, 0))
        self.stages = [at for at, ranks in enumerate(stages_of(pipeline, config.world.workers)) for _ in ranks]
        self.sums = [sum(own.nbytes for own in piece.parameters() if own.requires_grad) for piece in self.pieces]

    def run(self) -> SwarmRun:
        """The plan."""
        config, pipeline = self.config, self.config.pipeline
        made, rate = (self._forecast(), self._slowest()) if config.world.is_simulated else (None, None)
        each = (len(self.pieces) - 1) * (self.down + HEAD + self.up) - HEAD  # the last stage tells nobody it took one
        return SwarmRun(
            method=config.method,
            backend=config.world.backend,
            steps=config.run.steps,
            parameters=sum(parameter.numel() for parameter in self.model.parameters()),
            tokens_per_step=self.rows * self.context,
            microbatches=pipeline.microbatches,
            bytes_a_microbatch=each,
            bytes_a_step=pipeline.microbatches * each + sum(_words(config, self.stages)) + self._summed(),
            seconds=None if made is None else made.seconds,
            reached=None if made is None or rate is None else pipeline.microbatches / rate / made.seconds,
            seats=tuple(self._seat(rank, made) for rank in range(len(self.stages))),
        )

    def _passes(self) -> list[tuple[float, float]]:
        """By rank, seconds of a microbatch: the forward pass, and both."""
        config, last = self.config, len(self.pieces) - 1
        microbatches, step = config.pipeline.microbatches, step_seconds(config)
        shares = [stage_shares(piece, self.cut.costs, microbatches, recompute=False) for piece in self.cut.pieces]
        both = [share.both if at == last else share.forward + share.backward for at, share in enumerate(shares)]
        return [
            (shares[at].forward * step * factor, both[at] * step * factor)
            for at, factor in zip(self.stages, config.world.factors, strict=True)
        ]

    def _forecast(self) -> SwarmForecast:
        config, workers = self.config, len(self.stages)
        pipeline, passes = config.pipeline, self._passes()
        load = SwarmLoad(
            stages=self.stages,
            forward=[forward for forward, _ in passes],
            backward=[both - forward for forward, both in passes],
            down=self.down,
            up=self.up,
            microbatches=pipeline.microbatches,
            room=ways_of(pipeline, self.stages, 1.0).room,
            words=[_words(config, self.stages)[0] // workers] * workers,
            sums=[self.sums[at] for at in self.stages],
            topology=Topology(workers, links(config.world.links)),
        )
        return forecast(load, lambda seconds: origins(range(pipeline.microbatches), seconds), steps=_STEPS)

    def _slowest(self) -> float:
        """Microbatches a second that the peers of the slowest stage can do together."""
        rates = [0.0] * len(self.pieces)
        for at, (_, both) in zip(self.stages, self._passes(), strict=True):
            rates[at] += 1.0 / both
        return min(rates)

    def _seat(self, rank: int, made: SwarmForecast | None) -> SwarmSeat:
        at = self.stages[rank]
        stage, piece, is_last = self.pieces[at], self.cut.pieces[at], at == len(self.pieces) - 1
        trained = [own for own in stage.parameters() if own.requires_grad]
        counted = None if made is None else made.counted[rank]
        came, left = (0 if piece.enters else self.down - HEAD), (0 if is_last else self.down - HEAD)
        back = self.up - HEAD
        kept = came + left + (0 if is_last else back) + (0 if piece.enters else back)
        return SwarmSeat(
            rank=rank,
            stage=at,
            blocks=(piece.blocks.start, piece.blocks.stop),
            parameters=sum(own.numel() for own in stage.parameters()),
            weights=sum(own.nbytes for own in stage.parameters()),
            gradients=self.sums[at],
            inner=inner_bytes(trained, inner_kind(self.config.inner, "adamw")),
            under_way=None if made is None else made.held[rank] * (came + left),
            books=_books(self.config, counted, kept),
            counted=counted,
            bytes_sent=None if counted is None else self._sent(rank, counted),
        )

    def _sent(self, rank: int, counted: float) -> int:
        """Bytes that a peer sends in a step in which it counts so many microbatches."""
        at, last, workers = self.stages[rank], len(self.pieces) - 1, len(self.stages)
        alike = self.stages.count(at)
        agreed = _words(self.config, self.stages)[0] // workers + (0 if at else (workers - 1) * HEAD)
        summed = 2 * (alike - 1) * (self.sums[at] // alike + HEAD) if alike > 1 else 0
        taken = HEAD if 0 < at < last else 0
        return round(counted * ((self.down if at < last else 0) + (self.up + taken if at else 0))) + agreed + summed

    def _summed(self) -> int:
        """Bytes that all peers send in a step to sum the gradients of their stages."""
        counts = [self.stages.count(at) for at in range(len(self.pieces))]
        return sum(
            2 * (count - 1) * (nbytes + count * HEAD)
            for nbytes, count in zip(self.sums, counts, strict=True)
            if count > 1
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
    """Bytes of a peer's books: `kept` for each microbatch that it counts; None where that is not known."""
    if config.pipeline.consistency != "exact":
        return 0
    return None if counted is None else ceil(counted) * kept
