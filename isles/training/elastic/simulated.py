"""A run whose workers come and go on the virtual clock: real training, and the lighthouse's own rules.

RUN/config.toml       at once
RUN/churn.jsonl       what happens to whom when, as `isles.network.churn` reads it
RUN/members.jsonl     the lighthouse's memory
RUN/exchanges.jsonl   what became of each round of each worker
RUN/metrics.jsonl     what the workers report, by member
RUN/model.safetensors, RUN/summary.json   at the end
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from typing_extensions import override

from isles.base.durable import write_text
from isles.comm.virtual.transport import VirtualTransport
from isles.data import Corpus
from isles.membership.journal import NAME
from isles.membership.run_log import EXCHANGES, read_record
from isles.membership.simulated import SimulatedMembership
from isles.membership.state_transfer import StateServer
from isles.training.config.sections import Config
from isles.training.elastic.leader import Participant
from isles.training.elastic.states import MODEL, server_name
from isles.training.elastic.support import elastic_metrics, lands_together, last_round, rules
from isles.training.lighthouse.mean import consolidate, spread
from isles.training.lighthouse.rounds import MODEL_FILE
from isles.training.simulated_churn import SimulatedWorld


class SimulatedElasticRun(SimulatedWorld):
    """One run of whole replicas; see `SimulatedWorld`. made: called with each worker before it begins."""

    def __init__(self, config: Config, *more: Any, made: Callable[[Participant], None] = lambda worker: None) -> None:
        super().__init__(config, *more)
        self._notices: dict[str, None] = {}
        self._made = made
        governed = replace(rules(config), founders=self.founders, most=1 << 20)
        self.simulation = SimulatedMembership(governed, self.trace, config.world.elastic.lease, self._on_report)
        self.records: list[dict[str, Any]] = []

    @override
    def train(self, corpus: Corpus) -> list[dict[str, Any]]:
        with tempfile.TemporaryDirectory(prefix="isles-") as folder:
            self._train(corpus, Path(folder))
            for name, entries in ((NAME, self.simulation.journal), (EXCHANGES, self.records)):
                lines = (f"{json.dumps(entry, separators=(',', ':'))}\n" for entry in entries)
                write_text(self.out / name, "".join(lines))
            self._members = self._mean(Path(folder))
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
                    self.simulation.end()  # else the others wait for this one for ever
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
        """Once, whoever says it."""
        if text not in self._notices:
            self._notices[text] = None
            self.on_notice(text)

    def _mean(self, folder: Path) -> list[int]:
        """Write the one model; whose mean it is."""
        members = sorted(member for member in self.simulation.finished if member in self.results)
        models = {member: folder / str(member) / f"{MODEL}.safetensors" for member in members}
        alike, ratio = lands_together(self.config), self.config.world.trust_ratio
        left = consolidate(models, self.out / MODEL_FILE, alike=alike, ratio=ratio)
        members = [member for member in members if member not in left]
        self.spread = spread([models[member] for member in members], self.out / MODEL_FILE)
        return members

    @override
    def summary_fields(self) -> dict[str, Any]:
        records = [read_record(one) for one in self.records]
        computed = sum(transport.compute_seconds for transport in self.simulation.transports)
        membership = self.simulation.membership
        assert membership is not None, "it was there at the end"
        last = last_round(self.config, membership.view)
        summary_fields = elastic_metrics(self.simulation.journal, records, membership, last, computed).record()
        return {"workers": len(self._members), "replica_std": self.spread, **summary_fields}
