"""One worker of a run in clusters.

    until the last step:
        a stretch of updates, which ends drained      at the next average, validation, checkpoint, or after 200 updates
        average with the other clusters               every replicas.sync_every updates, and at the end
        validate, save, stop                          as any worker, see `isles.training.trainer`

Steps are updates; each stage counts its own, and all have done as many where a stretch ends. A worker that is lost
takes its cluster out (`isles.pipeline.ravnest.quorum`), until at an average one that stands by takes its place; the
others go on to the end.
"""

from __future__ import annotations

import math
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from isles.comm.codecs import codec
from isles.comm.collectives.mean import sent_bytes
from isles.comm.errors import PeerLost, WorkerFailed
from isles.comm.mesh import Mesh
from isles.data import Corpus
from isles.models import choose_device, sketch
from isles.pipeline.assemble import assembled
from isles.pipeline.ravnest.averaging import ClusterAverage
from isles.pipeline.ravnest.quorum import Quorum
from isles.pipeline.ravnest.seats import ClusterSeats
from isles.schema import Metrics
from isles.training.clustered.cuts import cluster_cuts, ranks_of, shared_segments
from isles.training.clustered.serving import Serving, layout_of_seats
from isles.training.config.inner import inner_notices, lr_factor
from isles.training.config.reading import run_name
from isles.training.config.sections import Config
from isles.training.draws import draws_state, restore_draws
from isles.training.records.checkpoint import Checkpoints
from isles.training.records.finite import first_nan
from isles.training.records.saved import save_model
from isles.training.records.timeline import Timeline
from isles.training.staged import hold_against_whole, on_host
from isles.training.step import WAITS
from isles.training.text import Text

LONGEST = 200
"""Updates after which a cluster drains to hear whether it should stop."""


class ClusterWorker:
    """One worker. corpus: that of `config.data`, where it was loaded already. seats: who serves what; None: as the run
    begins.
    """

    def __init__(
        self, config: Config, world: Mesh, corpus: Corpus | None = None, seats: ClusterSeats | None = None
    ) -> None:
        self.config, self.world, self.corpus = config, world, corpus
        world.world.ledger.trust.ratio = config.world.trust_ratio
        self.cuts = cuts = cluster_cuts(config)
        self.quorum = Quorum(world.world, seats or ClusterSeats.of(ranks_of(cuts), world.size))
        self._opening(cuts)
        self.average = ClusterAverage(
            self.quorum,
            shared_segments(config, cuts),
            by_samples=getattr(config.replicas, "weights", "equal") == "samples",
            with_state=config.pipeline.average_optimizer,
        )
        self.device = choose_device(config.model, world.local_rank)
        self.serving: Serving | None = None
        """None: this worker stands by."""
        self.is_broken = False
        """Whether a node of its cluster is lost, and nobody has taken its place yet."""
        if self.quorum.trains:
            self._serve()
        judges = torch.tensor([self.text is not None and self.text.judges])
        self.judges = any(map(bool, world.world.all_gather(judges, channel="control")))
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

    @property
    def text(self) -> Text | None:
        """At the root."""
        return None if self.serving is None else self.serving.text

    @property
    def trains(self) -> bool:
        """Whether it takes part in what its cluster does now."""
        return self.quorum.trains and not self.is_broken

    def _serve(self) -> None:
        """Hold what this worker's place is now."""
        world = self.world.arranged(layout_of_seats(self.quorum.seats, self.world.size))
        cut = self.cuts[world.place.replica]
        self.serving = Serving(self.config, world, cut, self._update, self.corpus)
        self.average.serve(self.serving.model, self.serving.optimizer)
        self.is_broken = False

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
            if self.trains and (validating or step % run.log_every == 0 or ends):
                assert self.serving is not None
                self._report(self.serving.judge.loss(self.serving.validation()) if validating else None)
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

    @property
    def _every(self) -> int:
        """Updates between averages; 0: there are none."""
        return getattr(self.config.replicas, "sync_every", 0) if len(self.cuts) > 1 else 0

    def _judges_after(self, step: int) -> bool:
        """Whether clusters judge there, though they do not average."""
        every = self.config.run.validate_every
        return len(self.cuts) > 1 and self.judges and every > 0 and step % every == 0

    def _until(self) -> int:
        """The update after which this stretch ends, the same at all workers."""
        run = self.config.run
        marks = [
            (self.steps // every + 1) * every
            for every in (self._every, run.validate_every, run.checkpoint_every)
            if every
        ]
        return min([*marks, self.steps + LONGEST, run.steps])

    def _stretch(self, updates: int) -> None:
        transport, until = self.world.transport, self.steps + updates
        before = transport.now()
        self.began, self.told = (before, transport.away_seconds), 0
        self._end_at = until
        self._train(updates)
        self.steps = until
        if self._every and (until % self._every == 0 or until == self.config.run.steps):
            self.average.average(until, (until - self.averaged) * self._samples)
            self.averaged = until
            self._mend()
        elif self._judges_after(until):
            self.quorum.settle()  # who judges must know of losses
        self.training_seconds, self.began = self._trained(), None
        self.timeline.step(before, transport.now())

    def _train(self, updates: int) -> None:
        """A loss ends it: what this cluster did is worthless then."""
        serving = self.serving
        if serving is None or not self.quorum.trains:
            return
        if self.is_broken:
            serving.at(self.steps)
            serving.node.refuse()  # some of its nodes may not know
            return
        try:
            serving.node.run(serving.batches(updates))
            self._take_losses()
        except PeerLost as error:
            if len(self.cuts) == 1:
                raise
            self.quorum.miss(error.rank)
            self.is_broken = True
            self.left_over.clear()

    def _mend(self) -> None:
        """Where somebody stands by for who was lost, their clusters go on from the others' weights."""
        while self.quorum.mend():
            seats, here = self.quorum.seats, self.world.rank
            place = seats.place(here)
            if place is not None and place[0] in seats.complete:
                is_new = self.serving is None
                self._serve()
                assert self.serving is not None
                self.serving.begin_after(self.steps)
                if is_new:
                    told = f"worker {here} serves stage {place[1]} of cluster {place[0]} from step {self.steps} on"
                    self.world.report({"notice": f"{told}, in place of one that was lost"})
            self.average.load(self.steps)

    @property
    def _samples(self) -> int:
        return 0 if self.serving is None else self.serving.samples

    def _update(self, stale: int) -> None:
        assert self.serving is not None
        self.serving.step(stale)
        self.steps, self.stale = self.steps + 1, float(stale)
        if self.steps % self.config.run.log_every == 0 and self.steps < self._end_at:
            self._report(None)

    def _take_losses(self) -> None:
        if self.serving is not None:
            self.left_over += self.serving.node.losses[self.told :]
            self.told = len(self.serving.node.losses)

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
        return 0 if self.serving is None else self.steps * self.serving.tokens_an_update

    def _report(self, val_loss: float | None) -> None:
        assert self.serving is not None
        self._take_losses()
        if not self.left_over:  # it has just taken a place
            return
        values = torch.stack(self.left_over).tolist()
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
        gauges = {"staleness": self.stale, "weight_versions": float(self.serving.node.versions.live)}
        self.world.report(asdict(line) | gauges)
        self._report_spans(self.timeline.take(self.steps, traffic.take_spans(), self.clock_before))

    def _report_spans(self, spans: list[dict[str, Any]]) -> None:
        if spans:
            self.world.report({"spans": spans})

    def _diverged(self, what: str) -> WorkerFailed:
        return WorkerFailed(self.world.rank, f"{what}: lower inner.lr (now {self.config.inner.lr:g})")

    def _conclude(self, out: Path | None) -> dict[str, Any]:
        """Judge the averaged weights, put them together and save them."""
        traffic, world = self.world.world.traffic, self.world
        self.timeline.take(self.steps, traffic.take_spans(), self.clock_before)
        spans = self.timeline.rest()
        if self.trains and self.serving is not None:
            shown = self.serving.node.played[-4 * len(self.serving.cut.pieces) :]
            spans += self.timeline.tasks(self.steps, shown, self.clock_before)
        self._report_spans(spans)
        sent, received = int(traffic.total("bytes_sent")), int(traffic.total("bytes_received"))
        channels, blocked = traffic.by_channel(), traffic.total("blocked_seconds", *WAITS)
        clock, seconds = self.clock, time.perf_counter() - self.started
        loss, root, first = None, False, False
        if self.trains and self.serving is not None:
            serving, root = self.serving, self.serving.text is not None
            loss = serving.judge.loss(serving.validation()) if self.judges else None
            first = serving.world.place.replica == self.quorum.seats.whole[0]
            if first:
                self._save(serving, out)
        whole = sketch(self.config.model)
        parameters = sum(parameter.numel() for parameter in whole.parameters())
        dtype = next(whole.parameters()).dtype
        ddp = [sent_bytes(parameters, dtype, codec("none"), world.size, position) for position in range(world.size)]
        return {
            "tokens": self.tokens if self.trains else 0,
            "parameters": parameters if root and first else 0,  # the summary goes by who has the one model
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

    def _save(self, serving: Serving, out: Path | None) -> None:
        model = self.config.model
        whole = on_host(model, self.config.run.seed) if serving.text is not None else sketch(model)
        filled = assembled(serving.model, serving.world.stage, whole, serving.cut.pieces)
        if filled is not None and out is not None:
            save_model(filled, out / "model.safetensors")

    # Checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next steps of this worker depend on, and its running totals. Nothing is in flight."""
        traffic, transport = self.world.world.traffic, self.world.transport
        return {
            "serving": self.serving.state_dict() if self.serving is not None and self.trains else None,
            "seats": self.quorum.seats.to_plain(),
            "steps": self.steps,
            "averaged": self.averaged,
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
        if self.serving is not None:
            if state["serving"] is None:  # of a cluster that was broken, as not all knew
                raise ValueError("the checkpoint was written while a worker was lost: name an earlier one with --step")
            self.serving.load_state_dict(state["serving"], state["steps"])
        self.steps, self.averaged = state["steps"], state["averaged"]
        self.left_over = [] if state["losses"] is None else list(state["losses"].to(self.device))
        self.world.transport.load_state_dict(state["transport"])
        self.world.world.traffic.load_state_dict(state["traffic"])
        self.training_seconds = state["training_seconds"]
        self.clock_before = state["clock_seconds"] - self.world.transport.now()
        self.started = time.perf_counter() - state["host_seconds"]
        self.timeline = Timeline(self.world.rank, resumed=True)
        restore_draws(state, self.device)

    def come_back(self, state: dict[str, Any]) -> None:
        """Take part again, without a state of one's own. state: of another worker."""
        self.steps, self.averaged = state["steps"], state["averaged"]
        self.clock_before = state["clock_seconds"] - self.world.transport.now()
        self.timeline = Timeline(self.world.rank, resumed=True)
