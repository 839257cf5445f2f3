"""A run in clusters that is only planned: what each worker holds and sends, and how long its updates take at least."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import ceil
from typing import Any

from isles.comm.codecs import codec
from isles.comm.collectives.mean import sent_bytes
from isles.models import limits, sketch
from isles.models.stages import Stage
from isles.network.clusters.splitting import ModelLoad
from isles.network.routing.routes import Task
from isles.pipeline.pipeline import Cut, form_of
from isles.pipeline.ravnest.mailbox import HEADER
from isles.pipeline.ravnest.quorum import word_bytes
from isles.pipeline.ravnest.refinement import SharedSegment
from isles.pipeline.ravnest.stage import AsyncWays, most_versions
from isles.pipeline.shares import stage_shares
from isles.pipeline.wire import StageForm
from isles.training.clustered.cuts import cluster_cuts, model_load, ranks_of, shared_segments
from isles.training.config.inner import inner_kind
from isles.training.config.sections import Config
from isles.training.staged import run_scheme


@dataclass(frozen=True, kw_only=True)
class ClusterSeat:
    """One worker. blocks: [first, stop). Bytes of memory: versions, all of them, the newest among them; gradients;
    inner, the optimizer's state; inputs, of microbatches in flight; activations, of these, or of one. Bytes sent: in a
    step to other stages; in an average to other clusters. seconds: of computing an update; None: not known.
    """

    rank: int
    cluster: int
    stage: int
    blocks: tuple[int, int]
    parameters: int
    versions: int
    weights: int
    gradients: int
    inner: int
    inputs: int
    activations: int
    bytes_a_step: int
    bytes_an_average: int
    seconds: float | None

    @property
    def memory(self) -> int:
        """At the peak."""
        return self.weights + self.gradients + self.inner + self.inputs + self.activations


@dataclass(frozen=True, kw_only=True)
class ClusteredRun:
    """The plan. averages: how many; agreements: on who is left, before validations that do not follow one; words:
    bytes that a worker sends in each. aside: workers that stand by. bytes_sent: by worker, validations and the start
    left out.
    """

    method: str
    backend: str
    steps: int
    averages: int
    agreements: int
    words: int
    aside: int
    parameters: int
    tokens_per_step: int
    seats: tuple[ClusterSeat, ...]
    segments: int
    notices: tuple[str, ...]

    @property
    def bytes_sent(self) -> list[int]:
        """Of each worker in the whole run."""
        agreed = self.agreements * self.words
        serving = [self.steps * seat.bytes_a_step + self.averages * seat.bytes_an_average for seat in self.seats]
        return [agreed + sent for sent in [*serving, *[self.averages * self.words] * self.aside]]

    def as_json(self) -> dict[str, Any]:
        """For machines."""
        return asdict(self) | {"bytes_sent": self.bytes_sent, "peak_bytes": [seat.memory for seat in self.seats]}


def dry_clusters(config: Config) -> ClusteredRun:
    """The plan of a run in clusters. ValueError for what the run would refuse."""
    cuts, pipeline = cluster_cuts(config), config.pipeline
    segments, clusters = shared_segments(config, cuts), len(cuts)
    model, context = sketch(config.model), limits(config.model).context
    sequences = config.data.batch_size_per_worker(clusters)
    load = model_load(config, cuts[0].costs)
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    seats = []
    for number, (cut, ranks) in enumerate(zip(cuts, ranks_of(cuts), strict=True)):
        form = form_of(
            Stage(model, cut.pieces[0]),
            run_scheme(config, cut),
            pipeline,
            batch_size=sequences,
            context=context,
            vocab=limits(config.model).vocab,
        )
        for stage, rank in enumerate(ranks):
            average = _average_bytes(config, segments, (number, stage), sizes, clusters, next(model.parameters()).dtype)
            seats.append(_seat(config, cut, load, form, (number, stage, rank), average))
    every = getattr(config.replicas, "sync_every", config.run.steps)
    looks, steps = config.run.validate_every, config.run.steps
    judged = range(looks, steps, looks) if looks and config.data.validation_fraction else ()
    notices = []
    if pipeline.clusters and config.world.is_simulated:
        notices.append("clusters are named: their stages reach each other over world.links")
    if pipeline.order == "arrival":
        notices.append(
            'pipeline.order = "arrival": how old gradients are depends on the network; memory is at most this'
        )
    return ClusteredRun(
        method=config.method,
        backend=config.world.backend,
        steps=steps,
        averages=ceil(steps / every) if clusters > 1 else 0,
        agreements=sum(step % every > 0 for step in judged) if clusters > 1 else 0,
        words=_words(config.world.workers),
        aside=config.world.workers - len(seats),
        parameters=sum(sizes.values()),
        tokens_per_step=clusters * sequences * context,
        seats=tuple(seats),
        segments=len(segments),
        notices=tuple(notices),
    )


def _seat(
    config: Config, cut: Cut, load: ModelLoad, form: StageForm, place: tuple[int, int, int], average: int
) -> ClusterSeat:
    (cluster, stage, rank), stages, parts = place, len(cut.pieces), config.pipeline.microbatches
    piece, last = cut.pieces[stage], stage == len(cut.pieces) - 1
    given = config.pipeline.in_flight
    ways = AsyncWays(in_flight=given if isinstance(given, int) else stages, every=parts, order=config.pipeline.order)
    weights = round(sum(load.weights[block] for block in piece.blocks))
    versions = most_versions(ways, stage, stages)
    room = 0 if last else ways.room(stage)
    ids = form.ids_shape[0] * form.ids_shape[1] * 8
    passes = 1 if last or config.pipeline.recompute else room
    kept = room * (ids + (0 if piece.enters else form.held_bytes))
    shares = stage_shares(piece, cut.costs, parts, recompute=config.pipeline.recompute)
    each = shares.both if last else shares.forward + shares.backward
    simulated = config.world.is_simulated
    down = 0 if last else HEADER + form.nbytes(Task("F", 0, 1))
    up = 0 if piece.enters else HEADER + form.nbytes(Task("B", 0, 0))
    return ClusterSeat(
        rank=rank,
        cluster=cluster,
        stage=stage,
        blocks=(piece.blocks.start, piece.blocks.stop),
        parameters=round(weights / form.dtype.itemsize),
        versions=versions,
        weights=versions * weights,
        gradients=weights,
        inner=round(load.states * weights),
        inputs=kept,
        activations=round(sum(load.saved[block] for block in piece.blocks)) * passes,
        bytes_a_step=parts * (down + up),
        bytes_an_average=average,
        seconds=parts * each * config.world.step_seconds * config.world.factors[rank] if simulated else None,
    )


def _words(workers: int) -> int:
    """Bytes of each time that all agree."""
    return 2 * word_bytes(workers) * (workers - 1)


def _average_bytes(
    config: Config,
    segments: list[SharedSegment],
    place: tuple[int, int],
    sizes: dict[str, int],
    clusters: int,
    dtype: Any,
) -> int:
    """Of one average in which nobody is lost: means and words."""
    if clusters == 1:
        return 0
    weighed = getattr(config.replicas, "weights", "equal") == "samples"
    copies = 3 if config.pipeline.average_optimizer and inner_kind(config.inner, "adamw") == "adamw" else 1
    total, (cluster, stage) = _words(config.world.workers), place
    for segment in segments:
        if segment.holders[cluster] == stage:
            count = copies * sum(sizes[name] for name in segment.names) + weighed
            total += sent_bytes(count, dtype, codec("none"), clusters, cluster)
    return total
