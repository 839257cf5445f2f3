"""One worker of a run in clusters, in a world of fixed size or where workers come and leave.

    until the last step:
        a segment of updates, then the pipeline drains   up to the next average, validation, checkpoint, or 200 updates
        average with the other clusters                  every replicas.sync_every updates, and at the end
        repair                                           standby nodes replace lost ones, new clusters begin
        validate, save, stop                             as any worker, see `isles.training.trainer`

What a worker holds:

    on standby           nothing, until it replaces a lost node or a new cluster begins
    in a cluster         its stage (`isles.training.clusters.stage_server`)
    in a broken cluster  its stage; its updates since the last average are discarded when the cluster is repaired
    leaving              its stage, until its successor has loaded it

Steps are updates; each stage counts its own, and at the end of a segment all stages have the same count. The loss of a
worker removes its cluster from training (`isles.pipeline.ravnest.agreement`) until a standby node replaces it at an
average; the other clusters go on to the end. At each step every cluster reads the next batch of one global order
(`isles.data.loader`), so no two clusters read the same sequences, also when clusters are added or removed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
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
from isles.pipeline.ravnest.agreement import ClusterAgreement, ClusterWelcome, admit_joiners, request_admission
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
from isles.training.loop import TrainingLoop, checkpoint_steps
from isles.training.records.checkpoint import Checkpoints
from isles.training.setup import take_cores
from isles.training.step import Left, Losses

LONGEST = 200
"""Updates after which a cluster drains to hear whether it should stop."""


class ClusterWorker(TrainingLoop):
    """One worker; its `step` is a segment of updates. corpus: that of `config.data`, if it is loaded already.
    assignment: of positions to stages. inbox: for messages between all positions; None: create it. growth: how new
    clusters are formed; None: no worker joins or leaves.
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
        self.decide_exit: Callable[[int], bool] | None = None
        """Called after a step, once its cluster has saved: whether this worker leaves without a successor. None: it
        stays until it has one.
        """
        self.states_wanted: Callable[[], int] = lambda: 0
        """The step from which on a lighthouse asks for the state; 0: it does not."""
        self.watched: Callable[[], AbstractContextManager[None]] = nullcontext
        """The context of each segment."""
        self._saved_for, self._saved_at = frozenset[int](), 0
        self.steps = self.averaged = 0
        """Updates so far, and up to the last average."""
        batch = config.data.batch_size_per_worker(config.replicas_in_all)
        self.reading = SharedReading(len(assignment.clusters), batch)
        self.stale, self._has_come = 0.0, False
        self._end_at = self._taken = 0
        """Last update of the current segment; number of its losses that were moved to `losses`."""
        self.average = ClusterAverage(
            self.agreement,
            shared_segments(config, cuts),
            by_samples=getattr(config.replicas, "weights", "equal") == "samples",
            with_state=config.pipeline.ravnest.average_optimizer,
        )
        self._corpus, self._cuts = corpus, cuts
        self.server: StageServer | None = None
        """What this worker holds; None on standby."""
        self._is_broken = False
        """Whether a node of its cluster is lost and not replaced yet."""
        self._tokens_before = 0
        """Tokens read in assignments before the current one."""
        self._recut()
        if self.agreement.trains:
            self._serve()

    def exchange_facts(self, present: Sequence[int]) -> None:
        """Agree, among the workers `present` at the start, on whether to validate and on the most clusters."""
        text = None if self.server is None else self.server.text
        own = [0, 0] if text is None else [int(text.validates), text.sequences]
        said = torch.stack(self.world.world.among(present).all_gather(numbers(*own), channel="control"))
        validates, sequences = said.amax(0).tolist()
        self._set_facts(validates=validates, most=sequences // self.reading.batch)

    def _set_facts(self, *, validates: int, most: int) -> None:
        """most: clusters that the text has enough sequences for."""
        self.validates, self.agreement.most = bool(validates), most

    def join(self, welcome: ClusterWelcome) -> None:
        """Join a running run with the facts of `welcome`."""
        facts, last = welcome.facts, self.config.run.steps
        step, since = (integer(facts, key, 0, last) for key in ("step", "since"))
        before, most, validates = (integer(facts, key, 0, 1 << 53) for key in ("before", "most", "judges"))
        self._set_facts(validates=validates, most=most)
        self.steps = self.averaged = step
        self.reading = replace(self.reading, since=since, before=before)
        self._has_come = True  # its first `step` does nothing: the others have just averaged
        self._repair()

    def leave(self) -> None:
        """Ask to leave after the next average, if workers may leave. Thread-safe."""
        self.leaving = True

    @property
    def has_departed(self) -> bool:
        return self.agreement.has_departed

    @property
    def trains(self) -> bool:
        """Whether this worker trains now."""
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
        """Conclude with the remaining workers. Tokens are those of this worker's updates."""
        server, assignment, totals = self.server if self.trains else None, self.agreement.assignment, self.totals()
        is_first = server is not None and self.world.rank in assignment.clusters[assignment.whole[0]]
        losses = server.evaluate() if server is not None and self.validates else {}
        if server is not None and is_first:
            server.write_whole(out)
        text = None if server is None else server.text
        whole, tells = sketch(self.config.model), is_first and text is not None  # only the writer of the model reports
        parameters = sum(parameter.numel() for parameter in whole.parameters())
        return {
            **totals,
            **self.compared(parameters, next(whole.parameters()).dtype, len(assignment.living), text),
            "tokens": self._tokens if self.trains else self._tokens_before,
            "parameters": parameters if tells else 0,
            "val_loss": None,
            **(losses if tells else {}),
            "val_loss_replica": losses.get("val_loss"),
            "replica_std": 0.0,  # all have just taken the same mean
            "memory": None,
        }

    @override
    def _stops_after(self, step: int, out: Path | None) -> bool:
        if super()._stops_after(step, out):
            return True
        stuck = step != self.config.run.steps and self.world.rank in self._saved_for
        return stuck and self.decide_exit is not None and self.decide_exit(step)

    @override
    def _saves_after(self, step: int) -> bool:
        stuck = frozenset() if self.decide_exit is None else self.agreement.assignment.leaving
        before, self._saved_for = self._saved_for, stuck
        is_asked = self._saved_at < self.states_wanted() <= step
        return super()._saves_after(step) or is_asked or bool(stuck - before)

    @override
    def _saves_last(self) -> bool:
        return not self._is_open and super()._saves_last()

    @override
    def _save(self, out: Path, step: int) -> None:
        self.agreement.drain()
        self._saved_at = step
        super()._save(out, step)

    # Segments

    @property
    def _every(self) -> int:
        """Updates between averages; 0: no averages."""
        averages = len(self._cuts) > 1 or self._is_open
        return getattr(self.config.replicas, "sync_every", 0) if averages else 0

    def _until(self) -> int:
        """The last update of the next segment."""
        run, step = self.config.run, self.steps
        often = (self._every, run.validate_every, checkpoint_steps(run))
        marks = [(step // every + 1) * every for every in often if every]
        return min([*marks, step + LONGEST, run.steps])

    def _settles(self, step: int) -> bool:
        """Whether the workers agree on the remaining ones after `step` without an average: validation needs it."""
        every = self.config.run.validate_every
        return bool(self._every) and self.validates and every > 0 and step % every == 0

    @override
    def step(self) -> None:
        """A segment of updates, then the average and repair that are due."""
        if self._has_come:
            self._has_come = False
            return
        self._end_at, self._taken = self._until(), 0
        until = self._end_at
        with self.watched(), self.step_clock.step(self.timeline):
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
        """Train for `updates` updates. A loss of a node ends it and marks this cluster as broken."""
        server = self.server
        if server is None or not self.agreement.trains:
            return
        if self._is_broken:
            server.at(self.steps)
            server.node.refuse()  # some of its nodes may not know of the loss and wait for this one
            return
        try:
            server.node.run(server.batches(updates))
            self._take(server)
        except PeerLost as error:
            self._broken_by(error)

    @override
    def validate(self) -> Losses:
        """The validation losses, at the root; {} elsewhere, and if a node of this cluster is lost."""
        try:
            return self.server.evaluate() if self.server is not None and self.trains else {}
        except PeerLost as error:
            self._broken_by(error)
            return {}

    def _broken_by(self, error: PeerLost) -> None:
        """Mark this cluster as broken; raises `error` if no other cluster has the lost stage."""
        if not self._every:
            raise error
        self.agreement.miss(error.rank)
        self._is_broken = True
        self.losses.clear()  # the updates since the last line of metrics are discarded

    def _update(self, stale: int) -> None:
        assert self.server is not None
        self.server.step(stale)
        self.steps, self.stale = self.steps + 1, float(stale)
        if self.steps % self.config.run.log_every == 0 and self.steps < self._end_at:
            self.report({})

    def _take(self, server: StageServer) -> None:
        """Move the new losses of this segment to `losses`."""
        self.losses += server.node.losses[self._taken :]
        self._taken = len(server.node.losses)

    # The assignment

    def _admit(self) -> None:
        """Admit joining workers, except after the last step."""
        if not self._is_open or self.steps == self.config.run.steps:
            return
        facts = {"step": self.steps, "judges": int(self.validates), "most": self.agreement.most}
        facts |= {"since": self.reading.since, "before": self.reading.before}
        for comer in admit_joiners(self.agreement, facts):
            if self.world.rank == self.agreement.assignment.living[0]:  # one worker reports what all know
                self._note(f"worker {comer} has joined, and is on standby from step {self.steps} on")

    def _repair(self) -> None:
        """Replace lost and leaving workers by standby ones; repaired and new clusters load the others' weights."""
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
        """Adopt changed cuts, and the new segments of the average; returns whether they changed."""
        wanted = self.agreement.assignment.cuts
        if wanted == tuple(cut.begins for cut in self._cuts):
            return False
        self._cuts = cuts_at(self.config, wanted)
        self.average.recut(shared_segments(self.config, self._cuts))
        return True

    def _begin_at(self, cluster: int, stage: int) -> None:
        """Serve a stage of a cluster that has to load the others' weights, or one that a leaving worker hands over."""
        is_new, assignment = self.server is None, self.agreement.assignment
        self._serve().begin_after(self.steps, self.reading.after(self.steps))
        if is_new:
            notice = f"worker {self.world.rank} serves stage {stage} of cluster {cluster} from step {self.steps} on"
            self._note(notice if self._is_open else f"{notice}, in place of a lost worker")
        if stage == 0 and self._is_open and cluster in assignment.out:
            notice = f"cluster {cluster} begins at step {self.steps} with the others' weights"
            self._note(f"{notice}: {assignment.describe_cluster(cluster)}")

    def _serve(self) -> StageServer:
        """Build the server of the stage that is assigned to this worker."""
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
    def report(self, losses: Losses) -> None:
        """Report metrics, if there is a loss: a worker that was just assigned a stage has none."""
        if self.server is None or not self.trains:
            return
        self._take(self.server)
        self.tokens = self._tokens
        if self.losses:
            super().report(losses)

    @override
    def gradient_norm(self) -> Tensor | None:
        return None if self.server is None else self.server.gradient_norm

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
        """Set everything but the weights to the state after `step` steps and `read` sequences of the data's order."""
        self._go_on({"steps": step, "averaged": step, "read": read})
        if self.server is not None:
            self.server.begin_after(step, read)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.server is not None:
            if state["server"] is None:  # the checkpoint is of a broken cluster, before all its nodes knew of the loss
                raise ValueError("the checkpoint was written while a worker was lost: name an earlier one with --step")
            self.server.load_state_dict(state["server"], state["steps"])
        self._go_on(state)
        self._tokens_before = state["tokens_before"]
        self.tokens = self._tokens
        self.world.transport.load_state_dict(state["transport"])
        self.world.world.traffic.load_state_dict(state["traffic"])
        self.load_records(state)

    def rejoin(self, state: dict[str, Any]) -> None:
        """Take part again without an own state, with the counters of another worker's `state`."""
        self._go_on(state)
        self.go_on_at(state["clock_seconds"])

    def _go_on(self, state: dict[str, Any]) -> None:
        self.steps, self.averaged = state["steps"], state["averaged"]
        self.reading = replace(self.reading, since=state["steps"], before=state["read"])


def train_clustered(
    world: Mesh, config: Config, out: Path | None, resume: int | None, corpus: Corpus | None
) -> dict[str, Any] | None:
    """Train as one worker of a run in clusters; see `isles.training.worker.train_worker`. A worker that was lost when
    the checkpoint was written takes part again without a state: in its stage from the next average on, or on standby.
    """
    if resume is None:
        return found_clusters(config, world, corpus, range(world.size)).run(out)
    assert out is not None
    checkpoints = Checkpoints(out)
    saved, absent = checkpoints.ranks(resume), checkpoints.absent(resume)
    here = world.rank if world.rank in saved else next((worker for worker in saved if worker not in absent), saved[0])
    state = checkpoints.read_shard(resume, here)
    assignment = ClusterAssignment.of_plain(state["assignment"], world.size)
    gone = set(range(world.size)) - set(saved)
    node = ClusterWorker(config, world, corpus, assignment.without(gone - assignment.lost).with_returned())
    node.exchange_facts(range(world.size))
    if world.rank in saved:
        node.load_state_dict(state)
    else:
        node.rejoin(state)
    return node.run(out)


def found_clusters(
    config: Config,
    world: Mesh,
    corpus: Corpus | None,
    founders: Sequence[int],
    inbox: PeerInbox | None = None,
    growth: ClusterGrowth | None = None,
) -> ClusterWorker:
    """One of the first workers, `founders`; `world` also has positions for all that may join. inbox, growth: as in
    `ClusterWorker`. ValueError if they fill no cluster.
    """
    cuts = [cut.begins for cut in cluster_cuts(config)]
    assignment = ClusterAssignment.of(cuts, founders)
    worker = ClusterWorker(config, world, corpus, assignment, inbox=inbox, growth=growth)
    worker.exchange_facts(founders)
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
    """A worker that joins later, once the remaining `others` have admitted it. descriptor: see
    `isles.network.clusters`. Left if the run has ended, or it gives up before.
    """
    inbox = inbox or inbox_of(config, world)
    try:
        welcome = request_admission(inbox, others, descriptor, gives_up)
    except PeerLost:
        raise Left from None
    if welcome is None:
        raise Left
    worker = ClusterWorker(config, world, corpus, welcome.assignment, inbox=inbox, growth=growth_of(config))
    worker.join(welcome)
    return worker


def growth_of(config: Config) -> ClusterGrowth:
    """How standby nodes form new clusters."""
    return ClusterGrowth(model_load(config, cluster_cuts(config)[0].costs), config.pipeline.ravnest.spares)
