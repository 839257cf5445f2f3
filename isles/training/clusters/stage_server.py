"""What a worker of a run in clusters holds, as its assignment changes at averages.

on standby            nothing, until it takes a lost one's place or a new cluster begins
serves                its stage of the model with optimizer and schedule, and at the root the text
cluster is broken     its stage: what it did since the last average does not count, until the cluster is repaired
leaves                its stage, until its successor has loaded it
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from isles.comm.layout import Coordinate, Layout
from isles.comm.mesh import Mesh
from isles.data import Corpus
from isles.models import autocast, limits, sketch
from isles.pipeline.evaluation import assembled, mean_loss
from isles.pipeline.pipeline import Cut, form_of
from isles.pipeline.ravnest.agreement import ClusterAgreement
from isles.pipeline.ravnest.assignment import ClusterAssignment
from isles.pipeline.ravnest.averaging import ClusterAverage
from isles.pipeline.ravnest.stage import AsyncOptions, AsyncStage
from isles.pipeline.shares import stage_shares
from isles.training.clusters.cuts import cuts_at, first_blocks, shared_segments
from isles.training.config.sections import Config
from isles.training.optimizer import inner_optimizer, rate_schedule
from isles.training.records.shard import save_model
from isles.training.stage_runner import build_stage, on_host, run_scheme
from isles.training.text import Text


@dataclass(frozen=True, slots=True)
class SharedReading:
    """`clusters` clusters read `batch` sequences each in every step after `since`; `before` of the order's come before
    that.
    """

    clusters: int
    batch: int
    since: int = 0
    before: int = 0

    def after(self, step: int) -> int:
        """Sequences of the order that come before what is read next."""
        return self.before + (step - self.since) * self.clusters * self.batch

    def among(self, clusters: int, step: int) -> SharedReading:
        """So many clusters read after `step`."""
        if clusters == self.clusters:
            return self
        return SharedReading(clusters, self.batch, step, self.after(step))


def layout_of_assignment(assignment: ClusterAssignment, size: int) -> Layout:
    """Where all workers are now. Who stands by, or has lost its place, is in a column without a first stage."""
    all_coordinates = [assignment.coordinates_of(position) for position in range(size)]
    return Layout(
        tuple(
            Coordinate(size + position, 1, 0) if coordinates is None else Coordinate(*coordinates, 0)
            for position, coordinates in enumerate(all_coordinates)
        )
    )


class StageServer:
    """world: arranged as it is now. cut: of its cluster. update: see `isles.pipeline.ravnest.stage.StaleUpdate`."""

    def __init__(
        self, config: Config, world: Mesh, cut: Cut, update: Callable[[int], None], corpus: Corpus | None
    ) -> None:
        self.config, self.world, self.cut, self._update, self._corpus = config, world, cut, update, corpus
        self.model = build_stage(config, cut, run_scheme(config, cut), world.coordinate.stage, world.local_rank)
        self.optimizer = inner_optimizer(self.model, config.inner, "adamw")
        self.schedule = rate_schedule(self.optimizer, config)
        self.device = next(self.model.parameters()).device
        self.samples = config.data.batch_size_per_worker(config.replicas_in_all)
        """Sequences of an update."""
        self.updates = 0
        """Taken here."""
        self._take_part()

    def _take_part(self) -> None:
        """In the cluster that this worker is in now, and of its text."""
        config, world = self.config, self.world
        self.text = Text(config, world, self._corpus) if world.coordinate.stage == 0 else None
        context, vocab = limits(config.model)
        scheme = run_scheme(config, self.cut)
        form = form_of(self.model, scheme, config.pipeline, batch_size=self.samples, context=context, vocab=vocab)
        cast = partial(autocast, config.model, self.device)
        self.node = AsyncStage(self.model, self._update, world.stage, form, self._ways(), autocast=cast)

    def regroup(self, world: Mesh, updates: int, sequences: int) -> None:
        """Hold the same, among others or beside other clusters, after so many updates and sequences of the data."""
        self.world = world
        self._take_part()
        self._go_on_after(updates, sequences)

    def _ways(self) -> AsyncOptions:
        pipeline, piece = self.config.pipeline, self.cut.pieces[self.world.coordinate.stage]
        shares = stage_shares(piece, self.cut.costs, pipeline.microbatches, recompute=pipeline.recompute)
        return AsyncOptions(
            in_flight=pipeline.in_flight if isinstance(pipeline.in_flight, int) else len(self.cut.pieces),
            every=pipeline.microbatches,
            order=pipeline.order,
            recompute=pipeline.recompute,
            shares=shares,
        )

    def begin_after(self, updates: int, sequences: int) -> None:
        """As all are after so many, but for weights and optimizer state, which are here to be written over. sequences:
        of the data's order that were read.
        """
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.zeros_like(parameter)
        rates = [group["lr"] for group in self.optimizer.param_groups]
        for group in self.optimizer.param_groups:
            group["lr"] = 0.0
        self.optimizer.step()  # which makes the state
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        self.optimizer.zero_grad()
        for _ in range(updates):
            self.schedule.step()
        self._go_on_after(updates, sequences)

    def _go_on_after(self, updates: int, sequences: int) -> None:
        self.at(updates)
        if self.text is not None:
            self.text.consumed = sequences  # of all clusters

    def at(self, updates: int) -> None:
        """The next microbatch is the one behind so many updates."""
        self.node.resume(updates * self.config.pipeline.microbatches, updates)

    def batches(self, updates: int) -> Iterator[Tensor]:
        if self.text is not None:
            for _ in range(updates):
                yield from self.text.batch().split(self.node.form.sequences)

    def evaluate(self) -> float:
        """The mean loss over the root's validation text. All of the cluster ask together."""
        batches = () if self.text is None else self.text.validation_batches()
        return mean_loss(self.node.compute, self.world.stage, batches)

    def write_whole(self, out: Path | None) -> None:
        """Put the one model of its cluster together, at the root, which writes OUT/model.safetensors. All of the
        cluster ask together.
        """
        model = self.config.model
        whole = sketch(model) if self.text is None else on_host(model, self.config.run.seed)
        filled = assembled(self.model, self.world.stage, whole, self.cut.pieces)
        if filled is not None and out is not None:
            save_model(filled, out / "model.safetensors")

    def step(self, stale: int) -> None:
        """An update by the gradients in place, so many updates old, which are cleared."""
        config, optimizer = self.config, self.optimizer
        if config.inner.max_norm:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), config.inner.max_norm)
        rates = [group["lr"] for group in optimizer.param_groups]
        if config.pipeline.ravnest.stage_lr == "1/(1+tau)":
            for group in optimizer.param_groups:
                group["lr"] /= 1 + stale
        optimizer.step()
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        optimizer.zero_grad()
        self.schedule.step()
        self.updates += 1

    @property
    def tokens(self) -> int:
        """Read here for the updates taken."""
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
        except RuntimeError as error:  # torch tells every tensor that does not fit, a line each
            raise ValueError(
                "the checkpoint is of another model, or of other clusters: set [model] and [pipeline] in the run's "
                "config.toml back to what they were"
            ) from error
        self.optimizer.load_state_dict(state["inner"])
        self.schedule.load_state_dict(state["schedule"])
        self.updates = state["updates"]
        if self.text is not None:
            self.text.load_state_dict(state["loader"])
        self.at(updates)


class ClusterState:
    """cuts: of each cluster. update: called after the backward pass of an update, with how many updates its gradients
    are old.
    """

    def __init__(
        self,
        config: Config,
        world: Mesh,
        corpus: Corpus | None,
        agreement: ClusterAgreement,
        cuts: list[Cut],
        update: Callable[[int], None],
    ) -> None:
        self._config, self._world, self._corpus, self._agreement = config, world, corpus, agreement
        self._update, self._is_open = update, agreement.growth is not None
        self.cuts = cuts
        self.average = ClusterAverage(
            agreement,
            shared_segments(config, cuts),
            by_samples=getattr(config.replicas, "weights", "equal") == "samples",
            with_state=config.pipeline.ravnest.average_optimizer,
        )
        self.server: StageServer | None = None
        """None: this worker stands by."""
        self.is_broken = False
        """Whether a node of its cluster is lost, and nobody has taken its place yet."""
        self.tokens_before = 0
        """Read in places that this worker had before."""
        self._recut()
        if agreement.trains:
            self._serve()

    @property
    def trains(self) -> bool:
        """Whether it takes part in what its cluster does now."""
        return self._agreement.trains and not self.is_broken

    @property
    def tokens(self) -> int:
        return self.tokens_before + (0 if self.server is None else self.server.tokens)

    def take_assignment(self, steps: int, sequences: int) -> None:
        """Hold what this worker's place asks for now, after so many updates and sequences of the data's order."""
        assignment, here = self._agreement.assignment, self._world.rank
        is_recut = self._recut()
        coordinates, server = assignment.coordinates_of(here), self.server
        has_source, takes = ([pair[side] for pair in assignment.handovers] for side in (0, 1))
        if coordinates is None and here not in has_source:
            self._serve_nothing()
        elif here in has_source:
            assert server is not None
            self.average.serve(server.model, server.optimizer)
        elif coordinates is not None and (coordinates[0] in assignment.complete or here in takes):
            self._begin_at(*coordinates, steps, sequences)
        elif server is not None and self.trains:
            world = self._arranged()
            if world.stage.ranks != server.world.stage.ranks or world.reader != server.world.reader:
                server.regroup(world, steps, sequences)
            if is_recut:
                self.average.serve(server.model, server.optimizer)

    def _recut(self) -> bool:
        """Whether the clusters are cut anew: then what is averaged with whom is, too."""
        wanted = self._agreement.assignment.cuts
        if wanted == tuple(map(first_blocks, self.cuts)):
            return False
        self.cuts = cuts_at(self._config, wanted)
        self.average.recut(shared_segments(self._config, self.cuts))
        return True

    def _begin_at(self, cluster: int, stage: int, steps: int, sequences: int) -> None:
        """In a cluster that wants the others' weights, or a place whose holder leaves."""
        is_new, assignment = self.server is None, self._agreement.assignment
        self._serve().begin_after(steps, sequences)
        if is_new:
            notice = f"worker {self._world.rank} serves stage {stage} of cluster {cluster} from step {steps} on"
            self.note(notice if self._is_open else f"{notice}, in place of one that was lost")
        if stage == 0 and self._is_open and cluster in assignment.out:
            notice = f"cluster {cluster} begins at step {steps} with the others' weights"
            self.note(f"{notice}: {assignment.describe_cluster(cluster)}")

    def _serve(self) -> StageServer:
        """Hold what this worker's place is now."""
        self._serve_nothing()
        world = self._arranged()
        self.server = StageServer(self._config, world, self.cuts[world.coordinate.replica], self._update, self._corpus)
        self.average.serve(self.server.model, self.server.optimizer)
        return self.server

    def _serve_nothing(self) -> None:
        self.tokens_before, self.server, self.is_broken = self.tokens, None, False

    def _arranged(self) -> Mesh:
        return self._world.arranged(layout_of_assignment(self._agreement.assignment, self._world.size))

    def note(self, text: str) -> None:
        self._world.report({"notice": text})
