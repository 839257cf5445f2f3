"""A run in a swarm whose peers come and go on the virtual clock, as a trace says (`isles.network.churn`).

RUN/config.toml, RUN/churn.jsonl      at once
RUN/metrics.jsonl                     what the peers report
RUN/model.safetensors, RUN/summary.json   at the end

A peer that is killed is gone with what was on its line, and the others hear of it at once; one that leaves does so
after the step under way; one that stands still is waited for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from isles.comm import mesh
from isles.comm.errors import PeerLost
from isles.comm.layout import Layout
from isles.comm.virtual.cluster import VirtualCluster
from isles.comm.virtual.events import ARRIVED
from isles.comm.virtual.scheduler import Scheduler
from isles.comm.virtual.transport import VirtualTransport
from isles.comm.virtual.wire import VirtualWire
from isles.data import load_corpus
from isles.durable import write_text
from isles.network.churn import write_trace
from isles.network.pauses import KnownPauses
from isles.training.config.sections import Config
from isles.training.config.swarmed import stages_of
from isles.training.draws import seed_draws
from isles.training.elastic.churned import CHURN, pauses, trace_of
from isles.training.memory import step_seconds
from isles.training.records.rundir import METRICS, SUMMARY, claim, held
from isles.training.records.writer import as_json, write_config
from isles.training.running.run import SummaryTable, summarise
from isles.training.running.starting import deadlines
from isles.training.swarmed.trainer import SwarmTrainer


class ChurnedSwarm:
    """One run of `config` through the changes of `churn_name`, into `out`. on_line, on_notice: as in
    `isles.training.running.run.launch`.
    """

    def __init__(
        self,
        config: Config,
        churn_name: str,
        out: Path,
        on_line: Callable[[dict[str, Any]], None],
        on_notice: Callable[[str], None],
    ) -> None:
        self.config, self.out, self.on_line, self.on_notice = config, out, on_line, on_notice
        self.founders, self.trace = trace_of(config, churn_name)
        if any(event.kind == "lighthouse" for event in self.trace):
            raise ValueError("churn: a swarm has no lighthouse that could be away: take that out of the trace")
        self.begins = [0.0] * self.founders
        for event in self.trace:
            self.begins += [event.at] * (int(event.number) if event.kind == "join" else 0)
        stages = stages_of(config.pipeline, self.founders)
        stages[0] += range(self.founders, len(self.begins))  # until they are told where they are wanted
        self.layout = Layout.columns(stages)
        self.trainers: dict[int, SwarmTrainer] = {}
        self.results: dict[int, dict[str, Any]] = {}
        self.counts = {"joins": 0, "deaths": 0, "leaves": 0}

    def run(self) -> SummaryTable:
        """To its end. ValueError: `out` holds a run already, or cannot be made. A failure is raised as it is."""
        began = time.perf_counter()
        with held(self.out):
            claim(self.out)
            write_config(self.config, self.out)
            write_trace(self.trace, str(self.out / CHURN))
            with (self.out / METRICS).open("a", encoding="utf-8") as self._metrics:
                self._train()
            results = [self.results[rank] for rank in sorted(self.results)]
            summary = summarise(self.config, results, time.perf_counter() - began) | self.counts
            write_text(self.out / SUMMARY, as_json(summary, indent=2) + "\n")
        return summary

    def _train(self) -> None:
        config, world = self.config, self.config.world
        corpus = load_corpus(config.data)
        workers = len(self.begins)
        cluster = VirtualCluster(
            workers,
            links=world.links,
            step_seconds=step_seconds(config),
            speeds=replace(world, workers=workers).factors,
            compute_jitter=world.step_jitter,
            pauses=KnownPauses(pauses(self.trace)),
            begins=self.begins,
            seed=config.run.seed,
        )

        def work(transport: VirtualTransport) -> None:
            seed_draws(config.run.seed, transport.rank)
            mesh.enter(transport)
            own = replace(mesh.init(deadlines=deadlines(config)).arranged(self.layout), report=self._heard)
            trainer = SwarmTrainer(config, own, corpus, range(self.founders))
            self.trainers[transport.rank] = trainer
            result = trainer.run(self.out)
            if result is not None:
                self.results[transport.rank] = result

        before = torch.get_num_threads()
        torch.set_num_threads(world.threads)
        try:
            cluster.run(work, before=self._plan)
        finally:
            torch.set_num_threads(before)

    def _plan(self, scheduler: Scheduler, wire: VirtualWire, transports: Sequence[VirtualTransport]) -> None:
        """Put what happens on the timeline."""
        for event in self.trace:
            rank = int(event.number)
            if event.kind == "join":
                self.counts["joins"] += rank
            elif event.kind in ("kill", "leave"):
                act = partial(self._kill, scheduler, wire, transports, rank) if event.kind == "kill" else None
                scheduler.timeline.at(event.at, ARRIVED, rank, act or partial(self._leave, rank))

    def _kill(self, scheduler: Scheduler, wire: VirtualWire, transports: Sequence[VirtualTransport], rank: int) -> None:
        if rank in self.results or (rank in self.trainers and self.trainers[rank].model_step.swarm.is_gone):
            return
        self.counts["deaths"] += 1
        wire.dead(rank)
        transports[rank].abandon(PeerLost(rank, "it died"))
        scheduler.kill(scheduler.workers[rank])
        wire.cut(rank, "its connection broke")

    def _leave(self, rank: int) -> None:
        if rank in self.trainers:
            self.counts["leaves"] += 1
            self.trainers[rank].model_step.swarm.leaving = True

    def _heard(self, event: object) -> None:
        if not isinstance(event, dict):
            return
        if "notice" in event:
            self.on_notice(event["notice"])
        elif "loss" in event:
            line = {key: value for key, value in event.items() if value is not None}
            self._metrics.write(as_json(line) + "\n")
            self.on_line(line)
