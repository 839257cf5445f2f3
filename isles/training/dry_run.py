"""What a run will be, said before anything is started or written: the model, memory, exchanges, bytes and time.

    configuration -> model without numbers (meta device) -> the method around it, in a world that is only planned
                  -> its own schedule, memory and advice -> DryRun

So the numbers are those of the code that will run, not of a second description of it.
"""

from __future__ import annotations

import json
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
from isles.comm.dry import dry_mesh
from isles.data import load_tokenizer
from isles.data.sources import list_sources
from isles.imports import told
from isles.memory.plan import MemoryPlan
from isles.models import autocast, build, choose_device, flops_per_token, limits, sketch
from isles.models import parameters as count_parameters
from isles.models.config import ModelConfig
from isles.replicas import method
from isles.replicas.schedule import Held, Outline
from isles.replicas.sync import ReplicaSync
from isles.training.assemble import wrapped
from isles.training.config.inner import inner_bytes, inner_kind, inner_optimizer
from isles.training.config.sections import Config
from isles.training.dry_time import Transfers, transfers
from isles.training.memory import prepared, refusals, step_seconds
from isles.training.records.saved import start_file
from isles.training.text import check_vocabulary

_PROBES = 3
_SMALL = 256e6  # bytes of weights that are made for counting


@dataclass(frozen=True, kw_only=True)
class DryRun:
    """A run before it is run. Bytes are exact, headers included, those before the first step too.

    flops: of a token at a worker, forward and backward; None where they cannot be counted. device: for "auto", what
    this machine has. weights, gradients, inner: bytes of a worker there. held: what the method adds, on the host.
    bytes_sent: by worker, of the whole run. ddp_bytes: what data parallel would send, a worker. step_seconds: None: not
    known. memory: the plan of a worker's memory, where there is one.
    """

    method: str
    backend: str
    workers: int
    steps: int
    parameters: int
    flops: int | None
    tokens_per_step: int
    device: str
    weights: int
    gradients: int
    inner: int
    held: tuple[Held, ...]
    outline: Outline
    bytes_sent: tuple[int, ...]
    ddp_bytes: float
    step_seconds: float | None
    memory: MemoryPlan | None
    transfers: Transfers | None
    notices: tuple[str, ...]

    @property
    def peak(self) -> int:
        """Bytes of a worker at its fullest: while training with an exchange under way, or at the end, when gradients
        are gone.
        """
        sums = dict.fromkeys(("always", "exchange", "end"), 0)
        for held in self.held:
            sums[held.when] += held.nbytes
        return self.weights + self.inner + sums["always"] + sums["exchange"] + max(self.gradients, sums["end"])

    def as_json(self) -> dict[str, Any]:
        """For machines."""
        plain = asdict(self)
        plain["held"] = [held._asdict() for held in self.held]
        plain["outline"]["first"] = [
            {key: getattr(planned, key) for key in ("sent", "lands", "fragment", "what", "groups", "bytes_sent")}
            for planned in self.outline.first
        ]
        memory = None if self.memory is None else json.loads(self.memory.to_json())
        return plain | {"peak_bytes": self.peak, "memory": memory}


def dry_run(config: Config, *, probe: bool = False) -> DryRun:
    """The plan of a run. probe: measure a step of one worker on this machine where the configuration gives no
    `step_seconds`. Reads the tokenizer and looks at the text's files, starts nothing, writes nothing. ValueError for
    what the run itself would refuse before it trains.
    """
    if config.pipeline.stages > 1:
        raise ValueError(
            f"pipeline.stages = {config.pipeline.stages}: a dry run does not know stages yet; plan the same run with "
            "pipeline.stages = 1, or run it with --steps 1"
        )
    context, vocab = limits(config.model)
    check_vocabulary(vocab, load_tokenizer(config.data.tokenizer))
    list_sources(config.data.path)
    refusals(config)
    if config.run.start:
        start_file(config.run.start)
    world, run = config.world, config.run
    sequences = config.data.batch_size_per_worker(world.workers) * config.inner.accumulation
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = sketch(config.model)
        parameters = sum(parameter.numel() for parameter in model.parameters())  # before a method divides them
        seats = [_seat(config, model, place) for place in range(world.inner)]  # of one island; all islands are alike
        optimizer, notices = seats[0]
        flops = counted_flops(config.model, model, context)
    if type(optimizer).schedule is ReplicaSync.schedule:
        notices.append(f"method {config.method} does not say what it exchanges: give it a schedule()")
    outlines = [seat.outline(run.steps) for seat, _ in seats]
    outline = outlines[0]
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
        if probe and sum(parameter.numel() for parameter in model.parameters()) < parameters:
            notices.append("the step was measured on the whole model; a worker's part of it takes less")
    found = transfers(config, [seat for seat, _ in seats], outline, seconds)
    if world.is_simulated and found is not None and found.seconds is None:
        notices.append("waiting is not said: there are too many messages to replay; isles plan says it about")
    dtype = optimizer.parameters[0].dtype
    ddp = [sent_bytes(parameters, dtype, codec("none"), world.workers, place) for place in range(world.workers)]
    return DryRun(
        method=config.method,
        backend=world.backend,
        workers=world.workers,
        steps=run.steps,
        parameters=parameters,
        flops=flops,
        device=choose_device(config.model).type if config.model.device == "auto" else config.model.device,
        tokens_per_step=world.workers * sequences * context,
        weights=sum(tensor.nbytes for tensor in (*optimizer.model.parameters(), *model.buffers())),
        gradients=sum(parameter.nbytes for parameter in optimizer.parameters),
        inner=inner_bytes(optimizer.parameters, inner_kind(config.inner, optimizer.usual_inner)),
        held=tuple(optimizer.memory()),
        outline=outline,
        bytes_sent=_by_worker(outlines),
        ddp_bytes=run.steps * sum(ddp) / len(ddp),
        step_seconds=seconds,
        memory=None if config.memory.method == "none" else prepared(config)[2],
        transfers=found,
        notices=(*dict.fromkeys(str(one.message) for one in caught), *notices),
    )


def _seat(config: Config, model: nn.Module, place: int) -> tuple[ReplicaSync, list[str]]:
    """The optimizer of the worker at `place` of the first island, and what its user should know."""
    world = config.world
    mesh = dry_mesh(world.workers, inner=world.inner, rank=place, native=world.has_processes)
    return wrapped(config, model, mesh.outer, mesh.inner)


def _by_worker(outlines: Sequence[Outline]) -> tuple[int, ...]:
    """Bytes that each worker sends in the run, by rank. outlines: of the places in an island."""
    columns = [map(sum, zip(outline.opening, outline.sent, strict=True)) for outline in outlines]
    return tuple(nbytes for island in zip(*columns, strict=True) for nbytes in island)


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
    before = torch.get_num_threads()
    torch.set_num_threads(config.world.threads)
    try:
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
    finally:
        torch.set_num_threads(before)
