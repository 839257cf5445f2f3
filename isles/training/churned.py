"""Runs without a lighthouse whose peers come and go on the virtual clock, as a trace says (`isles.network.churn`): in a
swarm, and in clusters.

RUN/checkpoints/          where `run.checkpoint_every` says so, of those who save together
RUN/model.safetensors     at the end

One that is killed is gone with what was on its line, and the others hear of it at once; one that leaves does so when
its method lets it. One that stands still is waited for, or gone after a while, and somebody else once it goes on.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from typing_extensions import override

from isles.comm import mesh
from isles.comm.errors import PeerLost
from isles.comm.layout import Layout
from isles.comm.mesh import Mesh
from isles.comm.virtual.scheduler import Scheduler
from isles.comm.virtual.transport import VirtualTransport
from isles.comm.virtual.wire import VirtualWire
from isles.data import Corpus
from isles.network.clusters.telling import SILENT
from isles.network.engine import ARRIVED
from isles.training.churn import ChurnedWorld
from isles.training.clustered.node import ClusterWorker
from isles.training.clustered.opening import enter, found, growth_of
from isles.training.config.conflicts import refuse_conflicts
from isles.training.config.sections import Config
from isles.training.draws import seed_draws
from isles.training.records.checkpoint import Checkpoints
from isles.training.records.reshard.clusters import POSITIONS
from isles.training.records.reshard.stages import run_facts
from isles.training.running.starting import deadlines
from isles.training.step import Left
from isles.training.swarmed.trainer import SwarmTrainer


class ChurnedPeers(ChurnedWorld):
    """One run of peers; see `ChurnedWorld`."""

    def __init__(self, config: Config, *more: Any) -> None:
        super().__init__(config, *more)
        if any(event.kind == "lighthouse" for event in self.trace):
            raise ValueError(
                f"churn: a run of {config.pipeline.routing} has no lighthouse that could be away: take that out of the "
                "trace"
            )
        self.workers: dict[int, Any] = {}
        """By rank, the `SwarmTrainer` or `ClusterWorker`, once it has begun."""
        self.asked: set[int] = set()
        """Ranks of those who were to leave, whether they had begun or not."""
        self.counts = {"joins": 0, "deaths": 0, "leaves": 0}
        self._dead: set[int] = set()
        self._awaited: dict[int, set[int]] = {}
        """By step: who has still to write its shard, and who has."""
        self._written: dict[int, set[int]] = {}

    @abstractmethod
    def work(self, world: Mesh, corpus: Corpus) -> dict[str, Any] | None:
        """What each worker does: note itself in `workers`, run to its end, and return its share of the summary, or None
        where it has left.
        """

    def saving(self, rank: int) -> Collection[int]:
        """Ranks whose states make up a checkpoint with that of `rank`, now that this one has written its own; none:
        nothing is kept.
        """
        return ()

    @override
    def told(self) -> dict[str, Any]:
        return self.counts

    @override
    def train(self, corpus: Corpus) -> list[dict[str, Any]]:
        config = self.config

        def work(transport: VirtualTransport) -> None:
            seed_draws(config.run.seed, transport.rank)
            mesh.enter(transport)
            result = self.work(replace(mesh.init(deadlines=deadlines(config)), report=self.heard), corpus)
            if result is not None:
                self.results[transport.rank] = result

        self.let_work(work, before=self._plan)
        return [self.results[rank] for rank in sorted(self.results)]

    def _plan(self, scheduler: Scheduler, wire: VirtualWire, transports: Sequence[VirtualTransport]) -> None:
        """Put what happens on the timeline."""
        for event in self.events:
            rank = int(event.number)
            if event.kind == "join":
                self.counts["joins"] += rank
            elif event.kind in ("kill", "leave"):
                act = partial(self._kill, scheduler, wire, transports, rank) if event.kind == "kill" else None
                scheduler.timeline.at(event.at, ARRIVED, rank, act or partial(self._leave, rank))

    def _kill(self, scheduler: Scheduler, wire: VirtualWire, transports: Sequence[VirtualTransport], rank: int) -> None:
        if rank in self._dead or rank in self.results or (rank in self.workers and self.workers[rank].is_gone):
            return
        self.counts["deaths"] += 1
        self._dead.add(rank)
        for step in sorted(self._awaited):
            self._commit(step)
        wire.dead(rank)
        transports[rank].abandon(PeerLost(rank, "it died"))
        scheduler.kill(scheduler.workers[rank])
        wire.cut(rank, "its connection broke")

    def _leave(self, rank: int) -> None:
        self.counts["leaves"] += 1
        self.asked.add(rank)
        if rank in self.workers:
            self.workers[rank].leave()

    def heard(self, event: object) -> None:
        if not isinstance(event, dict):
            return
        if "notice" in event:
            self.on_notice(event["notice"])
        elif "loss" in event:
            self.write(event)
        elif "checkpoint" in event:
            self._saved(event["checkpoint"], event["worker"])

    def _saved(self, step: int, rank: int) -> None:
        """A shard was written."""
        if together := self.saving(rank):
            self._written.setdefault(step, set()).add(rank)
            self._awaited.setdefault(step, set()).update(together)
            self._commit(step)

    def _commit(self, step: int) -> None:
        """Make the checkpoint of `step` exist, once all who are left have written theirs."""
        written = self._written[step]
        if self._awaited[step] - self._dead - written:
            return
        del self._awaited[step], self._written[step]
        facts = run_facts(self.config) | {POSITIONS: len(self.begins)}
        Checkpoints(self.out).commit(step, sorted(written), facts, keep=self.config.run.keep_checkpoints)


class ChurnedSwarm(ChurnedPeers):
    """In a swarm. One that leaves does so after the step under way."""

    @override
    def work(self, world: Mesh, corpus: Corpus) -> dict[str, Any] | None:
        stages = self.config.pipeline.peers_of(self.founders)
        stages[0] += range(self.founders, len(self.begins))  # until they are told where they are wanted
        placed = world.arranged(Layout.columns(stages))
        trainer = self.workers[world.rank] = SwarmTrainer(self.config, placed, corpus, range(self.founders))
        return trainer.run(self.out)

    @override
    def told(self) -> dict[str, Any]:
        if self.config.pipeline.swarm.stage_lost != "rebuild":
            return self.counts
        return self.counts | {"rebuilt": sum(trainer.model_step.rebuilt for trainer in self.workers.values())}


class ChurnedClusters(ChurnedPeers):
    """In clusters. ValueError for a configuration whose clusters cannot change in number.

    One that comes stands by from the next average on, takes the place of a lost or a leaving one, or makes a new
    cluster with others who wait. One that leaves does so after the next average; where it holds what nobody else does,
    it stays until somebody comes.
    """

    gives_up = saves = True
    machines: Mapping[int, int] = {}
    """What workers tell of themselves when they come, by rank (`isles.network.clusters.telling`)."""

    def __init__(self, config: Config, *more: Any) -> None:
        refuse_conflicts(config, "clusters that come and go")
        super().__init__(config, *more)

    @override
    def work(self, world: Mesh, corpus: Corpus) -> dict[str, Any] | None:
        rank = world.rank
        try:
            if rank < self.founders:
                worker = found(self.config, world, corpus, range(self.founders), growth=growth_of(self.config))
            else:
                worker = enter(self.config, world, corpus, range(rank), self.machines.get(rank, SILENT))
            self.workers[rank] = worker
            worker.leaving = rank in self.asked
            return worker.run(self.out)
        except Left:
            return None

    @override
    def saving(self, rank: int) -> Collection[int]:
        return self.workers[rank].agreement.seats.living

    @override
    def told(self) -> dict[str, Any]:
        """Clusters are those that were whole at the end."""
        ended: ClusterWorker = next(self.workers[rank] for rank in self.results)
        return self.counts | {"replicas": len(ended.agreement.seats.whole)}
