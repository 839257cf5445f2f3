"""The plan of a run in a swarm: what each peer holds and sends, and how long a step takes.

Also the plan of a run in clusters of asynchronous stages: what each worker holds and sends, and the least time of its
updates.
"""

from __future__ import annotations

from math import ceil

import torch

from isles.comm.codecs import codec
from isles.comm.collectives.mean import pattern
from isles.comm.collectives.message_queue import HEAD
from isles.models import limits, sketch
from isles.models.stages import Stage
from isles.network.clusters import ModelLoad
from isles.network.exchange_plan import MemoryItem, WorkerMemory
from isles.network.links import Topology, links
from isles.network.routing.events import Task
from isles.pipeline.compute import stage_shares
from isles.pipeline.peers.agreement import agreed_bytes
from isles.pipeline.peers.inbox import MAX_JOINERS
from isles.pipeline.pipeline import Cut, form_of
from isles.pipeline.ravnest.stage import HEADER, most_versions, room_of
from isles.pipeline.swarm.forecast import SwarmForecast, SwarmLoad, forecast
from isles.pipeline.swarm.ledger import words_for
from isles.pipeline.swarm.placement import PeerStats, origins
from isles.pipeline.wire import StageForm
from isles.plan.record import RunPlan, RunTime, WorkerPlan
from isles.plan.replay import TimeAccount
from isles.training.clusters.stage_server import cluster_cuts, model_load, shared_segments
from isles.training.config.sections import Config
from isles.training.memory.plans import step_seconds
from isles.training.optimizer import inner_bytes, inner_optimizer, moments
from isles.training.stage_runner import planned_cut, run_scheme
from isles.training.swarm.step import origin_room

_LEDGER_NUMBERS, _VOTE_NUMBERS = 2, len(PeerStats._fields) + MAX_JOINERS
"""Numbers that a peer sends about itself in the two agreements of a step; the first carries its ledger, too."""
_STEPS = 5
"""Steps to simulate after the first."""


def plan_swarm(config: Config) -> RunPlan:
    """The plan of a swarm, see `plan_run`. ValueError for what the run would refuse, and for methods that exchange
    weights.
    """
    if config.method != "none":
        raise ValueError(
            f'replicas.method = "{config.method}" in a swarm is not planned: try `isles simulate`, or plan "none"'
        )
    if config.pipeline.swarm.delay_updates:
        raise ValueError("pipeline.swarm.delay_updates = 1 is not planned: try `isles simulate`, or plan 0")
    return _SwarmPlanner(config).plan()


class _SwarmPlanner:
    """Computes the resources of each stage, from which workers, bytes and seconds follow.

    stages: by rank. pieces: by stage. down, up: bytes of a microbatch's messages forward and backward, headers
    included. sums: by stage, bytes of its gradients. agreed: bytes per step that a peer sends in its two agreements.
    passes: by rank, seconds of a microbatch's forward pass, and of forward and backward.
    """

    def __init__(self, config: Config) -> None:
        self.config, self.cut = config, planned_cut(config)
        scheme, self.model = run_scheme(config, self.cut), sketch(config.model)
        scheme.fit(self.model)
        self.pieces = [Stage(self.model, piece) for piece in self.cut.pieces]
        self.context, vocab = limits(config.model)
        self.rows, parts = config.data.batch_size_per_worker(1), config.pipeline.microbatches
        form = form_of(self.pieces[0], scheme, config.pipeline, batch_size=self.rows, context=self.context, vocab=vocab)
        self.down, self.up = HEAD + form.nbytes(Task("F", 0, 1)), HEAD + form.nbytes(Task("B", 0, 0))
        self.stages = [at for at, ranks in enumerate(config.pipeline.peers_of(config.world.workers)) for _ in ranks]
        self.sums = [sum(p.nbytes for p in piece.parameters() if p.requires_grad) for piece in self.pieces]
        workers, step, last = len(self.stages), step_seconds(config), len(self.pieces) - 1
        ledger = _LEDGER_NUMBERS + (1 if config.pipeline.swarm.consistency == "strict" else words_for(parts))
        self.agreed = sum(agreed_bytes(workers, numbers) for numbers in (ledger, _VOTE_NUMBERS))
        shares = [stage_shares(piece, self.cut.costs, parts, recompute=False) for piece in self.cut.pieces]
        both = [share.both if at == last else share.forward + share.backward for at, share in enumerate(shares)]
        self.passes = [
            (shares[at].forward * step * factor, both[at] * step * factor)
            for at, factor in zip(self.stages, config.world.factors, strict=True)
        ]

    def plan(self) -> RunPlan:
        config, stages, parts = self.config, self.stages, self.config.pipeline.microbatches
        predicted = self._forecast() if config.world.is_simulated else None
        each = (len(self.pieces) - 1) * (self.down + HEAD + self.up) - HEAD  # the last stage acknowledges to nobody
        summed = sum(
            2 * (count - 1) * (nbytes + count * HEAD)
            for count, nbytes in zip(map(stages.count, range(len(self.pieces))), self.sums, strict=True)
        )
        done = (
            stages.count(0) * (len(stages) - 1) * HEAD
        )  # the peers of the first stage report that they have all gradients
        return RunPlan(
            config=config,
            placement=f"a swarm of {len(self.pieces)} stages",
            parameters=sum(parameter.numel() for parameter in self.model.parameters()),
            tokens_per_step=self.rows * self.context,
            workers=tuple(self._worker(rank, predicted) for rank in range(len(stages))),
            microbatch_bytes=each,
            swarm_bytes=parts * each + len(stages) * self.agreed + done + summed,
            time=None if predicted is None else self._time(predicted),
        )

    def _forecast(self) -> SwarmForecast:
        config, workers, parts = self.config, len(self.stages), self.config.pipeline.microbatches
        load = SwarmLoad(
            stages=self.stages,
            forward=[forward for forward, _ in self.passes],
            backward=[both - forward for forward, both in self.passes],
            down=self.down,
            up=self.up,
            microbatches=parts,
            room=origin_room(config.pipeline, self.stages),
            words=[self.agreed] * workers,
            sums=[self.sums[at] for at in self.stages],
            topology=Topology(workers, links(config.world.virtual.links)),
        )
        return forecast(load, lambda seconds: origins(range(parts), seconds), steps=_STEPS)

    def _time(self, predicted: SwarmForecast) -> RunTime:
        computed = [counted * both for counted, (_, both) in zip(predicted.counted, self.passes, strict=True)]
        computing, steps = sum(computed) / len(computed), self.config.run.steps
        rates = [0.0] * len(self.pieces)  # microbatches a second that the peers of a stage can do together
        for at, (_, both) in zip(self.stages, self.passes, strict=True):
            rates[at] += 1.0 / both
        return RunTime(
            account=TimeAccount(steps * computing, steps * (predicted.seconds - computing)),
            step=predicted.seconds,
            reached=self.config.pipeline.microbatches / min(rates) / predicted.seconds,
        )

    def _worker(self, rank: int, predicted: SwarmForecast | None) -> WorkerPlan:
        at, last = self.stages[rank], len(self.pieces) - 1
        stage, piece = self.pieces[at], self.cut.pieces[at]
        counted = None if predicted is None else predicted.counted[rank]
        trained = [parameter for parameter in stage.parameters() if parameter.requires_grad]
        came, left = (0 if piece.enters else self.down - HEAD), (0 if at == last else self.down - HEAD)
        back = self.up - HEAD
        saved = came + left + (0 if at == last else back) + (0 if piece.enters else back)
        items = []
        if predicted is not None and counted is not None:
            items.append(MemoryItem("microbatches in flight", predicted.held[rank] * (came + left), "step"))
            if self.config.pipeline.swarm.consistency == "exact":
                items.append(MemoryItem("passes saved until the step's end", ceil(counted) * saved, "step"))
        return WorkerPlan(
            ranks=(rank,),
            stage=at,
            blocks=(piece.blocks.start, piece.blocks.stop),
            parameters=sum(parameter.numel() for parameter in stage.parameters()),
            memory=WorkerMemory(
                weights=sum(parameter.nbytes for parameter in stage.parameters()),
                gradients=self.sums[at],
                inner=inner_bytes(trained, inner_optimizer(stage, self.config.inner, "adamw")),
                held=tuple(items),
            ),
            microbatches=counted,
            step_bytes=None if counted is None else self._sent(at, counted),
            seconds=None if counted is None else counted * self.passes[rank][1],
        )

    def _sent(self, at: int, counted: float) -> int:
        """Bytes that a peer of stage `at` sends in a step in which it counts `counted` microbatches."""
        last, alike = len(self.pieces) - 1, self.stages.count(at)
        agreed = self.agreed + (0 if at else (len(self.stages) - 1) * HEAD)
        summed = 2 * (alike - 1) * (self.sums[at] // alike + HEAD) if alike > 1 else 0
        taken = HEAD if 0 < at < last else 0
        return round(counted * ((self.down if at < last else 0) + (self.up + taken if at else 0))) + agreed + summed


def plan_clusters(config: Config) -> RunPlan:
    """The plan of clusters, see `plan_run`. Bytes sent are without validations and the start."""
    cuts, pipeline, world, steps = cluster_cuts(config), config.pipeline, config.world, config.run.steps
    segments, clusters = shared_segments(config, cuts), len(cuts)
    model, (context, vocab) = sketch(config.model), limits(config.model)
    sequences, load = config.data.batch_size_per_worker(clusters), model_load(config, cuts[0].costs)
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    settled = agreed_bytes(world.workers, 0)  # in an agreement on the remaining workers
    vote = settled + agreed_bytes(world.workers, 1)  # in the agreements of an average
    weighed = getattr(config.replicas, "weights", "equal") == "samples"
    states = moments(inner_optimizer(model, config.inner, "adamw")) if pipeline.ravnest.average_optimizer else {}
    copies = {name: 1 + states.get(id(parameter), 0) for name, parameter in model.named_parameters()}
    dtype = next(model.parameters()).dtype
    workers = []
    for number, cut in enumerate(cuts):
        first, scheme = Stage(model, cut.pieces[0]), run_scheme(config, cut)
        form = form_of(first, scheme, pipeline, batch_size=sequences, context=context, vocab=vocab)
        for stage in range(len(cut.pieces)):
            stage_segments = [segment for segment in segments if segment.holders[number] == stage]
            counts = [sum(copies[name] * sizes[name] for name in one.names) + weighed for one in stage_segments]
            average = vote + sum(_mean_bytes(count, dtype, clusters, number) for count in counts)
            position = number, stage, len(workers)
            workers.append(_worker(config, cut, load, form, position, average if clusters > 1 else 0))
    every, looks = getattr(config.replicas, "sync_every", steps), config.run.validate_every
    validations = range(looks, steps, looks) if looks and config.data.validation_fraction else ()
    averages = ceil(steps / every) if clusters > 1 else 0
    agreements = sum(step % every > 0 for step in validations) if clusters > 1 else 0
    standby = world.workers - len(workers)
    active = [steps * (worker.step_bytes or 0) + averages * (worker.average_bytes or 0) for worker in workers]
    notices = []
    if pipeline.ravnest.clusters and world.is_simulated:
        notices.append("clusters are named: their stages reach each other over world.virtual.links")
    if pipeline.order == "arrival":
        notices.append(
            'pipeline.order = "arrival": how old gradients are depends on the network; memory is at most this'
        )
    return RunPlan(
        config=config,
        placement=f"{clusters} clusters of asynchronous stages",
        parameters=sum(sizes.values()),
        tokens_per_step=clusters * sequences * context,
        workers=tuple(workers),
        standby=standby,
        bytes_sent=tuple(agreements * settled + sent for sent in [*active, *[averages * vote] * standby]),
        averages=averages,
        segments=len(segments),
        agreements=agreements,
        notices=tuple(notices),
    )


def _mean_bytes(count: int, dtype: torch.dtype, clusters: int, number: int) -> int:
    """Bytes that the holder in cluster `number` sends in a mean of `count` entries, headers included."""
    mean_pattern = pattern(count, dtype, codec("none"), clusters)
    return int(mean_pattern.sent(number, clusters)) + HEAD * (mean_pattern.messages(clusters) // clusters)


def _worker(
    config: Config, cut: Cut, load: ModelLoad, form: StageForm, position: tuple[int, int, int], average: int
) -> WorkerPlan:
    (cluster, stage, rank), stages, parts = position, len(cut.pieces), config.pipeline.microbatches
    piece, last, room = cut.pieces[stage], stage == stages - 1, room_of(config.pipeline, stage, stages)
    weights = round(sum(load.weights[block] for block in piece.blocks))
    versions = most_versions(config.pipeline, stage, stages)
    inputs = room * (form.ids_shape[0] * form.ids_shape[1] * 8 + (0 if piece.enters else form.held_bytes))
    passes = 1 if last or config.pipeline.recompute else room
    shares = stage_shares(piece, cut.costs, parts, recompute=config.pipeline.recompute)
    each = shares.both if last else shares.forward + shares.backward
    down = 0 if last else HEADER + form.nbytes(Task("F", 0, 1))
    up = 0 if piece.enters else HEADER + form.nbytes(Task("B", 0, 0))
    seconds = parts * each * config.world.virtual.step_seconds * config.world.factors[rank]
    return WorkerPlan(
        ranks=(rank,),
        cluster=cluster,
        stage=stage,
        blocks=(piece.blocks.start, piece.blocks.stop),
        parameters=round(weights / form.dtype.itemsize),
        versions=versions,
        memory=WorkerMemory(
            weights=versions * weights,
            gradients=weights,
            inner=round(load.states * weights),
            held=(
                MemoryItem("inputs in flight", inputs, "step"),
                MemoryItem("activations", round(sum(load.saved[block] for block in piece.blocks)) * passes, "step"),
            ),
        ),
        step_bytes=parts * (down + up),
        average_bytes=average,
        seconds=seconds if config.world.is_simulated else None,
    )
