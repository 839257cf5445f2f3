"""Workers that come and go on the virtual clock, as a trace says: who is there when, whatever they do together.

RUN/config.toml       at once
RUN/churn.jsonl       what happens to whom when, as `isles.network.churn` reads it
RUN/metrics.jsonl     what the workers report
RUN/summary.json      at the end
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from isles.comm.virtual.cluster import VirtualCluster
from isles.comm.virtual.transport import VirtualTransport
from isles.data import Corpus, load_corpus
from isles.durable import write_text
from isles.modes import torch_threads
from isles.network.churn import POOLS, ChurnEvent, churn, founders, returns, write_trace
from isles.network.pauses import KnownPauses
from isles.training.config.conflicts import refuse_conflicts
from isles.training.config.sections import Config
from isles.training.memory.planned import step_seconds
from isles.training.records.rundir import METRICS, SUMMARY, as_json, claim, held
from isles.training.records.summary import SummaryTable, summarise
from isles.training.records.writer import write_config

CHURN = "churn.jsonl"
_LONGER = 2.0  # a trace by rate goes on for so many times the time of the steps: exchanges and pauses take time too


class ChurnedWorld(ABC):
    """One run of `config` through the changes of `churn_name`, into `out`. on_line, on_notice: as in
    `isles.training.running.run.launch`. ValueError as `trace_of`.

    founders: with how many it begins. trace: what happens. begins: by worker, when it comes (s). results: by worker,
    what it came to.
    """

    gives_up: ClassVar[bool] = False
    """Whether one that stands still for `world.elastic.lease` seconds is gone for the others, and comes again as
    somebody else; else it is waited for.
    """
    saves: ClassVar[bool] = False
    """Whether it keeps the checkpoints that `config` asks for; else it asks for none, and says so."""

    def __init__(
        self,
        config: Config,
        churn_name: str,
        out: Path,
        on_line: Callable[[dict[str, Any]], None],
        on_notice: Callable[[str], None],
    ) -> None:
        self._dropped = 0 if self.saves else config.run.checkpoint_every
        self.config = replace(config, run=replace(config.run, checkpoint_every=0)) if self._dropped else config
        self.out, self.on_line, self.on_notice = out, on_line, on_notice
        self.founders, self.trace = trace_of(self.config, churn_name)
        self.begins = [0.0] * self.founders
        for event in self.trace:
            self.begins += [event.at] * (int(event.number) if event.kind == "join" else 0)
        self.events: Sequence[ChurnEvent] = self.trace
        """What happens to whom then."""
        self._machines: Sequence[int] = range(len(self.begins))
        if self.gives_up:
            found = returns(self.trace, self.begins, config.world.elastic.lease)
            self.events, self.begins, self._machines = found.events, list(found.begins), found.machines
        self.results: dict[int, dict[str, Any]] = {}
        self.summary: SummaryTable = {}

    @abstractmethod
    def train(self, corpus: Corpus) -> list[dict[str, Any]]:
        """To the end; what those came to whose model it is."""

    @abstractmethod
    def told(self) -> dict[str, Any]:
        """What the summary tells beside what all tell."""

    def run(self) -> SummaryTable:
        """To its end. ValueError: `out` holds a run already, or cannot be made. A failure is raised as it is."""
        began = time.perf_counter()
        if self._dropped:
            self.on_notice(
                f"run.checkpoint_every = {self._dropped}: such a run of --churn cannot be gone on with, so nothing is "
                "saved"
            )
        with held(self.out):
            claim(self.out)
            write_config(self.config, self.out)
            write_trace(self.trace, str(self.out / CHURN))
            with (self.out / METRICS).open("a", encoding="utf-8") as self._metrics:
                results = self.train(load_corpus(self.config.data))
                self.summary = summarise(self.config, results, time.perf_counter() - began) | self.told()
                write_text(self.out / SUMMARY, as_json(self.summary, indent=2) + "\n")
        return self.summary

    def write(self, told: Mapping[str, Any]) -> None:
        """A line of metrics."""
        line = {key: value for key, value in told.items() if value is not None}
        self._metrics.write(as_json(line) + "\n")
        self._metrics.flush()
        self.on_line(line)

    def let_work(self, work: Callable[[VirtualTransport], None], before: Callable[..., None]) -> None:
        """Have each worker do `work`, from when it comes. before: see `VirtualCluster.run`."""
        config, world, workers = self.config, self.config.world, len(self.begins)
        factors = replace(world, workers=workers).factors
        cluster = VirtualCluster(
            workers,
            links=world.virtual.links,
            step_seconds=step_seconds(config),
            speeds=[factors[machine] for machine in self._machines],
            compute_jitter=world.virtual.step_jitter,
            pauses=KnownPauses(_pauses(self.events)),
            begins=self.begins,
            seed=config.run.seed,
        )
        with torch_threads(world.start_threads):
            cluster.run(work, before=before)


def trace_of(config: Config, name: str) -> tuple[int, list[ChurnEvent]]:
    """(with how many workers a run of `config` begins, what happens in it), for `churn` called `name`. ValueError as
    `isles.network.churn.churn` and `refuse_conflicts`, and where workers would pause twice.
    """
    world = config.world
    refuse_conflicts(config, "--churn")
    seconds = config.run.steps * step_seconds(config)
    longer = 1.0 if name in POOLS else _LONGER * max(world.virtual.step_factors, default=1.0)
    return founders(name, world.workers), churn(
        name, workers=world.workers, seconds=seconds * longer, seed=config.run.seed
    )


def _pauses(trace: Iterable[ChurnEvent]) -> dict[int, list[tuple[float, float]]]:
    """By worker, when it stands still; one that does not resume does so for good."""
    found: dict[int, list[tuple[float, float]]] = {}
    for event in trace:
        stretches = found.setdefault(int(event.number), []) if event.kind in ("pause", "resume") else []
        if event.kind == "pause":
            stretches.append((event.at, float("inf")))
        elif event.kind == "resume":
            stretches[-1] = stretches[-1][0], event.at
    return found
