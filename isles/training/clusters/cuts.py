"""Where each cluster cuts the model, which worker holds what of it, and what this machine offers to a cluster."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from isles.comm.mesh import Mesh
from isles.models import limits, sketch
from isles.models.cuts import PieceCosts, decoder_costs
from isles.models.stages import Stage, load_of
from isles.network.clusters.cuts import ModelLoad
from isles.pipeline.peers.inbox import PeerInbox
from isles.pipeline.pipeline import Cut, cut_of
from isles.pipeline.ravnest.agreement import cluster_inbox
from isles.pipeline.ravnest.averaging import SharedSegment, refinement
from isles.training.config.inner import inner_kind, inner_notices
from isles.training.config.sections import Config
from isles.training.optimizer import what_is_left_out
from isles.training.stage_runner import hold_against_whole, planned_cut
from isles.training.swarm.step import of_all, split_sequence

if TYPE_CHECKING:
    import torch

_MOMENTS, _SPARE = 8, 1 << 20
"""Tensors that an optimizer keeps of a parameter, in its shape, and bytes beside."""


def cluster_cuts(config: Config) -> list[Cut]:
    """Of every cluster at the start. ValueError for a model that cannot be cut there."""
    if not config.pipeline.ravnest.clusters:
        return [planned_cut(config)] * config.replicas_in_all
    return cuts_at(config, config.pipeline.ravnest.clusters)


def cuts_at(config: Config, clusters: Sequence[Sequence[int]]) -> list[Cut]:
    """Of clusters, by the first block of each stage but the first. ValueError for a model that cannot be cut there."""
    model, costs = sketch(config.model), None
    if config.model.own is None:
        costs = decoder_costs(config.model.shape())
    key = "one of pipeline.ravnest.clusters"
    return [cut_of(model, len(cuts) + 1, costs=costs, cut=cuts, loss_at="last", key=key) for cuts in clusters]


def model_load(config: Config, costs: PieceCosts) -> ModelLoad:
    """What the model asks of the nodes that share it, by block."""
    sequences = config.data.batch_size_per_worker(config.replicas_in_all) // config.pipeline.microbatches
    states = 2.0 if inner_kind(config.inner, "adamw") == "adamw" else 0.0
    context = limits(config.model).context
    return load_of(sketch(config.model), costs, sequences=sequences, length=context, states=states)


def shared_segments(config: Config, cuts: list[Cut]) -> list[SharedSegment]:
    """What is averaged over whom: which stage of each cluster."""
    model = sketch(config.model)
    named: dict[tuple[int, ...], list[list[str]]] = {}
    held = []
    for cut in cuts:
        if cut.begins not in named:
            named[cut.begins] = [[name for name, _ in Stage(model, piece).named_parameters()] for piece in cut.pieces]
        held.append(dict(enumerate(named[cut.begins])))
    return refinement(held)


def inbox_of(config: Config, world: Mesh, met: Sequence[int] | None = None) -> PeerInbox:
    """The messages of a run in clusters; see `cluster_inbox`. A message holds the weights and their moments at most."""
    weights = sum(parameter.nbytes for parameter in sketch(config.model).parameters())
    return cluster_inbox(world.world, run_number(config), (1 + _MOMENTS) * weights + _SPARE, met)


def run_number(config: Config) -> int:
    """That all workers of this run share, and those of another configuration do not."""
    return split_sequence(of_all(config))


def opening_notices(config: Config, cuts: Sequence[Cut]) -> list[str]:
    """What a user should know at the start; every cut is held against the whole."""
    notices = inner_notices(config.inner, "adamw", config.run.steps)
    for cut in {one.begins: one for one in cuts}.values():
        notice = hold_against_whole(config, cut) if len(cut.pieces) > 1 else None
        notices += [] if notice is None else [notice]
    return list(dict.fromkeys(notices + what_is_left_out(config)))


_FOR = 0.5  # seconds of measuring
_SEQUENCES = 8


def memory(device: torch.device) -> float:
    """Bytes that a run on `device` can have: of that GPU, or of the RAM that nobody uses."""
    import torch

    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        fields = dict(line.split(":") for line in meminfo.read_text(encoding="ascii").splitlines())
        return 1024.0 * int(fields["MemAvailable"].split()[0])
    return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))


def forward_speed(device: torch.device) -> float:
    """FLOP/s that forward passes of a small decoder reach on `device`: the median of half a second's."""
    import torch

    from isles.models import Decoder, Shape, flops_per_token

    shape = Shape(d_model=256, layers=2, heads=4, ffn=768, vocab=256, context=128, tie_embeddings=False)
    model, times = Decoder(shape).to(device), []
    tokens = torch.zeros(_SEQUENCES, shape.context, dtype=torch.int64, device=device)
    with torch.no_grad():
        ends = time.perf_counter() + _FOR
        while len(times) < 3 or time.perf_counter() < ends:
            began = time.perf_counter()
            model.logits(tokens)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            times.append(time.perf_counter() - began)
    return flops_per_token(shape) / 3 * tokens.numel() / statistics.median(times[1:])
