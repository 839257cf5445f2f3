"""Replay of a run that workers joined and left, from its record, on the virtual clock: the same weights, bit for bit.

The decisions (`isles.membership.rounds.Decision`) come from `RUN/members.jsonl` and `RUN/exchanges.jsonl`: the state
that each worker started from, the view by which it read, and the members and outcome of each exchange. The worker that
carries them out is that of a run (`worker.ElasticWorker`). Timing plays no part: each worker waits for what it used. If
others used the share of a worker that was lost before it reported the round, the worker does that round too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from isles.base.modes import torch_threads
from isles.base.scratch import scratch
from isles.base.tables import changed
from isles.comm.call import Ledger
from isles.comm.errors import CommError
from isles.comm.group import Group
from isles.comm.virtual.cluster import VirtualCluster, VirtualTransport
from isles.comm.virtual.scheduler import Scheduler
from isles.data import load_corpus
from isles.membership.data_ledger import batches
from isles.membership.messages import View
from isles.membership.rounds import Decision, IslandGroup, RoundLeader
from isles.membership.run_log import ALONE, LATE, WHOLE, RoundRecord, StartRecord
from isles.membership.simulated import SimulatedCondition
from isles.membership.state_transfer import ANCHORS, MODEL, STATE, FetchRequest, StateNotFound, is_written
from isles.replicas.parts.interfaces import Mixing
from isles.training.config.sections import Config
from isles.training.elastic.metrics import recorded, views_of
from isles.training.elastic.support import final_rule, in_rounds, lands_together, last_round, sync_every
from isles.training.elastic.worker import Decisions, ElasticWorker
from isles.training.lighthouse.mean import consolidate
from isles.training.records.rundir import lock_run
from isles.training.worker import deadlines

_LOST = "PeerLost"


@dataclass(frozen=True)
class RecordedIncarnation:
    """A worker from one loaded state to the next. rounds: in order."""

    start: StartRecord
    rounds: list[RoundRecord] = field(default_factory=list)


@dataclass(frozen=True)
class ReplayLog:
    """incarnations: by member. views: by number."""

    incarnations: Mapping[int, Sequence[RecordedIncarnation]]
    views: Mapping[int, View]

    def record(self, member: int, round: int) -> RoundRecord | None:
        """The last record of `member` in `round`."""
        matching = (
            record
            for incarnation in self.incarnations.get(member, ())
            for record in incarnation.rounds
            if record.round == round
        )
        return next(iter([*matching][::-1]), None)


def replay_log(
    entries: Iterable[Mapping[str, Any]], records: Iterable[RoundRecord | StartRecord], *, agrees: bool
) -> ReplayLog:
    """Build the log from the journal's entries and the records of exchanges. agrees: whether all land the same mean.

    ValueError, in one line, for a run that cannot be replayed.
    """
    incarnations: dict[int, list[RecordedIncarnation]] = {}
    for record in records:
        of_member = incarnations.setdefault(record.member, [])
        if isinstance(record, StartRecord):
            if record.donor < 0 and record.has:
                raise ValueError(
                    f"worker {record.member} began with a state from the lighthouse's disk, which is deleted by now: "
                    "only runs that never lost all of their workers can be repeated"
                )
            of_member.append(RecordedIncarnation(record))
        elif of_member:
            of_member[-1].rounds.append(record)
    for of_member in incarnations.values():
        for number, incarnation in enumerate(of_member):
            of_member[number] = _landed(incarnation) if agrees else incarnation
    log = ReplayLog(incarnations, views_of(entries))
    _add_unreported(log, agrees=agrees)
    return log


def _landed(incarnation: RecordedIncarnation) -> RecordedIncarnation:
    """Drop postponed rounds at the end, which are in no other worker's weights."""
    rounds = list(incarnation.rounds)
    while rounds and rounds[-1].outcome == ALONE:
        rounds.pop()
    for record in rounds:
        if record.outcome in (ALONE, LATE):
            raise ValueError(
                f"worker {record.member} did not land round {record.round} in time: where rounds are put off, or a "
                "quorum is enough, a run is not repeated"
            )
    return RecordedIncarnation(incarnation.start, rounds)


def _add_unreported(replay_log: ReplayLog, *, agrees: bool) -> None:
    """Add the rounds that a lost worker did not report, from the records of the others."""
    for own in list(replay_log.incarnations.values()):
        for record in [record for incarnation in own for record in incarnation.rounds if record.outcome == WHOLE]:
            for member in record.members:
                if replay_log.record(member, record.round) is None:
                    incarnation = next(
                        (one for one in replay_log.incarnations.get(member, ()) if _ends_before(one, record.round)),
                        None,
                    )
                    if incarnation is None:
                        raise ValueError(f"nothing is on record of worker {member} in round {record.round}")
                    incarnation.rounds.append(
                        replace(record, member=member, spare=0, outcome=WHOLE if agrees else _LOST)
                    )


def _ends_before(incarnation: RecordedIncarnation, round: int) -> bool:
    done = incarnation.rounds[-1].round if incarnation.rounds else incarnation.start.first - 1
    return done == round - 1


_FOREVER = 1e9  # seconds of the virtual clock: everything on record arrives


def repeat(config: Config, run: Path, out: Path, on_notice: Callable[[str], None]) -> list[int]:
    """Replay the run in `run`, of `config`, and write its model to the file `out`; returns the members of that mean.

    ValueError, in one line, for a run that cannot be replayed.
    """
    entries, records = recorded(run)
    if not records or not any(entry["event"] == "view" for entry in entries):
        raise ValueError(f"{run}: holds no record of exchanges (members.jsonl, exchanges.jsonl): name an elastic run")
    if config.world.inner > 1:
        raise ValueError("world.inner: runs of islands are not repeated")
    log = replay_log(entries, records, agrees=lands_together(config))
    config = in_rounds(changed(config, {"world.backend": "virtual", "world.virtual.links": "lan"}), simulated=True)
    corpus, store, ended = load_corpus(config.data), RecordedStates(log), list[int]()

    def open_all(scheduler: Scheduler, wire: Any, transports: Sequence[VirtualTransport]) -> None:
        store.changed = [SimulatedCondition(scheduler, worker) for worker in scheduler.workers]

    with lock_run(run), scratch() as folder:

        def work(transport: VirtualTransport) -> None:
            own_folder = folder / str(transport.rank)
            own_folder.mkdir()
            transfers = RecordedTransfer(transport.rank, store)
            waits = replace(deadlines(config), outer=_FOREVER)
            leader = RecordedLeader(log, Group(transport, (transport.rank,), "outer", waits, Ledger()))
            last = last_round(config, log.views[max(log.views)])
            worker = ElasticWorker(
                config,
                leader.alone,
                leader,
                IslandGroup(),
                transfers,
                corpus,
                own_folder,
                report=lambda event: on_notice(event["notice"]) if "notice" in event else None,
                last=lambda: last,
            )
            leader.mixing = worker.optimizer.parts.mixing
            try:
                worker.obey(_decisions(config, worker, leader, transfers, last))
            finally:
                worker.close()
            if (own_folder / f"{MODEL}.safetensors").exists():
                ended.append(transport.rank)

        with torch_threads(config.world.start_threads):
            VirtualCluster(max(log.incarnations) + 1, links="lan", step_seconds=0.0, seed=config.run.seed).run(
                work, before=open_all
            )
        if not ended:
            raise ValueError(f"{run}: nobody came to the run's last round: only runs that have ended are repeated")
        models = {member: folder / str(member) / f"{MODEL}.safetensors" for member in sorted(ended)}
        consolidate(models, out, **final_rule(config))
    return sorted(ended)


def _decisions(
    config: Config, worker: ElasticWorker, leader: RecordedLeader, transfers: RecordedTransfer, last: int
) -> Decisions[None]:
    """The recorded decisions of a worker, incarnation by incarnation. ValueError if a round has another outcome than
    on record.
    """
    every, views, spare = sync_every(config), leader.replay_log.views, 0
    done: RoundRecord | None = None
    for incarnation in leader.incarnations:
        leader.incarnation, transfers.incarnation, start, expected = incarnation, incarnation, incarnation.start, 0
        if start.donor < 0:
            yield Decision(kind="draw")
        else:
            yield Decision(kind="load", donor=start.donor, seconds=_FOREVER)
            if lands_together(config):
                yield Decision(
                    kind="catch up", donor=start.donor, round=start.copied + 1, until=start.first, seconds=_FOREVER
                )
        for done in incarnation.rounds:
            round, view = done.round, views.get(done.view)
            if round != expected:  # the first round, or rounds were skipped
                steps = (round - 1) * every
                began_at = steps if worker.states.lacks_moments else None
                yield Decision(kind="enter", round=round, steps=steps, began_at=began_at)
            index = None if view is None else view.index(worker.member)
            read = () if view is None or index is None else tuple(batches(views, view, round, index))
            transfers.round, expected = round, round + 1
            yield Decision(
                kind="train", round=round, steps=round * every - (len(read) or every), slices=read, spare=spare
            )
            spare += 0 if read else every
            outcome = leader.outcome(round)[1]
            if (outcome == WHOLE) != (done.outcome == WHOLE) or (len(read) or every) != done.steps:
                raise ValueError(
                    f"worker {worker.member}, round {round}: {outcome} after {len(read) or every} steps, and on record "
                    f"{done.outcome} after {done.steps}: the record is not of this run, or misses lines"
                )
            yield Decision(kind="keep", round=round)
        worker.optimizer.round_exchange.progress(blocks=True)
    if done is not None and done.round >= last:
        yield Decision(kind="conclude")


class RecordedLeader(RoundLeader):
    """Decides each round by the record of the current incarnation. alone: see `RoundLeader`."""

    mixing: Mixing
    incarnation: RecordedIncarnation

    def __init__(self, log: ReplayLog, alone: Group) -> None:
        super().__init__(cast(Any, None), alone)  # no client: there is no lighthouse
        self.replay_log, self.incarnations = log, log.incarnations.get(self.member, ())

    def exchange(self, round: int) -> Decision:
        """Exchange in the newest view that pairs the recorded members; without a partner if that one took no part."""
        self.note_begun(round)
        view, members = self._met(round)
        return Decision(kind="exchange", round=round, members=members, view=max(view, 0), seconds=_FOREVER)

    def _met(self, round: int) -> tuple[int, tuple[int, ...]]:
        record, alone = self._record_of(round), (-1, (self.member,))
        if (
            record is None
            or record.outcome == ALONE
            or not all(self._sends(member, record) for member in record.members)
        ):
            return alone
        if self.mixing.agrees:
            return record.view, record.members
        for number in sorted(self.replay_log.views, reverse=True):
            view = self.replay_log.views[number]
            index = view.index(self.member)
            if view.since <= round and index is not None:
                members = self.mixing.members(round, len(view.members), index)
                if sorted(view.members[one] for one in members) == sorted(record.members):
                    return number, view.members
        return alone

    def _record_of(self, round: int) -> RoundRecord | None:
        return next((record for record in self.incarnation.rounds if record.round == round), None)

    def _sends(self, member: int, record: RoundRecord) -> bool:
        """Whether `member` took part in the exchange of `record`."""
        other = self.replay_log.record(member, record.round)
        return other is not None and sorted(other.members) == sorted(record.members)

    def lost(self, member: int) -> bool:
        return False

    def is_answer_used(self, round: int, members: Sequence[int]) -> bool:
        record = self._record_of(round)
        return len(members) <= 1 or (record is not None and record.outcome == WHOLE)

    def report_peer(self, round: int, error: CommError) -> None:
        """Ignored: outcomes come from the record."""

    def start_round(self, round: int) -> Decision:
        view, members = self._met(round)
        if view < 0:
            return Decision(kind="postpone", round=round)
        return Decision(kind="exchange", round=round, members=members, view=view, seconds=_FOREVER)

    def finish_round(self, round: int, attempt: int, digest: int | None, error: CommError | None) -> Decision:
        record = self._record_of(round)
        if digest is None or record is None:
            return Decision(kind="postpone", round=round)
        self.note(round, record.members, WHOLE)
        return Decision(kind="land", round=round)


class RecordedStates:
    """The states and means that workers used, by source, name and round. changed: by member."""

    changed: Sequence[SimulatedCondition]

    def __init__(self, log: ReplayLog) -> None:
        self.used = {
            (incarnation.start.donor, incarnation.start.copied)
            for each in log.incarnations.values()
            for incarnation in each
        }
        self._states: dict[tuple[str, str, int], tuple[bytes, dict[str, Any]]] = {}

    def put(self, member: int, key: tuple[str, str, int], content: bytes, facts: dict[str, Any]) -> None:
        """Store a file, in the turn of `member`, and wake the others."""
        # Stored before the others wake up, which look for it.
        self._states[key] = content, facts
        with self.changed[member]:
            for other in self.changed:
                other.notify_all()

    def take(self, member: int, key: tuple[str, str, int], seconds: float) -> tuple[bytes, dict[str, Any]]:
        """Wait for a file. StateNotFound if none arrives."""
        with self.changed[member]:
            if not self.changed[member].wait_for(lambda: key in self._states, seconds):
                raise StateNotFound("it is not on record")
        return self._states[key]


class RecordedTransfer:
    """The state transfers of `member`: only those on record. round: the current one."""

    incarnation: RecordedIncarnation

    def __init__(self, member: int, store: RecordedStates) -> None:
        self._member, self._shelf, self.round = member, store, 0

    def is_requested(self, what: str) -> bool:
        return what in (STATE, ANCHORS) and (self._member, self.round) in self._shelf.used

    def publish(self, what: str, path: Path, facts: dict[str, Any], write: Callable[[Path], None] = is_written) -> None:
        if "round" in facts:
            write(path)
            self._shelf.put(self._member, (str(self._member), what, facts["round"]), path.read_bytes(), facts)

    def freeze(self, what: str) -> None:
        """Ignored: recorded joiners may still fetch it."""

    def unpublish(self, what: str) -> None:
        """Ignored: recorded joiners may still fetch it."""

    def announce(self, comes: Callable[[str], bool]) -> None:
        """Ignored: everything that was used is published."""

    def fetch(self, asked: FetchRequest, path: Path) -> dict[str, Any]:
        is_state = asked.what in (STATE, ANCHORS)
        round = self.incarnation.start.copied if is_state else int(asked.what.rpartition("-")[2])
        content, facts = self._shelf.take(self._member, (asked.source, asked.what, round), asked.seconds)
        path.write_bytes(content)
        return facts
