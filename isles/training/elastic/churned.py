"""A run whose workers come and go on the virtual clock: real training, and the lighthouse's own rules.

RUN/config.toml       at once
RUN/churn.jsonl       what happens to whom when, as `isles.network.churn` reads it
RUN/members.jsonl     the lighthouse's memory
RUN/exchanges.jsonl   what became of each round of each worker
RUN/metrics.jsonl     what the workers report, by seat
RUN/model.safetensors, RUN/summary.json   at the end
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from isles.comm.elastic.journal import NAME
from isles.comm.elastic.record import EXCHANGES, from_line
from isles.comm.virtual.churn.gifts import VirtualGifts
from isles.comm.virtual.churn.meeting import VirtualMeeting
from isles.comm.virtual.cluster import VirtualCluster
from isles.comm.virtual.transport import VirtualTransport
from isles.data import Corpus, load_corpus
from isles.durable import write_text
from isles.network.churn import POOLS, ChurnEvent, churn, founders, write_trace
from isles.network.pauses import KnownPauses
from isles.training.config.sections import Config
from isles.training.elastic.averaging import spread, write_mean
from isles.training.elastic.figures import figures
from isles.training.elastic.joining import MODEL, Participant
from isles.training.elastic.lighthouse import MODEL_FILE
from isles.training.elastic.terms import lands_together, last_round, rules
from isles.training.memory import step_seconds
from isles.training.records.rundir import METRICS, SUMMARY, claim, held
from isles.training.records.writer import as_json, write_config
from isles.training.running.run import SummaryTable, summarise

CHURN = "churn.jsonl"
_LONGER = 2.0  # a trace by rate goes on for so many times the time of the steps: exchanges and pauses take time too


def trace_of(config: Config, name: str) -> tuple[int, list[ChurnEvent]]:
    """(with how many workers a run of `config` begins, what happens in it), for `churn` called `name`. ValueError as
    `isles.network.churn.churn`, and where workers would pause twice.
    """
    world = config.world
    if world.pauses is not None:
        raise ValueError("world.pause_every: with --churn pauses stand in the trace; take it out")
    seconds = config.run.steps * step_seconds(config)
    longer = 1.0 if name in POOLS else _LONGER * max(world.step_factors, default=1.0)
    return founders(name, world.workers), churn(
        name, workers=world.workers, seconds=seconds * longer, seed=config.run.seed
    )


class ChurnedRun:
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
        self.config, self.out, self.on_line = config, out, on_line
        self._notices: dict[str, None] = {}
        self._on_notice = on_notice
        self.founders, self.trace = trace_of(config, churn_name)
        self.begins = [0.0] * self.founders
        for event in self.trace:
            self.begins += [event.at] * (int(event.number) if event.kind == "join" else 0)
        self.meeting = VirtualMeeting(replace(rules(config), founders=self.founders, most=1 << 20), self.trace)
        self.results: dict[int, dict[str, Any]] = {}
        self.summary: SummaryTable = {}
        self.judged: list[float | None] = []
        self.lines: list[dict[str, Any]] = []
        self._gifts: dict[str, VirtualGifts] = {}

    def run(self) -> SummaryTable:
        """To its end. ValueError: `out` holds a run already, or cannot be made. A worker's failure is raised as it
        is.
        """
        began = time.perf_counter()
        with held(self.out), tempfile.TemporaryDirectory(prefix="isles-") as folder:
            claim(self.out)
            write_config(self.config, self.out)
            write_trace(self.trace, str(self.out / CHURN))
            with (self.out / METRICS).open("a", encoding="utf-8") as self._metrics:
                self._train(load_corpus(self.config.data), Path(folder))
            self._write_records()
            seats = self._mean(Path(folder))
            self.summary = self._summary(seats, time.perf_counter() - began)
            write_text(self.out / SUMMARY, as_json(self.summary, indent=2) + "\n")
        return self.summary

    def _train(self, corpus: Corpus, folder: Path) -> None:
        world, workers = self.config.world, len(self.begins)
        cluster = VirtualCluster(
            workers,
            links=world.links,
            step_seconds=step_seconds(self.config),
            speeds=replace(world, workers=workers).factors,
            compute_jitter=world.step_jitter,
            pauses=KnownPauses(pauses(self.trace)),
            begins=self.begins,
            seed=self.config.run.seed,
        )

        def work(transport: VirtualTransport) -> None:
            company = self.meeting.companies[transport.rank]
            company.heard = self._heard
            with company.turn:
                if self.meeting.is_over:
                    return
            own = folder / str(transport.rank)
            own.mkdir()
            gifts = VirtualGifts(transport, company, self._gifts)
            worker = Participant(self.config, company, transport, gifts, corpus, own, self._notice)
            worker.leaving = company.leaving
            try:
                worker.run()
                with company.turn:
                    self.meeting.gone(company.seat)
            finally:
                worker.close()

        before = torch.get_num_threads()
        torch.set_num_threads(world.threads)
        try:
            cluster.run(work, before=self.meeting.open)
        finally:
            torch.set_num_threads(before)

    def _heard(self, seat: int, event: Mapping[str, Any]) -> None:
        if "result" in event:
            self.results[seat] = event["result"]
        elif "round" in event or "start" in event:
            self.lines.append(event.get("round") or event["start"])
        elif "loss" in event:
            line = {key: value for key, value in event.items() if value is not None}
            self._metrics.write(as_json(line) + "\n")
            self.on_line(line)

    def _notice(self, text: str) -> None:
        """Once, whoever says it."""
        if text not in self._notices:
            self._notices[text] = None
            self._on_notice(text)

    def _write_records(self) -> None:
        for name, entries in ((NAME, self.meeting.journal), (EXCHANGES, self.lines)):
            write_text(self.out / name, "".join(f"{json.dumps(entry, separators=(',', ':'))}\n" for entry in entries))

    def _mean(self, folder: Path) -> list[int]:
        """Write the one model; whose mean it is."""
        seats = sorted(seat for seat in self.meeting.finished if seat in self.results)
        models = [folder / str(seat) / f"{MODEL}.safetensors" for seat in seats]
        write_mean(models[:1] if lands_together(self.config) else models, self.out / MODEL_FILE)  # all are equal
        self.spread = spread(models, self.out / MODEL_FILE)
        return seats

    def _summary(self, seats: Sequence[int], seconds: float) -> SummaryTable:
        summary = summarise(self.config, [self.results[seat] for seat in seats], seconds)
        summary |= {"workers": len(seats), "replica_std": self.spread}
        lines = [from_line(line) for line in self.lines]
        computed = sum(transport.compute_seconds for transport in self.meeting.transports)
        membership = self.meeting.membership
        assert membership is not None, "it was there at the end"
        last = last_round(self.config, membership.view)
        return summary | figures(self.meeting.journal, lines, membership, last, computed).record()

    def counted(self) -> int:
        """Inner steps whose work is in the weights at the end."""
        return int(self.summary["inner_steps_counted"])


def pauses(trace: Iterable[ChurnEvent]) -> dict[int, list[tuple[float, float]]]:
    """By worker, when it stands still; one that does not resume does so for good."""
    found: dict[int, list[tuple[float, float]]] = {}
    for event in trace:
        stretches = found.setdefault(int(event.number), []) if event.kind in ("pause", "resume") else []
        if event.kind == "pause":
            stretches.append((event.at, float("inf")))
        elif event.kind == "resume":
            stretches[-1] = stretches[-1][0], event.at
    return found
