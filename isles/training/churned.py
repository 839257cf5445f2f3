"""A run without a lighthouse whose workers come and go on the virtual clock, as a trace says (`isles.network.churn`).

RUN/config.toml, RUN/churn.jsonl      at once
RUN/metrics.jsonl                     what the workers report
RUN/checkpoints/                      where `run.checkpoint_every` says so, of those who save together
RUN/model.safetensors, RUN/summary.json   at the end

One that is killed is gone with what was on its line, and the others hear of it at once; one that leaves does so when
its method lets it. One that stands still is waited for, or gone after a while, and somebody else once it goes on.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from isles.comm import mesh
from isles.comm.errors import PeerLost
from isles.comm.mesh import Mesh
from isles.comm.virtual.scheduler import Scheduler
from isles.comm.virtual.transport import VirtualTransport
from isles.comm.virtual.wire import VirtualWire
from isles.data import Corpus, load_corpus
from isles.durable import write_text
from isles.network.engine import ARRIVED
from isles.training.churn import ChurnedWorkers
from isles.training.config.sections import Config
from isles.training.draws import seed_draws
from isles.training.records.checkpoint import Checkpoints
from isles.training.records.reshard.clusters import POSITIONS
from isles.training.records.reshard.stages import run_facts
from isles.training.records.rundir import SUMMARY, as_json
from isles.training.records.summary import SummaryTable, summarise
from isles.training.running.starting import deadlines

W = TypeVar("W")


class ChurnedWorld(ABC, Generic[W]):
    """One run of `config` through the changes of `churn_name`, into `out`; W is what a worker of it is. on_line,
    on_notice: as in `isles.training.running.run.launch`.
    """

    gives_up: ClassVar[bool] = False
    """Whether one that stands still for `world.elastic.lease` seconds is gone for the others."""
    saves: ClassVar[bool] = False
    """Whether there are checkpoints; of whom, says `saving`."""

    def __init__(
        self,
        config: Config,
        churn_name: str,
        out: Path,
        on_line: Callable[[dict[str, Any]], None],
        on_notice: Callable[[str], None],
    ) -> None:
        self.out, self.on_line, self.on_notice = out, on_line, on_notice
        lease = config.world.elastic.lease if self.gives_up else None
        self.churn = ChurnedWorkers(config, churn_name, lease, saves=self.saves)
        self.config = self.churn.config
        self.founders, self.begins = self.churn.founders, self.churn.begins
        if any(event.kind == "lighthouse" for event in self.churn.trace):
            raise ValueError(
                f"churn: a run of {config.pipeline.routing} has no lighthouse that could be away: take that out of the "
                "trace"
            )
        self.workers: dict[int, W] = {}
        """By rank, once they have begun."""
        self.asked: set[int] = set()
        """Ranks of those who were to leave, whether they had begun or not."""
        self.results: dict[int, dict[str, Any]] = {}
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

    @abstractmethod
    def is_gone(self, worker: W) -> bool:
        """Whether it has left."""

    @abstractmethod
    def leave(self, worker: W) -> None:
        """Ask it to."""

    def saving(self, rank: int) -> Collection[int]:
        """Ranks whose states make up a checkpoint with that of `rank`, now that this one has written its own; none:
        nothing is kept.
        """
        return ()

    def counted(self) -> dict[str, Any]:
        """What the summary tells beside what all tell."""
        return self.counts

    def run(self) -> SummaryTable:
        """To its end. ValueError: `out` holds a run already, or cannot be made. A failure is raised as it is."""
        began = time.perf_counter()
        for notice in self.churn.notices:
            self.on_notice(notice)
        with self.churn.directory(self.out, self.on_line) as self._line:
            self._train()
            results = [self.results[rank] for rank in sorted(self.results)]
            summary = summarise(self.config, results, time.perf_counter() - began) | self.counted()
            write_text(self.out / SUMMARY, as_json(summary, indent=2) + "\n")
        return summary

    def _train(self) -> None:
        config = self.config
        corpus = load_corpus(config.data)

        def work(transport: VirtualTransport) -> None:
            seed_draws(config.run.seed, transport.rank)
            mesh.enter(transport)
            result = self.work(replace(mesh.init(deadlines=deadlines(config)), report=self.heard), corpus)
            if result is not None:
                self.results[transport.rank] = result

        self.churn.train(work, before=self._plan)

    def _plan(self, scheduler: Scheduler, wire: VirtualWire, transports: Sequence[VirtualTransport]) -> None:
        """Put what happens on the timeline."""
        for event in self.churn.events:
            rank = int(event.number)
            if event.kind == "join":
                self.counts["joins"] += rank
            elif event.kind in ("kill", "leave"):
                act = partial(self._kill, scheduler, wire, transports, rank) if event.kind == "kill" else None
                scheduler.timeline.at(event.at, ARRIVED, rank, act or partial(self._leave, rank))

    def _kill(self, scheduler: Scheduler, wire: VirtualWire, transports: Sequence[VirtualTransport], rank: int) -> None:
        if rank in self._dead or rank in self.results or (rank in self.workers and self.is_gone(self.workers[rank])):
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
            self.leave(self.workers[rank])

    def heard(self, event: object) -> None:
        """What a worker reports."""
        if not isinstance(event, dict):
            return
        if "notice" in event:
            self.on_notice(event["notice"])
        elif "loss" in event:
            self._line(event)
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
