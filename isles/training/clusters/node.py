"""One worker of a run in clusters, in a world of fixed size or where workers come and leave.

    until the last step:
        a segment of updates, which ends drained      at the next average, validation, checkpoint, or after 200 updates
        average with the other clusters               every replicas.sync_every updates, and at the end
        repair                                        standby nodes take lost ones' places, new clusters begin
        validate, save, stop                          as any worker, see `isles.training.trainer`

on standby            holds nothing, until it takes a lost one's place or a new cluster begins
serves                its stage (`isles.training.clusters.stage_server`)
cluster is broken     its stage: what it did since the last average does not count, until the cluster is repaired
leaves                its stage, until its successor has loaded it

Steps are updates; each stage counts its own, and all have done as many where a segment ends. A worker that is lost
takes its cluster out (`isles.pipeline.ravnest.agreement`), until at an average a standby node takes its place; the
others go on to the end. At each step every cluster reads the next batch of one order (`isles.data.loader`), so no two
read the same, and what is read is in the order, wherever clusters begin and end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from isles.base.parsing import integer
from isles.comm.errors import PeerLost
from isles.comm.group import numbers
from isles.comm.mesh import Mesh
from isles.data import Corpus
from isles.models import sketch
from isles.models.factory import take_device
from isles.network.clusters import ClusterGrowth
from isles.network.routing.events import Span
from isles.pipeline.peers.inbox import PeerInbox
from isles.pipeline.ravnest.agreement import ClusterAgreement, ClusterWelcome, ask_in, let_in
from isles.pipeline.ravnest.assignment import ClusterAssignment
from isles.pipeline.ravnest.averaging import ClusterAverage
from isles.training.clusters.stage_server import (
    SharedReading,
    StageServer,
    cluster_cuts,
    cuts_at,
    inbox_of,
    layout_of_assignment,
    model_load,
    opening_notices,
    shared_segments,
)
from isles.training.config.reading import run_name
from isles.training.config.sections import Config
from isles.training.loop import TrainingLoop
from isles.training.records.checkpoint import Checkpoints
from isles.training.setup import take_cores
from isles.training.step import Left

LONGEST = 200
"""Updates after which a cluster drains to hear whether it should stop."""


class ClusterWorker(TrainingLoop):
    """One worker, whose `step` is a stretch of updates. corpus: that of `config.data`, where it was loaded already.
    assignment: who serves what. inbox: messages between all, those who may come included; None: made
    here. growth: how new clusters are made; None: nobody comes or leaves.
    """

    def __init__(
        self,
        config: Config,
        world: Mesh,
        corpus: Corpus | None,
        assignment: ClusterAssignment,
        *,
        inbox: PeerInbox | None = None,
        growth: ClusterGrowth | None = None,
    ) -> None:
        device = take_device(config.model, world.local_rank)
        super().__init__(config, world, run_name(config), device, None)
        self.losses_a_step = config.pipeline.microbatches
        world.world.ledger.trust.ratio = config.world.trust_ratio
        cuts = cluster_cuts(config)
        self.agreement = ClusterAgreement(inbox or inbox_of(config, world), world.world, assignment, growth)
        for notice in opening_notices(config, cuts) if not world.rank else ():
            world.report({"notice": notice})
        take_cores(config, device)
        self._is_open = growth is not None  # workers come and leave
        self.leaving = False
        self.goes: Callable[[int], bool] | None = None
        """Asked after a step whether this worker goes though nobody can follow it, once its cluster has saved; None:
        it stays until somebody can.
        """
        self._saved_for: frozenset[int] = frozenset()
        self.steps = self.averaged = 0
        """Updates; those at the last average."""
        batch = config.data.batch_size_per_worker(config.replicas_in_all)
        self.reading = SharedReading(len(assignment.clusters), batch)
        self.stale, self._has_come = 0.0, False
        self._end_at = self._taken = 0
        """Losses of the segment under way that are among `losses`, or were reported."""
        self.average = ClusterAverage(
            self.agreement,
            shared_segments(config, cuts),
            by_samples=getattr(config.replicas, "weights", "equal") == "samples",
            with_state=config.pipeline.ravnest.average_optimizer,
        )
        self._corpus, self._cuts = corpus, cuts
        self.server: StageServer | None = None
        """What this worker holds; None: it stands by."""
        self._is_broken = False
        """Whether a node of its cluster is lost, and nobody has taken its place yet."""
        self._tokens_before = 0
        """Read in places that this worker had before."""
        self._recut()
        if self.agreement.trains:
            self._serve()

    def meet(self, present: Sequence[int]) -> None:
        """All who begin together ask for what concerns all of them."""
        text = None if self.server is None else self.server.text
        own = [0, 0] if text is None else [int(text.validates), text.sequences]
        said = torch.stack(self.world.world.among(present).all_gather(numbers(*own), channel="control"))
        validates, sequences = said.amax(0).tolist()
        self._know(validates=validates, most=sequences // self.reading.batch)

    def _know(self, *, validates: int, most: int) -> None:
        """most: clusters that the text is enough for."""
        self.validates, self.agreement.most = bool(validates), most

    def come(self, welcome: ClusterWelcome) -> None:
        """Take part in a run that is at work, as was told."""
        facts, last = welcome.facts, self.config.run.steps
        step, since = (integer(facts, key, 0, last) for key in ("step", "since"))
        before, most, validates = (integer(facts, key, 0, 1 << 53) for key in ("before", "most", "judges"))
        self._know(validates=validates, most=most)
        self.steps = self.averaged = step
        self.reading = replace(self.reading, since=since, before=before)
        self._has_come = True  # and goes on where the others are, right after an average
        self._repair()

    def leave(self) -> None:
        """After the next average, where workers may. May be called in any thread."""
        self.leaving = True

    @property
    def has_departed(self) -> bool:
        return self.agreement.has_departed

    @property
    def trains(self) -> bool:
        """Whether it takes part in what its cluster does now."""
        return self.agreement.trains and not self._is_broken

    @override
    def steps_done(self) -> int:
        return self.steps

    @override
    def played(self) -> Sequence[Span]:
        server = self.server if self.trains else None
        return [] if server is None else server.node.played[-4 * len(server.cut.pieces) :]

    @override
    def conclude(self, out: Path | None) -> dict[str, Any]:
        """With who is left. Tokens are those of this worker's updates."""
        server, assignment, totals = self.server if self.trains else None, self.agreement.assignment, self.totals()
        is_first = server is not None and self.world.rank in assignment.clusters[assignment.whole[0]]
        loss = server.evaluate() if server is not None and self.validates else None
        if server is not None and is_first:
            server.write_whole(out)
        text = None if server is None else server.text
        whole, tells = sketch(self.config.model), is_first and text is not None  # the summary goes by who has the model
        parameters = sum(parameter.numel() for parameter in whole.parameters())
        return {
            **totals,
            **self.compared(parameters, next(whole.parameters()).dtype, len(assignment.living), text),
            "tokens": self._tokens if self.trains else self._tokens_before,
            "parameters": parameters if tells else 0,
            "val_loss": loss if tells else None,
            "val_loss_replica": loss if text is not None else None,
            "replica_std": 0.0,  # all have just taken the same mean
            "memory": None,
        }

    @override
    def _stops_after(self, step: int, out: Path | None) -> bool:
        if super()._stops_after(step, out):
            return True
        stuck = step != self.config.run.steps and self.world.rank in self._saved_for
        return stuck and self.goes is not None and self.goes(step)

    @override
    def _saves_after(self, step: int) -> bool:
        stuck = frozenset() if self.goes is None else self.agreement.assignment.leaving
        before, self._saved_for = self._saved_for, stuck
        return super()._saves_after(step) or bool(stuck - before)

    @override
    def _save(self, out: Path, step: int) -> None:
        self.agreement.drain()
        super()._save(out, step)

    # Stretches

    @property
    def _every(self) -> int:
        """Updates between averages; 0: there are none."""
        averages = len(self._cuts) > 1 or self._is_open
        return getattr(self.config.replicas, "sync_every", 0) if averages else 0

    def _until(self) -> int:
        """The update after which the next stretch ends."""
        run, step = self.config.run, self.steps
        marks = [
            (step // every + 1) * every for every in (self._every, run.validate_every, run.checkpoint_every) if every
        ]
        return min([*marks, step + LONGEST, run.steps])

    def _settles(self, step: int) -> bool:
        """Whether all agree on who is left there, though they do not average: who judges must know of losses."""
        every = self.config.run.validate_every
        return bool(self._every) and self.validates and every > 0 and step % every == 0

    @override
    def step(self) -> None:
        """A stretch, with all that follows it."""
        if self._has_come:
            self._has_come = False
            return
        self._end_at, self._taken = self._until(), 0
        until = self._end_at
        with self.step_clock.step(self.timeline):
            self._train(until - self.steps)
            self.steps = until
            if self._every and (until % self._every == 0 or until == self.config.run.steps):
                if self.leaving:
                    self.agreement.leave()
                samples = 0 if self.server is None else self.server.samples  # of an update
                self.average.average(until, (until - self.averaged) * samples)
                self.averaged = until
                self._admit()
                self._repair()
            elif self._settles(until):
                self.agreement.settle()

    def _train(self, updates: int) -> None:
        """A loss ends it: what this cluster did is worthless then."""
        server = self.server
        if server is None or not self.agreement.trains:
            return
        if self._is_broken:
            server.at(self.steps)
            server.node.refuse()  # some of its nodes may not know
            return
        try:
            server.node.run(server.batches(updates))
            self._take(server)
        except PeerLost as error:
            self._broken_by(error)

    @override
    def validate(self) -> float | None:
        """None also where a node of this cluster is lost meanwhile."""
        if self.server is None or not self.trains:
            return None
        try:
            loss = self.server.evaluate()
            return loss if self.server.text is not None else None
        except PeerLost as error:
            self._broken_by(error)
            return None

    def _broken_by(self, error: PeerLost) -> None:
        """A node of this cluster is lost: PeerLost where nobody else has its part."""
        if not self._every:
            raise error
        self.agreement.miss(error.rank)
        self._is_broken = True
        self.losses.clear()  # what was trained since the last line is worth nothing

    def _update(self, stale: int) -> None:
        assert self.server is not None
        self.server.step(stale)
        self.steps, self.stale = self.steps + 1, float(stale)
        if self.steps % self.config.run.log_every == 0 and self.steps < self._end_at:
            self.report(None)

    def _take(self, server: StageServer) -> None:
        """The losses of the stretch so far."""
        self.losses += server.node.losses[self._taken :]
        self._taken = len(server.node.losses)

    # Who serves what

    def _admit(self) -> None:
        """Those who came, unless all is done."""
        if not self._is_open or self.steps == self.config.run.steps:
            return
        facts = {"step": self.steps, "judges": int(self.validates), "most": self.agreement.most}
        facts |= {"since": self.reading.since, "before": self.reading.before}
        for comer in let_in(self.agreement, facts):
            if self.world.rank == self.agreement.assignment.living[0]:  # who says what all know
                self._note(f"worker {comer} has joined, and is on standby from step {self.steps} on")

    def _repair(self) -> None:
        """Where somebody stands by for who was lost or leaves, their clusters go on from the others' weights; so do new
        ones.
        """
        while self.agreement.repair() and not self.agreement.has_departed:
            self._take_assignment()
            self.average.load(self.steps)
        if self._is_open:
            if self.agreement.has_departed:
                self._note(f"worker {self.world.rank} leaves after step {self.steps}")
                raise Left
            self._take_assignment()  # others may have left without a successor

    def _take_assignment(self) -> None:
        self.reading = self.reading.among(len(self.agreement.assignment.clusters), self.steps)
        assignment, here, server = self.agreement.assignment, self.world.rank, self.server
        is_recut, coordinates = self._recut(), assignment.coordinates_of(here)
        has_source, takes = ([pair[side] for pair in assignment.handovers] for side in (0, 1))
        if coordinates is None and here not in has_source:
            self._serve_nothing()
        elif here in has_source:
            assert server is not None
            self.average.serve(server.model, server.optimizer)
        elif coordinates is not None and (coordinates[0] in assignment.complete or here in takes):
            self._begin_at(*coordinates)
        elif server is not None and self.trains:
            world = self._arranged()
            if world.stage.ranks != server.world.stage.ranks or world.reader != server.world.reader:
                server.regroup(world, self.steps, self.reading.after(self.steps))
            if is_recut:
                self.average.serve(server.model, server.optimizer)

    def _recut(self) -> bool:
        """Whether the clusters are cut anew: then what is averaged with whom is, too."""
        wanted = self.agreement.assignment.cuts
        if wanted == tuple(cut.begins for cut in self._cuts):
            return False
        self._cuts = cuts_at(self.config, wanted)
        self.average.recut(shared_segments(self.config, self._cuts))
        return True

    def _begin_at(self, cluster: int, stage: int) -> None:
        """In a cluster that wants the others' weights, or a place whose holder leaves."""
        is_new, assignment = self.server is None, self.agreement.assignment
        self._serve().begin_after(self.steps, self.reading.after(self.steps))
        if is_new:
            notice = f"worker {self.world.rank} serves stage {stage} of cluster {cluster} from step {self.steps} on"
            self._note(notice if self._is_open else f"{notice}, replacing one that was lost")
        if stage == 0 and self._is_open and cluster in assignment.out:
            notice = f"cluster {cluster} begins at step {self.steps} with the others' weights"
            self._note(f"{notice}: {assignment.describe_cluster(cluster)}")

    def _serve(self) -> StageServer:
        """Hold what this worker's place is now."""
        self._serve_nothing()
        world = self._arranged()
        cut = self._cuts[world.coordinate.replica]
        self.server = StageServer(self.config, world, cut, self._update, self._corpus)
        self.average.serve(self.server.model, self.server.optimizer)
        return self.server

    def _serve_nothing(self) -> None:
        self._tokens_before, self.server, self._is_broken = self._tokens, None, False

    @property
    def _tokens(self) -> int:
        return self._tokens_before + (0 if self.server is None else self.server.tokens)

    def _arranged(self) -> Mesh:
        return self.world.arranged(layout_of_assignment(self.agreement.assignment, self.world.size))

    def _note(self, text: str) -> None:
        self.world.report({"notice": text})

    # Records

    @override
    def report(self, val_loss: float | None) -> None:
        """Where there is a loss to tell: it may have just been assigned a stage."""
        if self.server is None or not self.trains:
            return
        self._take(self.server)
        self.tokens = self._tokens
        if self.losses:
            super().report(val_loss)

    @override
    def _gauges(self) -> dict[str, float]:
        assert self.server is not None
        return {"staleness": self.stale, "weight_versions": float(self.server.node.versions.live)}

    @override
    def _mean(self, losses: Sequence[Tensor]) -> float:
        return sum(torch.stack(list(losses)).tolist()) / len(losses)

    # Checkpoints

    @override
    def state_dict(self) -> dict[str, Any]:
        """Nothing is in flight."""
        return {
            "server": self.server.state_dict() if self.server is not None and self.trains else None,
            "assignment": self.agreement.assignment.to_plain(),
            "steps": self.steps,
            "averaged": self.averaged,
            "tokens_before": self._tokens_before,
            "read": self.reading.after(self.steps),
            "traffic": self.world.world.traffic.state_dict(),
            "transport": self.world.transport.state_dict(),
            **self.records(),
        }

    def begin_after(self, step: int, read: int) -> None:
        """As all are after so many steps and sequences of the data's order, but for the weights."""
        self._go_on({"steps": step, "averaged": step, "read": read})
        if self.server is not None:
            self.server.begin_after(step, read)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.server is not None:
            if state["server"] is None:  # of a cluster that was broken, as not all knew
                raise ValueError("the checkpoint was written while a worker was lost: name an earlier one with --step")
            self.server.load_state_dict(state["server"], state["steps"])
        self._go_on(state)
        self._tokens_before = state["tokens_before"]
        self.world.transport.load_state_dict(state["transport"])
        self.world.world.traffic.load_state_dict(state["traffic"])
        self.load_records(state)

    def come_back(self, state: dict[str, Any]) -> None:
        """Take part again, without a state of one's own. state: of another worker."""
        self._go_on(state)
        self.go_on_at(state["clock_seconds"])

    def _go_on(self, state: dict[str, Any]) -> None:
        self.steps, self.averaged = state["steps"], state["averaged"]
        self.reading = replace(self.reading, since=state["steps"], before=state["read"])


def train_clustered(
    world: Mesh, config: Config, out: Path | None, resume: int | None, corpus: Corpus | None
) -> dict[str, Any] | None:
    """What each worker of such a run does; see `isles.training.worker.train_worker`. One that was lost when the
    checkpoint was written takes part again without a state: in its place, from the next average on, or standing by.
    """
    if resume is None:
        return found(config, world, corpus, range(world.size)).run(out)
    assert out is not None
    checkpoints = Checkpoints(out)
    saved, absent = checkpoints.ranks(resume), checkpoints.absent(resume)
    here = world.rank if world.rank in saved else next((worker for worker in saved if worker not in absent), saved[0])
    state = checkpoints.read_shard(resume, here)
    assignment = ClusterAssignment.of_plain(state["assignment"], world.size)
    gone = set(range(world.size)) - set(saved)
    node = ClusterWorker(config, world, corpus, assignment.without(gone - assignment.lost).returned())
    node.meet(range(world.size))
    if world.rank in saved:
        node.load_state_dict(state)
    else:
        node.come_back(state)
    return node.run(out)


def found(
    config: Config,
    world: Mesh,
    corpus: Corpus | None,
    founders: Sequence[int],
    inbox: PeerInbox | None = None,
    growth: ClusterGrowth | None = None,
) -> ClusterWorker:
    """One of the first, `founders` of `world`, which has positions for all who may come. inbox, growth: as in
    `ClusterWorker`. ValueError where they fill no cluster.
    """
    cuts = [cut.begins for cut in cluster_cuts(config)]
    assignment = ClusterAssignment.of(cuts, founders)
    worker = ClusterWorker(config, world, corpus, assignment, inbox=inbox, growth=growth)
    worker.meet(founders)
    worker.average.begin()
    return worker


def enter(
    config: Config,
    world: Mesh,
    corpus: Corpus,
    others: Sequence[int],
    descriptor: int,
    inbox: PeerInbox | None = None,
    gives_up: Callable[[], bool] = lambda: False,
) -> ClusterWorker:
    """One that comes later, once the `others` who are left have let it in. descriptor: see
    `isles.network.clusters`. Left where it has come too late, or gives up before.
    """
    inbox = inbox or inbox_of(config, world)
    try:
        welcome = ask_in(inbox, others, descriptor, gives_up)
    except PeerLost:
        raise Left from None
    if welcome is None:
        raise Left
    worker = ClusterWorker(config, world, corpus, welcome.assignment, inbox=inbox, growth=growth_of(config))
    worker.come(welcome)
    return worker


def growth_of(config: Config) -> ClusterGrowth:
    """How new clusters are made of those who wait."""
    return ClusterGrowth(model_load(config, cluster_cuts(config)[0].costs), config.pipeline.ravnest.spares)
