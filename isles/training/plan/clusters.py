"""The plan of a run in clusters of asynchronous stages: what each worker holds and sends, and how long its updates take
at least.
"""

from __future__ import annotations

from math import ceil

import torch

from isles.comm.codecs import codec
from isles.comm.collectives.mail import HEAD
from isles.comm.collectives.mean import pattern
from isles.models import limits, sketch
from isles.models.stages import Stage
from isles.network.clusters.splitting import ModelLoad
from isles.network.planner.memory import Held, WorkerMemory
from isles.network.routing.routes import Task
from isles.pipeline.pipeline import Cut, form_of
from isles.pipeline.ravnest.mailbox import HEADER
from isles.pipeline.ravnest.stage import AsyncWays, most_versions
from isles.pipeline.shares import stage_shares
from isles.pipeline.swarm.agreement import agreed_bytes
from isles.pipeline.wire import StageForm
from isles.training.clustered.cuts import cluster_cuts, model_load, shared_segments
from isles.training.config.inner import inner_kind
from isles.training.config.sections import Config
from isles.training.plan.record import RunPlan, WorkerPlan
from isles.training.staged import run_scheme


def plan_clusters(config: Config) -> RunPlan:
    """As `plan_run`. Bytes sent are without validations and the start."""
    cuts, pipeline, world, steps = cluster_cuts(config), config.pipeline, config.world, config.run.steps
    segments, clusters = shared_segments(config, cuts), len(cuts)
    model, (context, vocab) = sketch(config.model), limits(config.model)
    sequences, load = config.data.batch_size_per_worker(clusters), model_load(config, cuts[0].costs)
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    settled = agreed_bytes(world.workers, 0)  # in an agreement on who is left
    word = settled + agreed_bytes(world.workers, 1)  # in those of an average
    weighed = getattr(config.replicas, "weights", "equal") == "samples"
    copies = 3 if pipeline.ravnest.average_optimizer and inner_kind(config.inner, "adamw") == "adamw" else 1
    dtype = next(model.parameters()).dtype
    workers = []
    for number, cut in enumerate(cuts):
        first, scheme = Stage(model, cut.pieces[0]), run_scheme(config, cut)
        form = form_of(first, scheme, pipeline, batch_size=sequences, context=context, vocab=vocab)
        for stage in range(len(cut.pieces)):
            own = [segment for segment in segments if segment.holders[number] == stage]
            counts = [copies * sum(sizes[name] for name in segment.names) + weighed for segment in own]
            average = word + sum(_mean_bytes(count, dtype, clusters, number) for count in counts)
            place = number, stage, len(workers)
            workers.append(_worker(config, cut, load, form, place, average if clusters > 1 else 0))
    every, looks = getattr(config.replicas, "sync_every", steps), config.run.validate_every
    judged = range(looks, steps, looks) if looks and config.data.validation_fraction else ()
    averages = ceil(steps / every) if clusters > 1 else 0
    agreements = sum(step % every > 0 for step in judged) if clusters > 1 else 0
    standby = world.workers - len(workers)
    serving = [steps * (one.step_bytes or 0) + averages * (one.average_bytes or 0) for one in workers]
    notices = []
    if pipeline.ravnest.clusters and world.is_simulated:
        notices.append("clusters are named: their stages reach each other over world.virtual.links")
    if pipeline.order == "arrival":
        notices.append(
            'pipeline.order = "arrival": how old gradients are depends on the network; memory is at most this'
        )
    return RunPlan(
        config=config,
        arrangement=f"{clusters} clusters of asynchronous stages",
        parameters=sum(sizes.values()),
        tokens_per_step=clusters * sequences * context,
        workers=tuple(workers),
        standby=standby,
        bytes_sent=tuple(agreements * settled + sent for sent in [*serving, *[averages * word] * standby]),
        averages=averages,
        segments=len(segments),
        agreements=agreements,
        notices=tuple(notices),
    )


def _mean_bytes(count: int, dtype: torch.dtype, clusters: int, number: int) -> int:
    """That the holder in cluster `number` sends in a mean of so many entries, by letters."""
    made = pattern(count, dtype, codec("none"), clusters)
    return int(made.sent(number, clusters)) + HEAD * (made.messages(clusters) // clusters)


def _worker(
    config: Config, cut: Cut, load: ModelLoad, form: StageForm, place: tuple[int, int, int], average: int
) -> WorkerPlan:
    (cluster, stage, rank), stages, parts = place, len(cut.pieces), config.pipeline.microbatches
    piece, last, given = cut.pieces[stage], stage == stages - 1, config.pipeline.in_flight
    ways = AsyncWays(in_flight=given if isinstance(given, int) else stages, every=parts, order=config.pipeline.order)
    weights, versions = round(sum(load.weights[block] for block in piece.blocks)), most_versions(ways, stage, stages)
    room = 0 if last else ways.room(stage)
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
                Held("inputs in flight", inputs, "step"),
                Held("activations", round(sum(load.saved[block] for block in piece.blocks)) * passes, "step"),
            ),
        ),
        step_bytes=parts * (down + up),
        average_bytes=average,
        seconds=seconds if config.world.is_simulated else None,
    )
