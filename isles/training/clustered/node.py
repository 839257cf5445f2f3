"""One worker of a run in clusters.

    until the last step:
        a stretch of updates, which ends drained      at the next average, validation, checkpoint, or after 200 updates
        average with the other clusters               every replicas.sync_every updates, and at the end
        mend                                          who stands by takes lost ones' places, new clusters begin
        validate, save, stop                          as any worker, see `isles.training.trainer`

Steps are updates; each stage counts its own, and all have done as many where a stretch ends. A worker that is lost
takes its cluster out (`isles.pipeline.ravnest.agreement`), until at an average one that stands by takes its place; the
others go on to the end.

Which text the clusters of a run read, where new ones begin and others end: at each step every cluster the next
batch of one order (`isles.data.loader`), so no two read the same, and what is read is in the order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from isles.comm.collectives.same import numbers
from isles.comm.errors import PeerLost
from isles.comm.mesh import Mesh
from isles.data import Corpus
from isles.fields import integer
from isles.models.factory import take_device
from isles.network.clusters.growing import ClusterGrowth
from isles.pipeline.ravnest.agreement import ClusterAgreement
from isles.pipeline.ravnest.entering import ClusterWelcome, let_in
from isles.pipeline.ravnest.seats import ClusterSeats
from isles.pipeline.swarm.post import Post
from isles.training.clustered.cuts import cluster_cuts, first_blocks, opening_notices, post_of
from isles.training.clustered.ending import conclude, write_shard
from isles.training.clustered.holding import NodeHolding
from isles.training.clustered.meter import NodeMeter
from isles.training.clustered.serving import Serving
from isles.training.config.sections import Config, RunConfig
from isles.training.cores import take_cores
from isles.training.draws import draws_state, restore_draws
from isles.training.records.finite import first_nan
from isles.training.step import Left


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


LONGEST = 200
"""Updates after which a cluster drains to hear whether it should stop."""


@dataclass(frozen=True)
class Stretches:
    """every: updates between averages; 0: there are none. judges: whether text was kept for validation."""

    run: RunConfig
    every: int
    judges: bool

    def until(self, step: int) -> int:
        """The update after which the stretch behind `step` ends."""
        run = self.run
        marks = [
            (step // every + 1) * every for every in (self.every, run.validate_every, run.checkpoint_every) if every
        ]
        return min([*marks, step + LONGEST, run.steps])

    def averages(self, step: int) -> bool:
        """Whether clusters average there."""
        return bool(self.every) and (step % self.every == 0 or step == self.run.steps)

    def validates(self, step: int) -> bool:
        """Whether clusters judge there; at the end they do so anyway."""
        every = self.run.validate_every
        return self.judges and bool(every) and step % every == 0 and step != self.run.steps

    def settles(self, step: int) -> bool:
        """Whether all agree on who is left there, though they do not average: who judges must know of losses."""
        every = self.run.validate_every
        return bool(self.every) and not self.averages(step) and self.judges and every > 0 and step % every == 0


class ClusterWorker:
    """One worker. corpus: that of `config.data`, where it was loaded already. seats: who serves what; None: as the run
    begins. post: letters between all, those who may come included; None: made here. growth: how new clusters are made;
    None: nobody comes or leaves.
    """

    def __init__(
        self,
        config: Config,
        world: Mesh,
        corpus: Corpus | None = None,
        seats: ClusterSeats | None = None,
        *,
        post: Post | None = None,
        growth: ClusterGrowth | None = None,
    ) -> None:
        self.config, self.world = config, world
        world.world.ledger.trust.ratio = config.world.trust_ratio
        cuts = cluster_cuts(config)
        seats = seats or ClusterSeats.of([first_blocks(cut) for cut in cuts], range(world.size))
        self.agreement = ClusterAgreement(post or post_of(config, world), world.world, seats, growth)
        for notice in opening_notices(config, cuts) if not world.rank else ():
            world.report({"notice": notice})
        self.device = take_device(config.model, world.local_rank)
        take_cores(config, self.device)
        self.judges = False
        """Whether text was kept for validation."""
        self.saves: Callable[[Path, int, dict[str, Any]], None] = partial(write_shard, config, world)
        """Given a directory, the step and `state_dict`, at a checkpoint."""
        self.leaving = False
        """Set it to have this worker leave after the next average, where workers may."""
        self.goes: Callable[[int], bool] | None = None
        """Asked after a step whether this worker goes though nobody can follow it, once its cluster has saved; None:
        it stays until somebody can.
        """
        self._saved_for: frozenset[int] = frozenset()
        self.steps = self.averaged = 0
        """Updates; those at the last average."""
        batch = config.data.batch_size_per_worker(config.replicas_in_all)
        self.reading = SharedReading(len(seats.clusters), batch)
        self.stale, self._has_come = 0.0, False
        self._end_at = 0
        self.meter = NodeMeter(config, world, self.device)
        self._holding = NodeHolding(config, world, corpus, self.agreement, cuts, self._update, is_open=self._is_open)
        self.average = self._holding.average

    def meet(self, present: Sequence[int]) -> None:
        """All who begin together ask for what concerns all of them."""
        text = self._holding.text
        own = [0, 0] if text is None else [int(text.judges), text.loader.sequences]
        said = torch.stack(self.world.world.among(present).all_gather(numbers(*own), channel="control"))
        judges, sequences = said.amax(0).tolist()
        self._know(judges=judges, most=sequences // self.reading.batch)

    def _know(self, *, judges: int, most: int) -> None:
        """most: clusters that the text is enough for."""
        self.judges, self.agreement.most = bool(judges), most

    def come(self, welcome: ClusterWelcome) -> None:
        """Take part in a run that is at work, as was told."""
        facts, last = welcome.facts, self.config.run.steps
        step, since = (integer(facts, key, 0, last) for key in ("step", "since"))
        before, most, judges = (integer(facts, key, 0, 1 << 53) for key in ("before", "most", "judges"))
        self._know(judges=judges, most=most)
        self.steps = self.averaged = step
        self.reading = replace(self.reading, since=since, before=before)
        self._has_come = True  # and goes on where the others are, right after an average
        self._mend()

    @property
    def serving(self) -> Serving | None:
        """What this worker holds; None: it stands by."""
        return self._holding.serving

    @property
    def trains(self) -> bool:
        """Whether it takes part in what its cluster does now."""
        return self._holding.trains

    def run(self, out: Path | None) -> dict[str, Any] | None:
        """Train the steps that are left; the first worker that is left writes OUT/model.safetensors. Returns this
        worker's share of the summary, or None where the run was stopped (its state is then in a checkpoint). Left where
        this worker alone has gone.
        """
        begins = self._has_come
        while self.steps < self.config.run.steps:
            if not begins:
                self._stretch(self._stretches.until(self.steps) - self.steps)
            begins = False
            if self._at_border(out):
                self.meter.stop()
                return None
        return self.conclude(out)

    def conclude(self, out: Path | None) -> dict[str, Any]:
        """Judge the averaged weights and write the model, with who is left; this worker's share of the summary."""
        is_first = self.trains and self.world.rank in self.agreement.seats.clusters[self.agreement.seats.whole[0]]
        result = conclude(
            self.config,
            len(self.agreement.seats.living),
            self.serving if self.trains else None,
            self.meter,
            out if is_first else None,
            steps=self.steps,
            judges=self.judges,
            tells=is_first,
        )
        return result | {"tokens": self._holding.tokens if self.trains else self._holding.tokens_before}

    def _at_border(self, out: Path | None) -> bool:
        """Validate, save, and whether to stop."""
        run, step, ends = self.config.run, self.steps, self.steps == self.config.run.steps
        validating = self._stretches.validates(step)
        judged = self._judged() if self.trains and validating else None
        if self.trains and (validating or step % run.log_every == 0 or ends):
            self._report(judged)
        stopping = self.world.stop_here(step) and not ends
        due = run.checkpoint_every and step % run.checkpoint_every == 0 and not ends
        stuck = frozenset() if self.goes is None or ends else self.agreement.seats.leaving
        due = bool(due) or bool(stuck - self._saved_for)
        self._saved_for = stuck
        if out is not None and (stopping or due):
            self.agreement.drain()
            if (broken := first_nan(state := self.state_dict())) is not None:
                raise self.meter.diverged(f"its weights are not finite after inner step {step} ({broken})")
            self.saves(out, step, state)
        return stopping or (self.goes is not None and self.world.rank in stuck and self.goes(step))

    # Stretches

    @property
    def _is_open(self) -> bool:
        """Whether workers come and leave."""
        return self.agreement.growth is not None

    @property
    def _stretches(self) -> Stretches:
        averages = len(self._holding.cuts) > 1 or self._is_open
        every = getattr(self.config.replicas, "sync_every", 0) if averages else 0
        return Stretches(self.config.run, every, self.judges)

    def _stretch(self, updates: int) -> None:
        self._end_at = until = self.steps + updates
        with self.meter.stretch():
            self._train(updates)
            self.steps = until
            if self._stretches.averages(until):
                if self.leaving:
                    self.agreement.leave()
                self.average.average(until, (until - self.averaged) * self._holding.samples)
                self.averaged = until
                self._admit()
                self._mend()
            elif self._stretches.settles(until):
                self.agreement.settle()

    def _train(self, updates: int) -> None:
        """A loss ends it: what this cluster did is worthless then."""
        serving = self.serving
        if serving is None or not self.agreement.trains:
            return
        if self._holding.is_broken:
            serving.at(self.steps)
            serving.node.refuse()  # some of its nodes may not know
            return
        try:
            serving.node.run(serving.batches(updates))
            self.meter.take(serving.node.losses)
        except PeerLost as error:
            self._broken_by(error)

    def _judged(self) -> float | None:
        """The loss on the text kept for it; None where a node of this cluster is lost meanwhile."""
        assert self.serving is not None
        try:
            return self.serving.judge.loss(self.serving.validation())
        except PeerLost as error:
            self._broken_by(error)
            return None

    def _broken_by(self, error: PeerLost) -> None:
        """A node of this cluster is lost: PeerLost where nobody else has its part."""
        if not self._stretches.every:
            raise error
        self.agreement.miss(error.rank)
        self._holding.is_broken = True
        self.meter.drop()

    def _update(self, stale: int) -> None:
        assert self.serving is not None
        self.serving.step(stale)
        self.steps, self.stale = self.steps + 1, float(stale)
        if self.steps % self.config.run.log_every == 0 and self.steps < self._end_at:
            self._report(None)

    # Who serves what

    def _admit(self) -> None:
        """Those who came, unless all is done."""
        if not self._is_open or self.steps == self.config.run.steps:
            return
        facts = {"step": self.steps, "judges": int(self.judges), "most": self.agreement.most}
        facts |= {"since": self.reading.since, "before": self.reading.before}
        for comer in let_in(self.agreement, facts):
            if self.world.rank == self.agreement.seats.living[0]:  # who says what all know
                self._holding.note(f"worker {comer} has come, and stands by from step {self.steps} on")

    def _mend(self) -> None:
        """Where somebody stands by for who was lost or leaves, their clusters go on from the others' weights; so do new
        ones.
        """
        while self.agreement.mend() and not self.agreement.is_gone:
            self._take_place()
            self.average.load(self.steps)
        if self._is_open:
            if self.agreement.is_gone:
                self._holding.note(f"worker {self.world.rank} leaves after step {self.steps}")
                raise Left
            self._take_place()  # others may have left without a successor

    def _take_place(self) -> None:
        self.reading = self.reading.among(len(self.agreement.seats.clusters), self.steps)
        self._holding.take_place(self.steps, self.reading.after(self.steps))

    # Records

    def _report(self, val_loss: float | None) -> None:
        serving = self.serving
        assert serving is not None
        self.meter.take(serving.node.losses)
        gauges = {"staleness": self.stale, "weight_versions": float(serving.node.versions.live)}
        self.meter.line(self.steps, self._holding.tokens, val_loss if serving.text is not None else None, gauges)

    # Checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next steps of this worker depend on, and its running totals. Nothing is in flight."""
        return {
            "serving": self.serving.state_dict() if self.serving is not None and self.trains else None,
            "seats": self.agreement.seats.to_plain(),
            "steps": self.steps,
            "averaged": self.averaged,
            "tokens_before": self._holding.tokens_before,
            "read": self.reading.after(self.steps),
            **self.meter.state_dict(),
            **draws_state(self.device),
        }

    def begin_after(self, step: int, read: int) -> None:
        """As all are after so many steps and sequences of the data's order, but for the weights."""
        self._go_on({"steps": step, "averaged": step, "read": read})
        if self.serving is not None:
            self.serving.begin_after(step, read)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue exactly from `state_dict`."""
        if self.serving is not None:
            if state["serving"] is None:  # of a cluster that was broken, as not all knew
                raise ValueError("the checkpoint was written while a worker was lost: name an earlier one with --step")
            self.serving.load_state_dict(state["serving"], state["steps"])
        self._go_on(state)
        self._holding.tokens_before = state["tokens_before"]
        self.meter.load_state_dict(state, self.device)
        restore_draws(state, self.device)

    def come_back(self, state: dict[str, Any]) -> None:
        """Take part again, without a state of one's own. state: of another worker."""
        self._go_on(state)
        self.meter.come_back(state)

    def _go_on(self, state: dict[str, Any]) -> None:
        self.steps, self.averaged = state["steps"], state["averaged"]
        self.reading = replace(self.reading, since=state["steps"], before=state["read"])
