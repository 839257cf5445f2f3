"""What a run will be, said before anything is started or written: the model, memory, exchanges, bytes and time.

    configuration -> model without numbers (meta device) -> the method around it, in a world that is only planned
                  -> its own schedule, memory and advice -> DryRun

So the numbers are those of the code that will run, not of a second description of it.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn

from isles.comm.codecs import codec
from isles.comm.collectives.mean import sent_bytes
from isles.comm.layout import Layout
from isles.data import load_tokenizer
from isles.data.sources import list_sources
from isles.imports import told
from isles.memory.plan import MemoryPlan
from isles.models import autocast, build, choose_device, flops_per_token, limits
from isles.models import parameters as count_parameters
from isles.models.config import ModelConfig
from isles.models.stages import Stage
from isles.models.subspace import Subspace
from isles.modes import torch_threads
from isles.network.planner.memory import WorkerMemory
from isles.network.planner.stages import StagedSteps
from isles.parsing import parse_json
from isles.replicas import METHODS, method
from isles.replicas.schedule import Outline
from isles.replicas.sync import ReplicaSync
from isles.training.clustered.cuts import cluster_cuts
from isles.training.config.clustered import refuse_spares
from isles.training.config.inner import inner_bytes, inner_kind, inner_optimizer
from isles.training.config.planned import plan_of
from isles.training.config.sections import Config
from isles.training.dry_plans import NodePlan, node_plans, plan_notices, seconds_of_step
from isles.training.dry_stages import (
    StagePlan,
    form,
    most_forwards,
    opening_bytes,
    staged_steps,
    stream_ratio,
    turns_of,
)
from isles.training.dry_time import Transfers, transfers
from isles.training.growing import refuse_joining
from isles.training.memory.planned import prepared, refusals, step_seconds
from isles.training.placement import holders_of, layout_of
from isles.training.plan.sketch import RunSketch, sketch_run
from isles.training.records.saved import start_file
from isles.training.staged import planned_cut
from isles.training.text import check_vocabulary

_PROBES = 3
_SMALL = 256e6  # bytes of weights that are made for counting


@dataclass(frozen=True, kw_only=True)
class DryRun(WorkerMemory):
    """A run before it is run, with the memory of the worker that holds most. Bytes are exact, headers included, those
    before the first step too.

    flops: of a token, forward and backward, at a worker or where there are stages in the whole model; None where they
    cannot be counted. device: for "auto", what this machine has. outline: of the worker that sends most. stages: of a
    replica, where it is cut; nodes: where a plan says the paths, its own. bytes_sent: by worker, of the whole run;
    between_stages: what of that goes to other stages, on average; stream_ratio: how many times as much the whole stream
    would be. ddp_bytes: what data parallel would send, a worker. step_seconds: None: not known; by a plan from a step's
    start to the end of its last task. placed: the plan of a worker's memory, where there is one.
    """

    method: str
    backend: str
    workers: int
    steps: int
    parameters: int
    flops: int | None
    tokens_per_step: int
    device: str
    outline: Outline
    stages: tuple[StagePlan, ...]
    nodes: tuple[NodePlan, ...]
    bytes_sent: tuple[int, ...]
    between_stages: float
    stream_ratio: float | None
    ddp_bytes: float
    step_seconds: float | None
    placed: MemoryPlan | None
    transfers: Transfers | None
    notices: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """For machines."""
        plain = asdict(self)
        plain["held"] = [held._asdict() for held in self.held]
        for stage, own in zip(plain["stages"], self.stages, strict=True):
            stage["memory"]["held"] = [held._asdict() for held in own.memory.held]
            stage["memory"]["peak_bytes"] = own.memory.peak
        plain["outline"]["first"] = [
            {key: getattr(planned, key) for key in ("sent", "lands", "fragment", "what", "groups", "bytes_sent")}
            for planned in self.outline.first
        ]
        placed = None if self.placed is None else parse_json(self.placed.to_json())
        return plain | {"peak_bytes": self.peak, "placed": placed}


def dry_run(config: Config, *, probe: bool = False, machines: int = 1) -> DryRun:
    """The plan of a run. probe: measure a step of one worker on this machine where the configuration gives no
    `step_seconds`. machines: that train together. Reads the tokenizer and looks at the text's files, starts
    nothing, writes nothing. ValueError for what the run itself would refuse before it trains.
    """
    if config.pipeline.routing == "swarm":
        raise ValueError(
            'pipeline.routing = "swarm": its microbatches find their way as they travel; isles.training.swarmed.dry '
            "plans that"
        )
    refuse_joining(config.world)
    context = _refuse_files(config)
    world, run = config.world, config.run
    layout, plan = layout_of(config), plan_of(config.pipeline)
    readers = layout.reader(0)[1]
    sequences = config.data.batch_size_per_worker(readers) * config.inner.accumulation
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made = sketch_run(config, -(-world.workers // machines))
        flops = counted_flops(config.model, made.model, context)
    optimizer, parameters, notices, scheme = made.optimizers[0], made.parameters, list(made.notices), made.scheme
    staged = staged_steps(made)
    if type(optimizer).schedule is ReplicaSync.schedule:
        notices.append(f"method {config.method} does not say what it exchanges: give it a schedule()")
    outlines = [one.outline(run.steps) for one in made.optimizers]
    outline = max(outlines, key=lambda one: max(one.sent))
    stages, nodes = _stage_plans(made, staged)
    memory = max((_memory(config, one) for one in made.optimizers[:: world.inner]), key=lambda one: one.peak)
    if world.is_simulated:
        seconds: float | None = step_seconds(config)
        if outline.about:
            notices.append(
                "what is sent hangs on the numbers: bytes and waiting are about right, of a few steps perhaps not"
            )
        if world.step_jitter or world.pauses:
            notices.append(
                "times are of workers whose steps take equally long and who never pause; isles simulate counts more"
            )
    else:
        seconds = measured_step(config, sequences, context) if probe else None
        if probe and sum(parameter.numel() for parameter in made.model.parameters()) < parameters:
            notices.append("the step was measured on the whole model; a worker's part of it takes less")
    if plan is not None and staged is not None:
        seconds = seconds_of_step(plan, staged.sizes, world, run.seed)
        notices += plan_notices(plan, world, seconds)
    if staged is not None:
        notices += _of_stages(config)
    found = transfers(made, outline, seconds, staged)
    if world.is_simulated and found is not None and found.seconds is None:
        notices.append("waiting is not said: there are too many messages to replay; isles plan says it about")
    between, ratio, first = [0] * world.workers, None, made.pieces[0]
    if staged is not None and scheme is not None and isinstance(first, Stage):
        ratio = stream_ratio(form(config, scheme, first), scheme.place.width)
        between = _between_stages(config, staged, opening_bytes(layout, int(scheme.compares) + int(plan is not None)))
    dtype = optimizer.parameters[0].dtype
    ddp = [sent_bytes(parameters, dtype, codec("none"), world.workers, place) for place in range(world.workers)]
    return DryRun(
        method=config.method,
        backend=world.backend,
        workers=world.workers,
        steps=run.steps,
        parameters=parameters,
        flops=flops,
        device=_device(config),
        tokens_per_step=readers * sequences * context,
        weights=memory.weights,
        gradients=memory.gradients,
        inner=memory.inner,
        held=memory.held,
        tables=memory.tables,
        outline=outline,
        stages=stages,
        nodes=nodes,
        bytes_sent=tuple(own + more for own, more in zip(_by_worker(outlines, layout), between, strict=True)),
        between_stages=sum(between) / len(between),
        stream_ratio=ratio,
        ddp_bytes=run.steps * sum(ddp) / len(ddp),
        step_seconds=seconds,
        placed=None if config.memory.method == "none" or config.pipeline.stages > 1 else prepared(config)[2],
        transfers=found,
        notices=(*dict.fromkeys(str(one.message) for one in caught), *notices),
    )


def refuse(config: Config, *, joined: bool = False) -> None:
    """ValueError for the settings that a dry run refuses, so that a run can be refused before its processes start.
    Models of the user's own and of Hugging Face, and methods of the user's own, which may read weights that a sketch
    does not have, are not made for that: workers do, and refuse there. joined: workers come and go in it.
    """
    if not joined:
        refuse_joining(config.world)
    _refuse_files(config)
    if config.pipeline.routing == "ravnest":
        refuse_spares(config.pipeline)
        cluster_cuts(config)
    elif config.pipeline.routing == "swarm":
        planned_cut(config)
    elif config.model.factory is None and config.model.hf is None and config.method in METHODS:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the run says it again
            sketch_run(config)


def _refuse_files(config: Config) -> int:
    """Tokens of a sequence. ValueError for files that cannot be read, and what does not go with the model's limits."""
    context, vocab = limits(config.model)
    check_vocabulary(vocab, load_tokenizer(config.data.tokenizer))
    list_sources(config.data.path)
    refusals(config)
    if config.run.start:
        start_file(config.run.start)
    return context


def _memory(config: Config, optimizer: ReplicaSync) -> WorkerMemory:
    subspace: Subspace | None = getattr(optimizer.model, "subspace", None)
    drawn = 0 if subspace is None else subspace.nbytes
    return WorkerMemory(
        weights=sum(parameter.nbytes for parameter in optimizer.model.parameters()),
        tables=drawn + sum(buffer.nbytes for buffer in optimizer.model.buffers()),
        gradients=sum(parameter.nbytes for parameter in optimizer.parameters),
        inner=inner_bytes(optimizer.parameters, inner_kind(config.inner, optimizer.usual_inner)),
        held=tuple(one for one in optimizer.memory() if one.when != "pinned" or _device(config) != "cpu"),
    )


def _device(config: Config) -> str:
    return choose_device(config.model).type if config.model.device == "auto" else config.model.device


def _stage_plans(made: RunSketch, staged: StagedSteps | None) -> tuple[tuple[StagePlan, ...], tuple[NodePlan, ...]]:
    """The stages, and the nodes of a plan."""
    config, scheme = made.config, made.scheme
    if staged is None or scheme is None:
        return (), ()
    forwards, sent, holders = most_forwards(staged), staged.sent(), made.holders
    found, each = [], []
    for number, stage in enumerate(made.pieces):
        assert isinstance(stage, Stage)
        wires, blocks = form(config, scheme, stage), stage.piece.blocks
        ids = wires.sequences * (wires.length + 1) * 8
        each.append(ids + (0 if stage.piece.enters else wires.held_bytes))
        held = max(forwards[rank] for rank in holders[number * config.world.inner])
        found.append(
            StagePlan(
                blocks=(blocks.start, blocks.stop),
                parameters=sum(parameter.numel() for parameter in stage.parameters()),
                memory=_memory(config, made.optimizers[number * config.world.inner]),
                forwards=held,
                kept=held * each[-1],
                bytes_a_step=max(sent[rank] for rank in holders[number * config.world.inner]),
            )
        )
    plan = plan_of(config.pipeline)
    nodes = () if plan is None else node_plans(plan, staged, [one.memory.peak for one in found], forwards, each)
    return tuple(found), nodes


def _between_stages(config: Config, staged: StagedSteps, opening: Sequence[int]) -> list[int]:
    """Bytes that each worker sends to other stages in the run, by rank; those for the gradient's norm are elsewhere.
    opening: before the first step.
    """
    turn = turns_of(config, staged)
    # Every route has as many messages in every step.
    found = [first + config.run.steps * nbytes for first, nbytes in zip(opening, staged.sent(), strict=True)]
    if turn is None:
        return found
    return [own + turn[1] * round(more) for own, more in zip(found, turn[0].bytes_sent, strict=True)]


def _of_stages(config: Config) -> list[str]:
    """What a user should know."""
    notices = []
    if config.pipeline.order == "arrival":
        notices.append('pipeline.order = "arrival" is planned as "plan"; where links vary it waits a little less')
    if config.pipeline.stage_loss:
        notices.append("what lost stages cost, and the messages that mend them, are not counted")
    return notices


def _by_worker(outlines: Sequence[Outline], layout: Layout) -> tuple[int, ...]:
    """Bytes that each worker sends in the run, by rank. outlines: of the places in a replica."""
    total = [0] * layout.size
    for ranks, outline in zip(holders_of(layout), outlines, strict=True):
        for rank, opening, sent in zip(ranks, outline.opening, outline.sent, strict=True):
            total[rank] = opening + sent
    return tuple(total)


def counted_flops(config: ModelConfig, model: nn.Module, context: int) -> int | None:
    """FLOPs of a token, forward and backward: by formula for Isles' decoder; of another model, or of a worker's part of
    the decoder, what torch's counter finds (products, convolutions, attention) in one forward pass, times three.
    `model` is its sketch; where it cannot do without numbers and is small, it is built on the CPU. None where that does
    not work either.
    """
    if config.own is None and sum(map(torch.Tensor.numel, model.parameters())) == count_parameters(config.shape()):
        return flops_per_token(config.shape())
    try:
        forward = _forward_flops(model, context)
    except Exception as error:  # of the user's model, whatever it raises
        if sum(parameter.nbytes for parameter in model.parameters()) > _SMALL:
            warnings.warn(f"FLOPs are not counted: the model wants numbers ({told(error)})", stacklevel=2)
            return None
        forward = _forward_flops(build(replace(config, device="cpu", autocast="none", compile=False), seed=0), context)
    return 3 * forward // context


@torch.no_grad()
def _forward_flops(model: nn.Module, context: int) -> int:
    from torch.utils.flop_counter import FlopCounterMode

    device = next(model.parameters()).device
    with FlopCounterMode(display=False) as counter:
        model(torch.zeros(1, context + 1, dtype=torch.int64, device=device))
    return counter.get_total_flops()


def measured_step(config: Config, sequences: int, context: int) -> float:
    """Median seconds of an inner step (forward, backward, inner optimizer) of one worker that has this machine to
    itself.
    """
    with torch_threads(config.world.start_threads):
        model = build(config.model, seed=config.run.seed)
        device = next(model.parameters()).device
        optimizer = inner_optimizer(model, config.inner, method(config.method).usual_inner)
        tokens = torch.zeros(sequences // config.inner.accumulation, context + 1, dtype=torch.int64, device=device)
        times = []
        for _ in range(1 + _PROBES):
            started = time.perf_counter()
            for _ in range(config.inner.accumulation):
                with autocast(config.model, device):
                    loss = model(tokens).loss
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            times.append(time.perf_counter() - started)
        return statistics.median(times[1:])
