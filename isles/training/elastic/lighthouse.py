"""The lighthouse of a run: its run directory, and what it does beside `comm.elastic.lighthouse`.

RUN/config.toml         at once
RUN/members.jsonl       who joined, left, was lost, and every view: the lighthouse's memory
RUN/metrics.jsonl       what the workers report, by seat
RUN/states/             the newest state that a member has sent here, every run.checkpoint_every steps
RUN/model.safetensors   the mean over the members of the last view, at the end
RUN/summary.json        at the end: its presence means that the run is complete

Started again on its directory it goes on: workers come back by themselves.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from isles.comm.codecs import codec
from isles.comm.collectives.mean import sent_bytes
from isles.comm.elastic.gifts import Giver, NotGiven, take
from isles.comm.elastic.journal import NAME, Journal
from isles.comm.elastic.keys import LIGHTHOUSE, SeatKeys
from isles.comm.elastic.lighthouse import Lighthouse
from isles.comm.elastic.messages import Examine, Over
from isles.comm.elastic.record import EXCHANGES, as_line, from_line
from isles.comm.elastic.session import open_session
from isles.comm.elastic.transport import WAYS
from isles.comm.errors import PeerLost
from isles.durable import write_text
from isles.launch.fields import Unfit, integer, table
from isles.training.config.reading import to_toml
from isles.training.config.sections import Config
from isles.training.elastic.averaging import spread, write_mean
from isles.training.elastic.figures import figures, recorded
from isles.training.elastic.joining import MODEL
from isles.training.elastic.kept import KeptStates
from isles.training.elastic.refused import RefusalBook
from isles.training.elastic.states import STATE, giver_of, kept_as
from isles.training.elastic.terms import lands_together, last_round, rules, sync_every
from isles.training.records.events import Schema
from isles.training.records.rundir import METRICS, SUMMARY, held
from isles.training.records.tokens import CREDENTIALS, forget, host_credentials
from isles.training.records.writer import as_json, write_config
from isles.training.running.run import SummaryTable, summarise
from isles.version import __version__

MODEL_FILE = "model.safetensors"
_LOOK = 1.0  # seconds between looks at what is due
_MOST = 1 << 40  # bytes of a state or model: no more than a disk holds


class Keeper:
    """The lighthouse of `config` in the directory `out`, at `address`. told: once it can be joined, with its token.

    on_line, on_notice: as in `isles.training.running.run.launch`.
    """

    def __init__(
        self,
        config: Config,
        out: Path,
        address: str,
        told: Callable[[str], None],
        on_line: Callable[[dict[str, Any]], None],
        on_notice: Callable[[str], None],
    ) -> None:
        self.config, self.out, self.address = config, out, address
        self.told, self.on_line, self.on_notice = told, on_line, on_notice
        self.stopping = threading.Event()
        self.results: dict[int, dict[str, Any]] = {}
        self.judged: list[float | None] = []
        self.carried: dict[int, dict[str, int]] = {}
        self.spread = 0.0
        self._schema = Schema(config)

    def run(self) -> SummaryTable | None:
        """Keep it until the run ends; its summary, or None where it was stopped (`stopping`).

        ValueError where the directory holds another kind of run, or the address cannot be had. PeerLost where nobody
        is left to tell what the run came to.
        """
        with held(self.out), contextlib.ExitStack() as stack:
            if (self.out / SUMMARY).exists() and (self.out / NAME).exists():
                raise ValueError(f"{self.out}: this run is complete; name another directory with --out")
            if (self.out / SUMMARY).exists() or ((self.out / METRICS).exists() and not (self.out / NAME).exists()):
                raise ValueError(f"--out {self.out}: holds a run already; name another directory")
            mine, _ = host_credentials(self.out, None)
            session = open_session("router", mine, listen=self.address, lease=self.config.world.lease)
            stack.callback(session.close)
            journal = Journal(self.out)
            stack.callback(journal.close)
            write_config(self.config, self.out)
            self._exchanges = stack.enter_context((self.out / EXCHANGES).open("a", encoding="utf-8"))
            self._lines = stack.enter_context((self.out / METRICS).open("a", encoding="utf-8"))
            self.session, self.giver = session, Giver(session, LIGHTHOUSE, self.on_notice, patient=False)
            self._states = KeptStates(self.out / "states", self.config.world.inner)
            self._offer_states()
            self.lighthouse = Lighthouse(
                session,
                rules(self.config),
                journal,
                SeatKeys(self.out / CREDENTIALS),
                config=to_toml(self.config),
                version=__version__,
                port=int(self.address.rpartition(":")[2]),
                heard=self._heard,
            )
            stack.callback(self.lighthouse.close)
            self._refused = RefusalBook(self.lighthouse.refused, self.on_notice)
            self.told(str(mine.token))
            summary = self._keep()
        if summary is not None:
            forget(self.out)
        return summary

    def _keep(self) -> SummaryTable | None:
        began, saved = time.perf_counter(), self._rounds() * sync_every(self.config)
        every = self.config.run.checkpoint_every
        while not self.lighthouse.wait(lambda: self._is_done() or self.stopping.is_set(), _LOOK):
            self._refused.look()
            step = self._rounds() * sync_every(self.config)
            if every and step // every > saved // every and self._save():
                saved = step
        if self.stopping.is_set():
            return None
        members = self.lighthouse.members()
        taken = self._collect(members)
        if not taken:
            raise PeerLost(members[0], "no worker of the last view could be asked for what it came to")
        self._judge(sorted(taken))
        summary = summarise(self.config, [self.results[seat] for seat in sorted(taken)], time.perf_counter() - began)
        if self.judged:
            summary["val_loss"] = self.judged[0]
        summary |= {"workers": len(taken), "replica_std": self.spread, "ddp_bytes_per_worker": self._ddp(len(taken))}
        told = figures(*recorded(self.out), self.lighthouse.membership, self._last)
        summary |= replace(told, links=self._links(), refused=self._refused.rows()).record()
        write_text(self.out / SUMMARY, as_json(summary, indent=2) + "\n")
        self.lighthouse.tell(members, Over())
        self.lighthouse.wait(self._all_gone, 10.0)  # they hear it, and go
        return summary

    def _ddp(self, workers: int) -> float:
        """Bytes that each of so many would have sent in all steps with data parallel."""
        parameters = max(result["parameters"] for result in self.results.values())
        sent = [sent_bytes(parameters, torch.float32, codec("none"), workers, place) for place in range(workers)]
        return self.config.run.steps * sum(sent) / workers

    def _links(self) -> dict[str, int]:
        """Bytes that the workers have sent directly and over the lighthouse, and those by the lighthouse's count."""
        ways = {way: sum(one[way] for one in self.carried.values()) for way in WAYS}
        return {**ways, "relayed_here": self.lighthouse.relayed}

    def _is_done(self) -> bool:
        members = self.lighthouse.membership.members()
        return bool(members) and set(members) <= self.lighthouse.finished & self.results.keys()

    def _all_gone(self) -> bool:
        return not any(worker.connected for worker in self.lighthouse.membership.workers.values())

    @property
    def _last(self) -> int:
        return last_round(self.config, self.lighthouse.membership.view)

    def _rounds(self) -> int:
        """The newest that anybody has done."""
        return min(max(self.lighthouse.membership.newest_round - 1, 0), self._last)

    def _save(self) -> bool:
        """Fetch a member's state, so that the run outlives its workers."""
        for seat in self.lighthouse.members():
            with contextlib.suppress(NotGiven):
                if self._states.save(partial(self._fetch, seat)):
                    self._offer_states()
                    return True
        return False

    def _fetch(self, seat: int, place: int, path: Path) -> int:
        giver, patience = giver_of(seat, place), self.config.world.outer_deadline
        return take(self.session, giver, STATE, path, most=_MOST, seconds=patience).get("round", -1)

    def _offer_states(self) -> None:
        for place, path in enumerate(self._states.newest()):
            self.giver.offer(kept_as(place), path, {})

    def _collect(self, seats: Sequence[int]) -> list[int]:
        """Fetch the models of `seats`, and write their mean; whose they are. Who is lost meanwhile costs its share."""
        taken: dict[int, Path] = {}
        for seat in seats:
            path = self.out / f"model-{seat}.partial"
            try:
                take(self.session, str(seat), MODEL, path, most=_MOST, seconds=self.config.world.outer_deadline)
                write_mean([path], self.out / "looked.partial")  # or refuses it
            except (NotGiven, ValueError) as why:
                self.on_notice(f"worker {seat}'s model is left out: {why}")
                path.unlink(missing_ok=True)
                continue
            taken[seat] = path
        (self.out / "looked.partial").unlink(missing_ok=True)
        if taken:
            models = list(taken.values())
            write_mean(models[:1] if lands_together(self.config) else models, self.out / MODEL_FILE)  # all are equal
            self.spread = spread(list(taken.values()), self.out / MODEL_FILE)
        for path in taken.values():
            path.unlink(missing_ok=True)
        return list(taken)

    def _judge(self, seats: Sequence[int]) -> None:
        """Have one of `seats` judge the one model."""
        copy = self.out / "judged.partial"
        os.link(self.out / MODEL_FILE, copy)
        self.giver.offer(MODEL, copy, {})
        for seat in seats:
            if not self.judged:
                self.lighthouse.tell([seat], Examine())
                self.lighthouse.wait(lambda: bool(self.judged), self.config.world.eval_deadline)
        copy.unlink(missing_ok=True)

    def _heard(self, seat: int, event: Any) -> None:
        """What a worker reports, in the session's thread. ValueError refuses it."""
        try:
            if isinstance(event, dict) and set(event) == {"result"}:
                self.results[seat] = self._schema("done", event["result"], {seat})
            elif isinstance(event, dict) and set(event) == {"judged"}:
                value = event["judged"]
                self.judged.append(value if isinstance(value, float) else None)
            elif isinstance(event, dict) and set(event) == {"carried"}:
                carried = table(event["carried"], "carried")
                self.carried[seat] = {way: integer(carried, way, 0, 1 << 62) for way in WAYS}
            elif isinstance(event, dict) and set(event) == {"refused"}:
                self._refused.told(seat, event["refused"])
            elif isinstance(event, dict) and set(event) in ({"round"}, {"start"}):
                self._note(seat, next(iter(event.values())))
            else:
                line = self._schema("event", event, {seat})
                self._lines.write(as_json({key: value for key, value in line.items() if value is not None}) + "\n")
                self._lines.flush()
                self.on_line(line)
        except Unfit as error:
            raise ValueError(str(error)) from None

    def _note(self, seat: int, told: Any) -> None:
        """A line of its rounds, by this machine's clock. ValueError where it is none of its own."""
        line = from_line(told)
        if line.seat != seat:
            raise ValueError("a line of another seat's rounds")
        self._exchanges.write(as_json(as_line(replace(line, at=round(time.time(), 3)))) + "\n")
        self._exchanges.flush()
