"""One worker of a run in clusters.

    until the last step:
        a stretch of updates, which ends drained      at the next average, validation, checkpoint, or after 200 updates
        average with the other clusters               every replicas.sync_every updates, and at the end
        validate, save, stop                          as any worker, see `isles.training.trainer`

Steps are updates; each stage counts its own, and all have done as many where a stretch ends. A worker that is lost
takes its cluster with it (`isles.pipeline.ravnest.quorum`); the others go on to the end.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from isles.comm.codecs import codec
from isles.comm.collectives.mean import sent_bytes
from isles.comm.errors import WorkerFailed
from isles.comm.mesh import Mesh
from isles.data import Corpus
from isles.models import autocast, limits, sketch
from isles.pipeline.assemble import assembled
from isles.pipeline.evaluation import Judge
from isles.pipeline.pipeline import form_of
from isles.pipeline.ravnest.averaging import ClusterAverage
from isles.pipeline.ravnest.quorum import Quorum
from isles.pipeline.ravnest.stage import AsyncStage, AsyncWays
from isles.pipeline.shares import stage_shares
from isles.schema import Metrics
from isles.training.clustered.cuts import cluster_cuts, ranks_of, shared_segments
from isles.training.config.inner import inner_notices, inner_optimizer, lr_factor
from isles.training.config.reading import run_name
from isles.training.config.sections import Config
from isles.training.draws import draws_state, restore_draws
from isles.training.records.checkpoint import Checkpoints
from isles.training.records.finite import first_nan
from isles.training.records.saved import save_model
from isles.training.records.timeline import Timeline
from isles.training.staged import build_stage, hold_against_whole, on_host, run_scheme, told_by_first
from isles.training.step import WAITS
from isles.training.text import Text

LONGEST = 200
"""Updates after which a cluster drains to hear whether it should stop."""


class ClusterWorker:
    """One worker. corpus: that of `config.data`, where it was loaded already."""

    def __init__(self, config: Config, world: Mesh, corpus: Corpus | None = None) -> None:
        self.config, self.world = config, world
        world.world.ledger.trust.ratio = config.world.trust_ratio
        self.text = Text(config, world, corpus) if world.place.stage == 0 else None
        self.judges = told_by_first(world.stage, self.text is not None and self.text.judges)
        cuts = cluster_cuts(config)
        self.cut = cut = cuts[world.place.replica]
        scheme = run_scheme(config, cut)
        self._opening(cuts)
        self.model = build_stage(config, cut, scheme, world.place.stage, world.local_rank)
        self.optimizer = inner_optimizer(self.model, config.inner, "adamw")
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda done: lr_factor(done + 1, config.run.steps, config.inner)
        )
        self.device = next(self.model.parameters()).device
        context, vocab = limits(config.model)
        sequences = config.data.batch_size_per_worker(world.reader[1])
        form = form_of(self.model, scheme, config.pipeline, batch_size=sequences, context=context, vocab=vocab)
        self.samples = sequences
        """Sequences of an update."""
        cast = partial(autocast, config.model, self.device)
        self.node = AsyncStage(self.model, self._update, world.stage, form, self._ways(), autocast=cast)
        self.judge = Judge(self.model, world.stage, form, home=False, autocast=cast)
        self.quorum = Quorum(world.world, ranks_of(cuts))
        state = self.optimizer if config.pipeline.average_optimizer else None
        by_samples = getattr(config.replicas, "weights", "equal") == "samples"
        segments = shared_segments(config, cuts)
        self.average = ClusterAverage(self.model, self.quorum, segments, by_samples=by_samples, optimizer=state)
        self.steps = self.averaged = self.told = 0
        """Updates; those at the last average; losses of the stretch that were told."""
        self.left_over: list[Tensor] = []
        """Losses since the last line, of stretches before this one."""
        self.training_seconds = self.clock_before = self.stale = 0.0
        self._end_at = 0
        self.began: tuple[float, float] | None = None
        """When the stretch under way began, and the seconds away until then."""
        self.started = time.perf_counter()
        self.timeline = Timeline(world.rank)

    def _ways(self) -> AsyncWays:
        pipeline, place = self.config.pipeline, self.world.place
        stages = len(self.cut.pieces)
        return AsyncWays(
            in_flight=pipeline.in_flight if isinstance(pipeline.in_flight, int) else stages,
            every=pipeline.microbatches,
            order=pipeline.order,
            recompute=pipeline.recompute,
            shares=stage_shares(
                self.cut.pieces[place.stage], self.cut.costs, pipeline.microbatches, recompute=pipeline.recompute
            ),
        )

    def _opening(self, cuts: list[Any]) -> None:
        """The first worker holds every cut against the whole, and says what a user should know."""
        if self.world.rank:
            return
        notices = inner_notices(self.config.inner, "adamw", self.config.run.steps)
        for cut in {tuple(piece.blocks.start for piece in one.pieces): one for one in cuts}.values():
            notice = hold_against_whole(self.config, cut) if len(cut.pieces) > 1 else None
            notices += [] if notice is None else [notice]
        if self.config.pipeline.lossy:
            notices.append(f"lossy between stages: {', '.join(self.config.pipeline.lossy)}")
        if self.config.data.validation_fraction == 0:
            notices.append("data.validation_fraction = 0: there will be no validation loss")
        for notice in dict.fromkeys(notices):
            self.world.report({"notice": notice})

    def run(self, out: Path | None) -> dict[str, Any] | None:
        """Train the steps that are left; the first worker that is left writes OUT/model.safetensors. Returns this
        worker's share of the summary, or None where the run was stopped (its state is then in a checkpoint).
        """
        run = self.config.run
        while self.steps < run.steps:
            self._stretch(self._until() - self.steps)
            step, ends = self.steps, self.steps == run.steps
            validating = self.judges and run.validate_every and step % run.validate_every == 0 and not ends
            if validating or step % run.log_every == 0 or ends:
                self._report(self.judge.loss(self._validation()) if validating else None)
            stopping = self.world.stop_here(step) and not ends
            due = run.checkpoint_every and step % run.checkpoint_every == 0 and not ends
            if out is not None and (stopping or due):
                state = self.state_dict()
                if (broken := first_nan(state)) is not None:
                    raise self._diverged(f"its weights are not finite after inner step {step} ({broken})")
                Checkpoints(out).write_shard(step, self.world.rank, state, run_name(self.config))
                self.world.report({"checkpoint": step, "worker": self.world.rank})
            if stopping:
                self._report_spans(self.timeline.rest())
                return None
        return self._conclude(out)

    # Stretches

    def _until(self) -> int:
        """The update after which this stretch ends, the same at all workers."""
        run, every = self.config.run, getattr(self.config.replicas, "sync_every", 0)
        marks = [
            (self.steps // every + 1) * every for every in (every, run.validate_every, run.checkpoint_every) if every
        ]
        return min([*marks, self.steps + LONGEST, run.steps])

    def _stretch(self, updates: int) -> None:
        transport, until = self.world.transport, self.steps + updates
        before = transport.now()
        self.began, self.told = (before, transport.away_seconds), 0
        self._end_at = until
        self.node.run(self._batches(updates))
        self._take_losses()
        every = getattr(self.config.replicas, "sync_every", 0)
        if len(self.quorum.clusters) > 1 and (self.steps % every == 0 or self.steps == self.config.run.steps):
            self.average.average(self.steps, (self.steps - self.averaged) * self.samples)
            self.averaged = self.steps
        self.training_seconds, self.began = self._trained(), None
        self.timeline.step(before, transport.now())

    def _batches(self, updates: int) -> Iterator[Tensor]:
        if self.text is None:
            return
        for _ in range(updates):
            yield from self.text.batch().split(self.node.form.sequences)

    def _update(self, stale: int) -> None:
        config, optimizer = self.config, self.optimizer
        if config.inner.max_norm:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), config.inner.max_norm)
        rates = [group["lr"] for group in optimizer.param_groups]
        if config.pipeline.stage_lr == "1/(1+tau)":
            for group in optimizer.param_groups:
                group["lr"] /= 1 + stale
        optimizer.step()
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        optimizer.zero_grad()
        self.schedule.step()
        self.steps, self.stale = self.steps + 1, float(stale)
        if self.steps % config.run.log_every == 0 and self.steps < self._end_at:
            self._report(None)

    def _take_losses(self) -> None:
        self.left_over += self.node.losses[self.told :]
        self.told = len(self.node.losses)

    def _trained(self) -> float:
        """Seconds of training so far."""
        if self.began is None:
            return self.training_seconds
        transport = self.world.transport
        since, away = self.began
        return self.training_seconds + transport.now() - since - (transport.away_seconds - away)

    # Records

    @property
    def clock(self) -> float:
        """Seconds of the run, those before it was resumed included."""
        return self.clock_before + self.world.transport.now()

    @property
    def tokens(self) -> int:
        """Read for the updates so far."""
        return 0 if self.text is None else self.steps * self.samples * self.node.form.length

    def _report(self, val_loss: float | None) -> None:
        self._take_losses()
        values = torch.stack(self.left_over).tolist() if self.left_over else [math.nan]
        self.left_over.clear()
        if not all(map(math.isfinite, values)):
            raise self._diverged(f"its loss is not finite by inner step {self.steps}")
        traffic, config = self.world.world.traffic, self.config
        blocked = traffic.total("blocked_seconds", *WAITS)
        line = Metrics(
            step=self.steps,
            worker=self.world.rank,
            loss=sum(values) / len(values),
            lr=lr_factor(self.steps, config.run.steps, config.inner) * config.inner.lr,
            tokens=self.tokens,
            bytes_sent=int(traffic.total("bytes_sent")),
            bytes_received=int(traffic.total("bytes_received")),
            blocked_seconds=blocked,
            compute_seconds=self._trained() - blocked,
            clock_seconds=self.clock,
            val_loss=val_loss if self.text is not None else None,
        )
        self.world.report(asdict(line) | {"staleness": self.stale, "weight_versions": float(self.node.versions.live)})
        self._report_spans(self.timeline.take(self.steps, traffic.take_spans(), self.clock_before))

    def _report_spans(self, spans: list[dict[str, Any]]) -> None:
        if spans:
            self.world.report({"spans": spans})

    def _diverged(self, what: str) -> WorkerFailed:
        return WorkerFailed(self.world.rank, f"{what}: lower inner.lr (now {self.config.inner.lr:g})")

    def _validation(self) -> Iterator[Tensor]:
        return iter(()) if self.text is None else self.text.validation()

    def _conclude(self, out: Path | None) -> dict[str, Any]:
        """Judge the averaged weights, put them together and save them."""
        traffic, world = self.world.world.traffic, self.world
        self.timeline.take(self.steps, traffic.take_spans(), self.clock_before)
        shown = self.node.played[-4 * len(self.cut.pieces) :]
        spans = self.timeline.rest() + self.timeline.tasks(self.steps, shown, self.clock_before)
        self._report_spans(spans)
        sent, received = int(traffic.total("bytes_sent")), int(traffic.total("bytes_received"))
        channels, blocked = traffic.by_channel(), traffic.total("blocked_seconds", *WAITS)
        clock, seconds = self.clock, time.perf_counter() - self.started
        loss = self.judge.loss(self._validation()) if self.judges else None
        first = world.place.replica == self.quorum.whole[0]
        parameters = sum(parameter.numel() for parameter in sketch(self.config.model).parameters())
        if first:
            self._save(out)
        dtype = next(self.model.parameters()).dtype
        ddp = [sent_bytes(parameters, dtype, codec("none"), world.size, position) for position in range(world.size)]
        root = self.text is not None
        return {
            "tokens": self.tokens,
            "parameters": parameters,
            "val_loss": loss if root and first else None,
            "val_loss_replica": loss if root else None,
            "replica_std": 0.0,  # all have just taken the same mean
            "bytes_sent": sent,
            "bytes_received": received,
            "ddp_bytes": self.config.run.steps * sum(ddp) / len(ddp),
            "compute_seconds": self.training_seconds - blocked,
            "blocked_seconds": blocked,
            "train_seconds": seconds,
            "virtual_seconds": clock,
            "channels": channels,
            "corpus_sha256": "" if self.text is None else self.text.corpus.sha256,
            "memory": None,
        }

    def _save(self, out: Path | None) -> None:
        whole = on_host(self.config.model, self.config.run.seed) if self.text is not None else sketch(self.config.model)
        filled = assembled(self.model, self.world.stage, whole, self.cut.pieces)
        if filled is not None and out is not None:
            save_model(filled, out / "model.safetensors")

    # Checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next steps of this worker depend on, and its running totals. Nothing is in flight."""
        traffic, transport = self.world.world.traffic, self.world.transport
        return {
            "model": self.model.state_dict(),
            "inner": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "loader": None if self.text is None else self.text.state_dict(),
            "steps": self.steps,
            "averaged": self.averaged,
            "microbatches": self.node.done,
            "losses": torch.stack(self.left_over) if self.left_over else None,
            "traffic": traffic.state_dict(),
            "transport": transport.state_dict(),
            "training_seconds": self.training_seconds,
            "clock_seconds": self.clock,
            "host_seconds": time.perf_counter() - self.started,
            **draws_state(self.device),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue exactly from `state_dict`."""
        try:
            self.model.load_state_dict(state["model"])
        except RuntimeError as error:  # torch tells every tensor that does not fit, a line each
            raise ValueError(
                "the checkpoint is of another model, or of other clusters: set [model] and [pipeline] in the run's "
                "config.toml back to what they were"
            ) from error
        self.optimizer.load_state_dict(state["inner"])
        self.schedule.load_state_dict(state["schedule"])
        if self.text is not None:
            self.text.load_state_dict(state["loader"])
        self.steps, self.averaged = state["steps"], state["averaged"]
        self.node.resume(state["microbatches"], state["steps"])
        self.left_over = [] if state["losses"] is None else list(state["losses"].to(self.device))
        self.world.transport.load_state_dict(state["transport"])
        self.world.world.traffic.load_state_dict(state["traffic"])
        self.training_seconds = state["training_seconds"]
        self.clock_before = state["clock_seconds"] - self.world.transport.now()
        self.started = time.perf_counter() - state["host_seconds"]
        self.timeline = Timeline(self.world.rank, resumed=True)
        restore_draws(state, self.device)


def train_clustered(
    world: Mesh, config: Config, out: Path | None, resume: int | None, corpus: Corpus | None
) -> dict[str, Any] | None:
    """What each worker of such a run does; see `isles.training.worker.train_worker`."""
    node = ClusterWorker(config, world, corpus)
    if resume is None:
        node.average.begin()
    else:
        assert out is not None
        node.load_state_dict(Checkpoints(out).read_shard(resume, world.rank))
    return node.run(out)
