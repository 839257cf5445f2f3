"""The lighthouse of a run of whole replicas, see `isles.training.lighthouse.server`.

RUN/exchanges.jsonl     the outcomes of the workers' rounds
RUN/states/             the last states fetched from members, see run.checkpoint_every
RUN/model.safetensors   made of the models of the last view's members, at the end, and judged (`judge`)
RUN/model-M.safetensors beside it, of member M: where they differ and nobody can judge
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from typing_extensions import override

from isles.base.durable import appending, no_room
from isles.comm.errors import PeerLost
from isles.membership.coordinator import RoundsCoordinator
from isles.membership.effects import Coordinator
from isles.membership.lighthouse import Journal
from isles.membership.messages import MARGIN, Examine, Over
from isles.membership.run_log import EXCHANGES, LATE, WHOLE, RoundRecord, begun_again, read_record
from isles.membership.state_transfer import MODEL, STATE, StateUnavailable, saved_name, server_name
from isles.replicas.config import workers
from isles.training.elastic.metrics import elastic_summary, recorded
from isles.training.elastic.support import final_rule
from isles.training.lighthouse.mean import FinalModel, candidates, spread, write_mean
from isles.training.lighthouse.schedule import RETAINED, StateSchedule
from isles.training.lighthouse.server import LOOK, MODEL_FILE, LighthouseServer
from isles.training.records.checkpoint import Checkpoints
from isles.training.records.checksums import is_whole
from isles.training.records.rundir import as_json
from isles.training.records.summary import SummaryTable

_HARDLY = 0.02  # nats that the mean of two models may be above the better one of them


class RoundsLighthouseServer(LighthouseServer):
    """The lighthouse of whole replicas; `coordinator` decides on views and rounds."""

    coordinator: RoundsCoordinator
    joins_with, vectors = "isles join", 2

    @override
    def assembly(self, journal: Journal, until: float, stack: ExitStack) -> Coordinator:
        self.evaluations: dict[int, float | None] = {}
        self.spread, self._finished_at = 0.0, 0.0
        records = recorded(self.out)[1]
        self._newest = max((one.round for one in records if isinstance(one, RoundRecord)), default=0)
        self._begun = begun_again(records)
        self._exchanges = stack.enter_context(appending(self.out / EXCHANGES))
        self._states = Checkpoints(self.out, "states")
        self._offer(self._states.newest_sound(self.on_notice))
        self.coordinator = RoundsCoordinator(self.rules, journal.entries, until=until)
        return self.coordinator

    @override
    def serve(self) -> SummaryTable | None:
        schedule = StateSchedule(self.config.run, self._rounds() * self.rules.sync_every, time.perf_counter())
        while not self.lighthouse.wait(lambda: self._is_done() or self.stopping.is_set(), LOOK):
            self.refused.look()
            step = self._rounds() * self.rules.sync_every
            if schedule.is_due(step, time.perf_counter()) and self._save():
                schedule.saved(step, time.perf_counter())
        if self.stopping.is_set():
            return None
        members = [member for member in self.members() if member in self.results]
        for member in sorted({*self.members()} - {*members}):
            self.on_notice(f"worker {member} is left out: it has sent no result for {self.rules.evaluates:g} s")
        taken = self._collect(members)
        if not taken:
            raise PeerLost((members or self.members())[0], "no worker of the last view could send its model")
        losses = self.judged or {"val_loss": self._evaluate(sorted(taken))}
        if self.stopping.is_set():
            return None
        wall = time.time() - self.began
        summary = elastic_summary(self.config, self.out, self.results, self.coordinator, taken, wall)
        summary = {key: value for key, value in summary.items() if not key.startswith("val_loss.")}  # of one worker
        summary = self.conclude(summary | losses | {"replica_std": self.spread})
        self.lighthouse.notify(self.members(), Over())
        workers = self.coordinator.workers
        self.lighthouse.wait(lambda: not any(worker.connected for worker in workers.values()), 10.0)  # they hear it, go
        return summary

    def _is_done(self) -> bool:
        members = {*self.coordinator.members()}
        if not members or not members <= self.lighthouse.finished:
            return False
        self._finished_at = self._finished_at or time.monotonic()
        return members <= self.results.keys() or time.monotonic() > self._finished_at + self.rules.evaluates

    @override
    def saved(self) -> int:
        return max(self._states.steps(), default=0) * self.rules.sync_every

    def _rounds(self) -> int:
        done, last = max(self.coordinator.newest_round - 1, 0), self.coordinator.last
        return done if last is None else min(done, last)

    def _save(self) -> bool:
        """Fetch a member's state, so that the run survives the loss of all workers; returns whether to wait for the
        next due step.
        """
        for member in self.members():
            try:
                saved = self._states.take_in(range(self.config.world.inner), partial(self._fetch, member))
                if saved is not None:
                    self._offer(saved)
                    self._states.thin(RETAINED)
                    return True
            except StateUnavailable:
                continue  # lost, or at another round: ask the next member
            except OSError as error:
                if not no_room(error):
                    raise
                self.on_notice(f"no state was saved ({error.strerror}): make room in {self.out}; the run goes on")
                return True
        return False

    def _fetch(self, member: int, island_rank: int, path: Path) -> int:
        rounds = sorted(self.coordinator.workers[one].round for one in self.members())
        newest = rounds[(len(rounds) - 1) // 2] + MARGIN  # refuse rounds beyond those that half of the members report
        facts = self.fetch(
            server_name(member, island_rank), STATE, path, self.config.world.outer_deadline, newest=newest
        )
        if not is_whole(path) or "round" not in facts:
            raise StateUnavailable("it is no state, or has no round")
        return facts["round"]

    def _offer(self, round: int | None) -> None:
        for island_rank, path in enumerate([] if round is None else self._states.shards(round)):
            self.state_server.publish(saved_name(island_rank), path, {})

    def _collect(self, members: Sequence[int]) -> list[int]:
        """Fetch the models of `members`, and write the run's model; returns the members it is made of. Lost members are
        left out.
        """
        left, paths = dict[int, str](), {member: self.out / f"model-{member}.partial" for member in members}
        for member, path in paths.items():
            try:
                self.fetch(str(member), MODEL, path, self.config.world.outer_deadline, copies=1)
            except StateUnavailable as why:
                left[member] = str(why)
        fetched = {member: path for member, path in paths.items() if member not in left}
        out = self.out / MODEL_FILE
        found, more = candidates(fetched, out, **final_rule(self.config))
        chosen = self._chosen(found, fetched)
        if chosen is not None:
            write_mean([chosen.path], out)
            left |= more | {
                member: "another model has the lower validation loss"
                for member in fetched
                if member not in {*more, *chosen.members}
            }
        for member, why in left.items():
            self.on_notice(f"worker {member}'s model is left out: {why}")
        saved = [] if chosen is None else [member for member in members if member in chosen.members]
        self.spread = spread([paths[member] for member in saved], out) if saved else 0.0
        for path in {*paths.values(), *(one.path for one in found)}:
            path.unlink(missing_ok=True)
        return saved

    def _chosen(self, found: Sequence[FinalModel], fetched: Mapping[int, Path]) -> FinalModel | None:
        """The candidate of the lowest validation loss; the first one if it is hardly higher, or if nobody can judge:
        then the members' models stay beside it.
        """
        if not found:
            return None
        judged = self.judge([one.path for one in found])
        sound = {number: one["val_loss"] for number, one in enumerate(judged.losses) if one is not None}
        if sound and not judged.why:
            best = min(sound.values()) + (0.0 if self.rules.agrees else _HARDLY)
            number = next(number for number, loss in sound.items() if loss <= best)
            self.judged = (judged.losses[number] or {}) if sound[number] < math.inf else {}
            return found[number]
        remaining = [found[number] for number in sound] or [*found]
        why = judged.why if sound else "none is a model of this run"
        if len(remaining) == 1 and sound:
            self.on_notice(f"the validation loss is a worker's word: this machine cannot judge the model ({why})")
            return remaining[0]
        names = {member: self.out / f"model-{member}.safetensors" for one in remaining for member in one.members}
        for member, path in names.items():
            write_mean([fetched[member]], path)
        beside = ", ".join(path.name for path in names.values())
        of = workers(sorted(remaining[0].members))
        self.on_notice(
            f"nobody has judged the model, which is of {of}: {why}, and the workers' models differ; they are "
            f"beside it ({beside})"
        )
        return remaining[0]

    def _evaluate(self, members: Sequence[int]) -> float | None:
        """Have one of `members` evaluate the run's model; returns its validation loss."""
        self.state_server.publish(MODEL, self.out / MODEL_FILE, {})
        for member in members:
            self.evaluations.pop(member, None)  # what nobody has asked for
            self.lighthouse.notify([member], Examine())
            patience = self.config.world.eval_deadline
            self.lighthouse.wait(lambda member=member: member in self.evaluations or self.stopping.is_set(), patience)
            if member in self.evaluations:
                return self.evaluations[member]
        return None

    @override
    def on_event(self, member: int, kind: str, value: Any) -> bool:
        if kind == "evaluated":
            self.evaluations[member] = value if isinstance(value, float) else None
        elif kind in ("round", "start"):
            self._note(member, value)
        else:
            return False
        return True

    def _note(self, member: int, reported: Any) -> None:
        """Write a member's record of a round, with this machine's clock. ValueError if it is not its own."""
        record = read_record(reported)
        rounds = (record.round,) if isinstance(record, RoundRecord) else (record.first, record.copied, record.has)
        if record.member != member or max(rounds) > (self.coordinator.last or max(rounds)) + 1:
            raise ValueError("a record of another member, or of rounds beyond the end of this run")
        if isinstance(record, RoundRecord):
            self._newest = max(self._newest, record.round)
            if record.outcome in (WHOLE, LATE):
                self.exchanged[member] = record.round, time.time()
        for first, begun in begun_again([record], self._newest).items():
            if self._begun.setdefault(first, begun) is begun:
                reached, has = (round * self.rules.sync_every for round in begun)
                self._tell(
                    f"all workers were lost at step {reached}: begins again from step {has}, {reached - has} steps lost"
                )
        self._exchanges.write(as_json(asdict(replace(record, at=round(time.time(), 3)))) + "\n")
        self._exchanges.flush()
