"""Where each cluster cuts the model, what a worker holds of it (its stage with optimizer and schedule, and at the root
the text), and this machine's speed.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from isles.comm.layout import Coordinate, Layout
from isles.comm.mesh import Mesh
from isles.data import Corpus
from isles.models import Decoder, Shape, autocast, flops_per_token, limits, sketch
from isles.models.cuts import PieceCosts, decoder_costs
from isles.models.stages import Stage, load_of
from isles.network.clusters import ModelLoad
from isles.pipeline.compute import stage_shares
from isles.pipeline.evaluation import assembled, mean_loss
from isles.pipeline.peers.inbox import PeerInbox
from isles.pipeline.pipeline import Cut, cut_of, form_of
from isles.pipeline.ravnest.agreement import cluster_inbox
from isles.pipeline.ravnest.assignment import ClusterAssignment
from isles.pipeline.ravnest.averaging import SharedSegment, refinement
from isles.pipeline.ravnest.stage import AsyncStage
from isles.training.config.inner import inner_notices, most_moments
from isles.training.config.sections import Config
from isles.training.loop import load_schedule, rate_schedule
from isles.training.optimizer import inner_optimizer, what_is_left_out
from isles.training.records.shard import save_model
from isles.training.stage_runner import build_stage, hold_against_whole, on_host, planned_cut, run_scheme
from isles.training.step import Losses, Text, validation_losses
from isles.training.swarm.step import identity_hash, of_all

_MOMENTS, _SPARE = 8, 1 << 20
"""The most state tensors of a parameter, in its shape, that an optimizer may have, and bytes on top."""


def cluster_cuts(config: Config) -> list[Cut]:
    """The cuts of all clusters at the start. ValueError for a model that cannot be cut there."""
    if not config.pipeline.ravnest.clusters:
        return [planned_cut(config)] * config.replicas_in_all
    return cuts_at(config, config.pipeline.ravnest.clusters)


def cuts_at(config: Config, clusters: Sequence[Sequence[int]]) -> list[Cut]:
    """The cuts of `clusters`, each given by the first block of every stage but the first. ValueError for a model that
    cannot be cut there.
    """
    model, costs = sketch(config.model), None
    if config.model.own is None:
        costs = decoder_costs(config.model.shape())
    key = "one of pipeline.ravnest.clusters"
    return [cut_of(model, len(cuts) + 1, costs=costs, cut=cuts, loss_at="last", key=key) for cuts in clusters]


def model_load(config: Config, costs: PieceCosts) -> ModelLoad:
    """Memory and compute per block that the model needs of a cluster's nodes."""
    sequences = config.data.batch_size_per_worker(config.replicas_in_all) // config.pipeline.microbatches
    states, context = float(most_moments(config.inner, "adamw")), limits(config.model).context
    return load_of(sketch(config.model), costs, sequences=sequences, length=context, states=states)


def shared_segments(config: Config, cuts: list[Cut]) -> list[SharedSegment]:
    """The segments of parameters to average, each with the stage that has it in every cluster."""
    model = sketch(config.model)
    named: dict[tuple[int, ...], list[list[str]]] = {}
    names = []
    for cut in cuts:
        if cut.begins not in named:
            named[cut.begins] = [[name for name, _ in Stage(model, piece).named_parameters()] for piece in cut.pieces]
        names.append(dict(enumerate(named[cut.begins])))
    return refinement(names)


def inbox_of(config: Config, world: Mesh, met: Sequence[int] | None = None) -> PeerInbox:
    """The inbox of a run in clusters; see `cluster_inbox`. The largest message holds the weights and their moments."""
    weights = sum(parameter.nbytes for parameter in sketch(config.model).parameters())
    return cluster_inbox(world.world, run_number(config), (1 + _MOMENTS) * weights + _SPARE, met)


def run_number(config: Config) -> int:
    """A number that all workers of this configuration share, for the headers of messages."""
    return identity_hash(of_all(config))


def opening_notices(config: Config, cuts: Sequence[Cut]) -> list[str]:
    """Notices for the start of a run; compares every cut model with the uncut one."""
    notices = inner_notices(config.inner, "adamw", config.run.steps)
    for cut in {one.begins: one for one in cuts}.values():
        notice = hold_against_whole(config, cut) if len(cut.pieces) > 1 else None
        notices += [] if notice is None else [notice]
    return list(dict.fromkeys(notices + what_is_left_out(config)))


_FOR = 0.5  # seconds to measure
_SEQUENCES = 8  # of a pass


def forward_speed(device: torch.device) -> float:
    """FLOP/s that forward passes of a small decoder reach on `device`: the median of half a second's."""
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
    # A third: `flops_per_token` counts the backward pass too. The first pass, which warms up, is left out.
    return flops_per_token(shape) / 3 * tokens.numel() / statistics.median(times[1:])


@dataclass(frozen=True, slots=True)
class SharedReading:
    """After step `since`, each of `clusters` clusters reads `batch` sequences of the data's order per step; `before`
    sequences were read until `since`.
    """

    clusters: int
    batch: int
    since: int = 0
    before: int = 0

    def after(self, step: int) -> int:
        """Sequences of the order that were read until `step`."""
        return self.before + (step - self.since) * self.clusters * self.batch

    def among(self, clusters: int, step: int) -> SharedReading:
        """The reading when `clusters` clusters read after `step`."""
        if clusters == self.clusters:
            return self
        return SharedReading(clusters, self.batch, step, self.after(step))


def layout_of_assignment(assignment: ClusterAssignment, size: int) -> Layout:
    """The layout of all workers. A worker without a stage gets a replica of its own that has no first stage."""
    all_coordinates = [assignment.coordinates_of(position) for position in range(size)]
    return Layout(
        tuple(
            Coordinate(size + position, 1, 0) if coordinates is None else Coordinate(*coordinates, 0)
            for position, coordinates in enumerate(all_coordinates)
        )
    )


@contextmanager
def _slowed(optimizer: Optimizer, times: float) -> Iterator[None]:
    """Context: the optimizer's learning rates are divided by `times`."""
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] /= times
    yield
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


class StageServer:
    """A worker's stage with its optimizer, schedule and text. world: in the current layout. cut: of its cluster.
    update: see `isles.pipeline.ravnest.stage.StaleUpdate`.
    """

    def __init__(
        self, config: Config, world: Mesh, cut: Cut, update: Callable[[int], None], corpus: Corpus | None
    ) -> None:
        self.config, self.world, self.cut, self._update, self._corpus = config, world, cut, update, corpus
        self.model = build_stage(config, cut, run_scheme(config, cut), world.coordinate.stage, world.local_rank)
        self.optimizer = inner_optimizer(self.model, config.inner, "adamw")
        self.schedule = rate_schedule(self.optimizer, config)
        self.device = next(self.model.parameters()).device
        self.samples = config.data.batch_size_per_worker(config.replicas_in_all)
        """Sequences per update."""
        self.updates = 0
        """Updates done here."""
        self.gradient_norm: Tensor | None = None
        """Of the last update, of this stage, before clipping."""
        self._take_part()

    def _take_part(self) -> None:
        """Create the text and the node for the worker's current cluster."""
        config, world = self.config, self.world
        self.text = Text(config, world, self._corpus) if world.coordinate.stage == 0 else None
        context, vocab = limits(config.model)
        scheme = run_scheme(config, self.cut)
        form = form_of(self.model, scheme, config.pipeline, batch_size=self.samples, context=context, vocab=vocab)
        cast = partial(autocast, config.model, self.device)
        pipeline, piece = config.pipeline, self.cut.pieces[world.coordinate.stage]
        shares = stage_shares(piece, self.cut.costs, pipeline.microbatches, recompute=pipeline.recompute)
        self.node = AsyncStage(self.model, self._update, world.stage, form, pipeline, shares=shares, autocast=cast)

    def regroup(self, world: Mesh, updates: int, sequences: int) -> None:
        """Keep the stage in a changed layout, after `updates` updates and `sequences` of the data's order."""
        self.world = world
        self._take_part()
        self._go_on_after(updates, sequences)

    def begin_after(self, updates: int, sequences: int) -> None:
        """Set the state after `updates` updates and `sequences` read sequences of the data's order. Weights and
        optimizer state are only placeholders, to be overwritten.
        """
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.zeros_like(parameter)
        with _slowed(self.optimizer, math.inf):
            self.optimizer.step()  # creates the optimizer state; the learning rate is 0
        self.optimizer.zero_grad()
        for _ in range(updates):
            self.schedule.step()
        self._go_on_after(updates, sequences)

    def _go_on_after(self, updates: int, sequences: int) -> None:
        self.at(updates)
        if self.text is not None:
            self.text.consumed = sequences  # counts those of all clusters

    def at(self, updates: int) -> None:
        """The next microbatch is the first one after `updates` updates."""
        self.node.resume(updates * self.config.pipeline.microbatches, updates)

    def batches(self, updates: int) -> Iterator[Tensor]:
        if self.text is not None:
            for _ in range(updates):
                yield from self.text.batch().split(self.node.form.sequences)

    def evaluate(self) -> Losses:
        """The losses on the root's validation text, at the root. All of the cluster call it together."""
        evaluate = partial(mean_loss, self.node.compute, self.world.stage)
        return validation_losses(self.config.data, lambda: self.text, lambda batches: evaluate(batches()))

    def write_whole(self, out: Path | None) -> None:
        """Gather the cluster's model at the root, which writes OUT/model.safetensors. All of the cluster call it
        together.
        """
        model = self.config.model
        whole = sketch(model) if self.text is None else on_host(model, self.config.run.seed)
        filled = assembled(self.model, self.world.stage, whole, self.cut.pieces)
        if filled is not None and out is not None:
            save_model(filled, out / "model.safetensors")

    def step(self, stale: int) -> None:
        """Update by the accumulated gradients, which are at most `stale` updates old, and clear them."""
        config, optimizer = self.config, self.optimizer
        if config.inner.max_norm:
            self.gradient_norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), config.inner.max_norm)
        with _slowed(optimizer, 1 + stale if config.pipeline.ravnest.stage_lr == "1/(1+tau)" else 1):
            optimizer.step()
        optimizer.zero_grad()
        self.schedule.step()
        self.updates += 1

    @property
    def tokens(self) -> int:
        """Tokens read here for the updates done."""
        return 0 if self.text is None else self.updates * self.samples * self.node.form.length

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next updates depend on. Nothing is in flight."""
        return {
            "model": self.model.state_dict(),
            "inner": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "loader": None if self.text is None else self.text.state_dict(),
            "updates": self.updates,
        }

    def load_state_dict(self, state: dict[str, Any], updates: int) -> None:
        """Continue exactly from `state_dict`. ValueError for that of another model or cut."""
        try:
            self.model.load_state_dict(state["model"])
        except RuntimeError as error:  # torch's message has a line for every tensor that does not fit
            raise ValueError(
                "the checkpoint is of another model, or of other clusters: set [model] and [pipeline] in the run's "
                "config.toml back to what they were"
            ) from error
        self.optimizer.load_state_dict(state["inner"])
        load_schedule(self.schedule, state["schedule"])
        self.updates = state["updates"]
        if self.text is not None:
            self.text.load_state_dict(state["loader"])
        self.at(updates)
