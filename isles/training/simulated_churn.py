"""Runs that workers join and leave on the virtual clock, by a trace (`isles.network.churn`): their common base class,
peers of a swarm or of clusters without a lighthouse, and whole replicas with the lighthouse's own rules.

RUN/config.toml          at the start
RUN/churn.jsonl          the trace of events, as `isles.network.churn` reads it
RUN/metrics.jsonl        the workers' metrics
RUN/members.jsonl        of replicas: the journal; RUN/exchanges.jsonl: the outcomes of each worker's rounds
RUN/checkpoints/         of clusters, every `run.checkpoint_every` steps
RUN/model.safetensors, RUN/summary.json   at the end

A killed peer is lost with its unsent messages, and the others know at once; a leaving one goes when its method allows
it. A paused one is awaited, or lost after a while and joins again when it resumes.
"""

from __future__ import annotations

import json
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from typing_extensions import override

from isles.base.durable import write_text
from isles.base.modes import torch_threads
from isles.base.scratch import scratch
from isles.comm import mesh
from isles.comm.errors import PeerLost
from isles.comm.layout import Layout
from isles.comm.mesh import Mesh
from isles.comm.virtual.cluster import VirtualCluster, VirtualTransport
from isles.comm.virtual.scheduler import Scheduler
from isles.comm.virtual.wire import VirtualWire
from isles.data import Corpus, load_corpus
from isles.membership.run_log import EXCHANGES, JOURNAL
from isles.membership.simulated import SimulatedMembership
from isles.membership.state_transfer import MODEL, StateServer, server_name
from isles.network.churn import POOLS, ChurnEvent, churn, founders, returns, write_trace
from isles.network.clusters import NO_FIGURES
from isles.network.engine import ARRIVED
from isles.network.pauses import KnownPauses
from isles.training.clusters.node import ClusterWorker, enter, found_clusters, growth_of
from isles.training.config.conflicts import refuse_conflicts
from isles.training.config.sections import Config
from isles.training.elastic.leader import Participant
from isles.training.elastic.metrics import elastic_summary
from isles.training.elastic.support import final_rule, rules
from isles.training.lighthouse.judge import judge
from isles.training.lighthouse.mean import consolidate, spread
from isles.training.lighthouse.rounds import MODEL_FILE
from isles.training.loop import checkpoint_steps
from isles.training.memory.plans import step_seconds
from isles.training.records.checkpoint import Checkpoints
from isles.training.records.reshard import POSITIONS, run_facts
from isles.training.records.rundir import METRICS, SUMMARY, as_json, claim, lock_run
from isles.training.records.summary import SummaryTable, summarise
from isles.training.records.writer import write_config
from isles.training.step import Left, seed_draws
from isles.training.swarm.trainer import SwarmTrainer
from isles.training.worker import deadlines

CHURN = "churn.jsonl"
_LONGER = 2.0  # a trace by rate lasts this many times the steps' seconds: exchanges and pauses take time too


class SimulatedWorld(ABC):
    """One run of `config` with the churn `churn_name`, into `out`. on_metrics, on_notice: as in
    `isles.running.run.launch`. ValueError as in `trace_of`.

    founders: number of workers at the start. trace: the events. begins: by worker, the second at which it joins.
    results: by worker, its share of the summary.
    """

    gives_up: ClassVar[bool] = False
    """Whether a worker that is paused for `world.elastic.lease` seconds is lost, and joins again as a new one;
    otherwise the others wait for it.
    """
    saves: ClassVar[bool] = False
    """Whether it writes the checkpoints of `config`; otherwise it writes none, with a notice."""

    def __init__(
        self,
        config: Config,
        churn_name: str,
        out: Path,
        on_metrics: Callable[[dict[str, Any]], None],
        on_notice: Callable[[str], None],
    ) -> None:
        self._dropped = 0 if self.saves else checkpoint_steps(config.run)
        self.config = replace(config, run=replace(config.run, checkpoint_every=0)) if self._dropped else config
        self.out, self.on_metrics, self.on_notice = out, on_metrics, on_notice
        self.founders, self.trace = trace_of(self.config, churn_name)
        self.begins = [0.0] * self.founders
        for event in self.trace:
            self.begins += [event.at] * (int(event.number) if event.kind == "join" else 0)
        self.events: Sequence[ChurnEvent] = self.trace
        """The events, with paused workers that join again as new ones if `gives_up`."""
        # By worker, its machine: one that joins again has a new number, and the speed of its old machine.
        self._machine_of: Sequence[int] = range(len(self.begins))
        if self.gives_up:
            found = returns(self.trace, self.begins, config.world.elastic.lease)
            self.events, self.begins, self._machine_of = found.events, list(found.begins), found.machines
        self.results: dict[int, dict[str, Any]] = {}
        self.summary: SummaryTable = {}

    @abstractmethod
    def train(self, corpus: Corpus) -> list[dict[str, Any]]:
        """Train to the end; returns the results of the workers that the model is made of."""

    @abstractmethod
    def summary_fields(self) -> dict[str, Any]:
        """The summary's entries of this kind of run."""

    def run(self) -> SummaryTable:
        """Run to the end; returns the summary. ValueError if `out` holds a run already, or cannot be created. Workers'
        errors are raised unchanged.
        """
        began = time.perf_counter()
        if self._dropped:
            self.on_notice(
                f"run.checkpoint_every = {self._dropped}: such a run of --churn cannot be resumed, so no checkpoint is "
                "written"
            )
        with lock_run(self.out):
            claim(self.out)
            write_config(self.config, self.out)
            write_trace(self.trace, str(self.out / CHURN))
            with (self.out / METRICS).open("a", encoding="utf-8") as self._metrics:
                results = self.train(load_corpus(self.config.data))
                self.summary = summarise(self.config, results, time.perf_counter() - began)
                self.summary |= self.summary_fields()
                write_text(self.out / SUMMARY, as_json(self.summary, indent=2) + "\n")
        return self.summary

    def write(self, values: Mapping[str, Any]) -> None:
        line = {key: value for key, value in values.items() if value is not None}
        self._metrics.write(as_json(line) + "\n")
        self._metrics.flush()
        self.on_metrics(line)

    def let_work(self, work: Callable[[VirtualTransport], None], before: Callable[..., None]) -> None:
        """Run `work` in each worker, from the second at which it joins. before: see `VirtualCluster.run`."""
        config, world, workers = self.config, self.config.world, len(self.begins)
        factors = replace(world, workers=workers).factors
        cluster = VirtualCluster(
            workers,
            links=world.virtual.links,
            step_seconds=step_seconds(config),
            speeds=[factors[machine] for machine in self._machine_of],
            compute_jitter=world.virtual.step_jitter,
            pauses=KnownPauses(_pauses(self.events)),
            begins=self.begins,
            seed=config.run.seed,
        )
        with torch_threads(world.start_threads):
            cluster.run(work, before=before)


def trace_of(config: Config, name: str) -> tuple[int, list[ChurnEvent]]:
    """The number of workers at the start of a run of `config`, and its events, for the churn `name`. ValueError as
    `isles.network.churn.churn` and `refuse_conflicts`.
    """
    world = config.world
    refuse_conflicts(config, "--churn")
    seconds = config.run.steps * step_seconds(config)
    longer = 1.0 if name in POOLS else _LONGER * max(world.virtual.step_factors, default=1.0)
    return founders(name, world.workers), churn(
        name, workers=world.workers, seconds=seconds * longer, seed=config.run.seed
    )


def _pauses(trace: Iterable[ChurnEvent]) -> dict[int, list[tuple[float, float]]]:
    """The pauses (start, end) of each worker, in seconds; without a resume event the end is infinity."""
    found: dict[int, list[tuple[float, float]]] = {}
    for event in trace:
        stretches = found.setdefault(int(event.number), []) if event.kind in ("pause", "resume") else []
        if event.kind == "pause":
            stretches.append((event.at, float("inf")))
        elif event.kind == "resume":
            stretches[-1] = stretches[-1][0], event.at
    return found


class SimulatedPeers(SimulatedWorld):
    """One run of peers; see `SimulatedWorld`."""

    def __init__(self, config: Config, *more: Any) -> None:
        super().__init__(config, *more)
        if any(event.kind == "lighthouse" for event in self.trace):
            raise ValueError(
                f"churn: a run of {config.pipeline.routing} has no lighthouse that could be away: take that out of the "
                "trace"
            )
        self.workers: dict[int, Any] = {}
        """By rank, the `SwarmTrainer` or `ClusterWorker`, once it has started."""
        self.asked: set[int] = set()
        """Ranks that were asked to leave, whether they had started or not."""
        self.counts = {"joins": 0, "deaths": 0, "leaves": 0}
        self._dead: set[int] = set()
        self._awaited: dict[int, set[int]] = {}
        """By step: the ranks that are to write a shard, and those that have."""
        self._written: dict[int, set[int]] = {}

    @abstractmethod
    def work(self, world: Mesh, corpus: Corpus) -> dict[str, Any] | None:
        """A worker's main function: registers it in `workers`, trains to the end, and returns its share of the summary;
        None if it has left.
        """

    def saving(self, rank: int) -> Collection[int]:
        """The ranks whose shards complete a checkpoint, when `rank` has written its own; empty: no checkpoints."""
        return ()

    @override
    def summary_fields(self) -> dict[str, Any]:
        return self.counts

    @override
    def train(self, corpus: Corpus) -> list[dict[str, Any]]:
        config = self.config

        def work(transport: VirtualTransport) -> None:
            seed_draws(config.run.seed, transport.rank)
            mesh.enter(transport)
            result = self.work(replace(mesh.init(deadlines=deadlines(config)), report=self.on_report), corpus)
            if result is not None:
                self.results[transport.rank] = result

        self.let_work(work, before=self._plan)
        return [self.results[rank] for rank in sorted(self.results)]

    def _plan(self, scheduler: Scheduler, wire: VirtualWire, transports: Sequence[VirtualTransport]) -> None:
        for event in self.events:
            rank = int(event.number)
            if event.kind == "join":
                self.counts["joins"] += rank
            elif event.kind in ("kill", "leave"):
                act = partial(self._kill, scheduler, wire, transports, rank) if event.kind == "kill" else None
                scheduler.timeline.at(event.at, ARRIVED, rank, act or partial(self._leave, rank))

    def _kill(self, scheduler: Scheduler, wire: VirtualWire, transports: Sequence[VirtualTransport], rank: int) -> None:
        if rank in self._dead or rank in self.results or (rank in self.workers and self.workers[rank].has_departed):
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

    def on_report(self, event: object) -> None:
        if not isinstance(event, dict):
            return
        if "notice" in event:
            self.on_notice(event["notice"])
        elif "loss" in event:
            self.write(event)
        elif "checkpoint" in event:
            self._saved(event["checkpoint"], event["worker"])

    def _saved(self, step: int, rank: int) -> None:
        if together := self.saving(rank):
            self._written.setdefault(step, set()).add(rank)
            self._awaited.setdefault(step, set()).update(together)
            self._commit(step)

    def _commit(self, step: int) -> None:
        """Commit the checkpoint of `step`, once all remaining ranks have written their shards."""
        written = self._written[step]
        if self._awaited[step] - self._dead - written:
            return
        del self._awaited[step], self._written[step]
        facts = run_facts(self.config) | {POSITIONS: len(self.begins)}
        Checkpoints(self.out).commit(step, sorted(written), facts, keep=self.config.run.keep_checkpoints)


class SimulatedSwarm(SimulatedPeers):
    """A swarm. A leaving peer goes after the current step."""

    @override
    def work(self, world: Mesh, corpus: Corpus) -> dict[str, Any] | None:
        stages = self.config.pipeline.peers_of(self.founders)
        stages[0] += range(self.founders, len(self.begins))  # a placeholder until the swarm assigns their stages
        placed = world.arranged(Layout.columns(stages))
        trainer = self.workers[world.rank] = SwarmTrainer(self.config, placed, corpus, range(self.founders))
        return trainer.run(self.out)

    @override
    def summary_fields(self) -> dict[str, Any]:
        if self.config.pipeline.swarm.stage_lost != "rebuild":
            return self.counts
        return self.counts | {"rebuilt": sum(trainer.model_step.rebuilt for trainer in self.workers.values())}


class SimulatedClusters(SimulatedPeers):
    """Clusters. ValueError for a configuration whose number of clusters cannot change.

    A joining node is standby from the next average on, replaces a lost or leaving one, or forms a new cluster with
    other standby nodes. A leaving node goes after the next average; if no other node has its stage, it stays until a
    node joins.
    """

    gives_up = saves = True
    machines: Mapping[int, int] = {}
    """By rank, the descriptor that a joining worker sends (`isles.network.clusters`)."""

    def __init__(self, config: Config, *more: Any) -> None:
        refuse_conflicts(config, "clusters that come and go")
        super().__init__(config, *more)

    @override
    def work(self, world: Mesh, corpus: Corpus) -> dict[str, Any] | None:
        rank = world.rank
        try:
            if rank < self.founders:
                worker = found_clusters(self.config, world, corpus, range(self.founders), growth=growth_of(self.config))
            else:
                worker = enter(self.config, world, corpus, range(rank), self.machines.get(rank, NO_FIGURES))
            self.workers[rank] = worker
            worker.leaving = rank in self.asked
            return worker.run(self.out)
        except Left:
            return None

    @override
    def saving(self, rank: int) -> Collection[int]:
        return self.workers[rank].agreement.assignment.living

    @override
    def summary_fields(self) -> dict[str, Any]:
        """Replicas: the number of intact clusters at the end."""
        ended: ClusterWorker = next(self.workers[rank] for rank in self.results)
        return self.counts | {"replicas": len(ended.agreement.assignment.whole)}


class SimulatedElasticRun(SimulatedWorld):
    """One run of whole replicas; see `SimulatedWorld`. made: called with each worker before it starts."""

    def __init__(self, config: Config, *more: Any, made: Callable[[Participant], None] = lambda worker: None) -> None:
        super().__init__(config, *more)
        self._notices: dict[str, None] = {}
        self._made = made
        governed = replace(rules(config), founders=self.founders, most=1 << 20)
        self.simulation = SimulatedMembership(governed, self.trace, config.world.elastic.lease, self._on_report)
        self.records: list[dict[str, Any]] = []

    @override
    def train(self, corpus: Corpus) -> list[dict[str, Any]]:
        with scratch() as folder:
            self._train(corpus, folder)
            for name, entries in ((JOURNAL, self.simulation.journal), (EXCHANGES, self.records)):
                lines = (f"{json.dumps(entry, separators=(',', ':'))}\n" for entry in entries)
                write_text(self.out / name, "".join(lines))
            self._members = self._mean(folder)
        seconds = self.config.world.eval_deadline
        self._judged = judge(self.out, corpus.sha256, [self.out / MODEL_FILE], seconds, lambda: False)
        return [self.results[member] for member in self._members]

    def _train(self, corpus: Corpus, folder: Path) -> None:
        def work(transport: VirtualTransport) -> None:
            client = self.simulation.admitted(transport.rank)
            if client is None:
                return
            own = folder / str(transport.rank)
            own.mkdir()

            def lost(state_server: str) -> bool:
                return state_server.isdecimal() and client.lost(int(state_server))

            transfers = StateServer(
                client.session, server_name(client.member, 0), self._notice, lost=lost, changed=client.changed
            )
            leaving = self.simulation.leaving[transport.rank]
            worker = Participant(
                self.config,
                client,
                transport,
                transfers,
                corpus,
                own,
                self._notice,
                leaving=leaving,
            )
            self._made(worker)
            try:
                worker.run()
                client.close()
                with client.changed:
                    self.simulation.ended(client.member)
            except Exception:
                with client.changed:
                    self.simulation.end()  # otherwise the others would wait for this worker forever
                raise
            finally:
                worker.worker.close()

        self.let_work(work, before=self.simulation.open)

    def _on_report(self, member: int, event: Mapping[str, Any]) -> None:
        if "result" in event:
            self.results[member] = event["result"]
        elif "round" in event or "start" in event:
            self.records.append(event.get("round") or event["start"])
        elif "loss" in event:
            self.write(event)

    def _notice(self, text: str) -> None:
        """Pass each text on once, even if several workers report it."""
        if text not in self._notices:
            self._notices[text] = None
            self.on_notice(text)

    def _mean(self, folder: Path) -> list[int]:
        """Write the run's model; returns the members that it is made of."""
        members = sorted(member for member in self.simulation.finished if member in self.results)
        models = {member: folder / str(member) / f"{MODEL}.safetensors" for member in members}
        left = consolidate(models, self.out / MODEL_FILE, **final_rule(self.config))
        members = [member for member in members if member not in left]
        self.spread = spread([models[member] for member in members], self.out / MODEL_FILE)
        return members

    @override
    def summary_fields(self) -> dict[str, Any]:
        computed = sum(transport.compute_seconds for transport in self.simulation.transports)
        membership = self.simulation.membership
        assert membership is not None, "no lighthouse at the end"
        wall = self.summary["wall_seconds"]
        summary = elastic_summary(self.config, self.out, self.results, membership, self._members, wall, computed)
        losses = {key: loss for key, loss in (self._judged.losses[0] or {}).items() if math.isfinite(loss)}
        return summary | losses | {"replica_std": self.spread}
