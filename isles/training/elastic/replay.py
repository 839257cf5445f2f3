"""A run whose workers came and went, done again from its record, on the virtual clock: the same weights, bit for bit.

The record is another source of decisions (`rounds.decision`): whose state each worker began with, which
view it read by, with whom each exchange was whole, and which were not, are as `RUN/members.jsonl` and
`RUN/exchanges.jsonl` say. What obeys them is the worker of a run (`worker.ElasticWorker`). Between workers there is no
time: each waits for what it used. A worker whose work others have used in a round that it did not live to tell of does
that round too.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from isles.base.modes import torch_threads
from isles.base.tables import changed
from isles.comm.call import Ledger
from isles.comm.errors import CommError
from isles.comm.group import Group
from isles.comm.virtual.cluster import VirtualCluster
from isles.comm.virtual.scheduler import Scheduler
from isles.comm.virtual.transport import VirtualTransport
from isles.data import load_corpus
from isles.membership.data_ledger import batches
from isles.membership.rounds import Decision, IslandGroup, RoundLeader
from isles.membership.run_log import ALONE, LATE, WHOLE, RoundLine, StartLine
from isles.membership.simulated import VirtualCondition
from isles.membership.state_transfer import GiftRequest, NotOffered, is_written
from isles.membership.views import View
from isles.replicas.parts.interfaces import Mixing
from isles.training.config.sections import Config
from isles.training.elastic.metrics import recorded, views_of
from isles.training.elastic.states import ANCHORS, MODEL, STATE
from isles.training.elastic.support import in_rounds, lands_together, last_round, sync_every
from isles.training.elastic.worker import Decisions, ElasticWorker
from isles.training.lighthouse.mean import consolidate
from isles.training.records.rundir import lock_run
from isles.training.startup import deadlines

_LOST = "PeerLost"


@dataclass(frozen=True)
class RecordedLife:
    """A worker from one state that it began with to the next. rounds: in their order."""

    start: StartLine
    rounds: list[RoundLine] = field(default_factory=list)


@dataclass(frozen=True)
class Script:
    """lives: by seat. views: by number."""

    lives: Mapping[int, Sequence[RecordedLife]]
    views: Mapping[int, View]

    def line(self, seat: int, round: int) -> RoundLine | None:
        """The last time that `seat` was in `round`."""
        found = (line for life in self.lives.get(seat, ()) for line in life.rounds if line.round == round)
        return next(iter([*found][::-1]), None)


def script(entries: Iterable[Mapping[str, Any]], lines: Iterable[RoundLine | StartLine], *, agrees: bool) -> Script:
    """Of the journal's entries and the lines of exchanges. agrees: of a method of one mean for all.

    ValueError, in one line, for what cannot be repeated.
    """
    lives: dict[int, list[RecordedLife]] = {}
    for line in lines:
        own = lives.setdefault(line.seat, [])
        if isinstance(line, StartLine):
            if line.donor < 0 and line.has:
                raise ValueError(
                    f"worker {line.seat} began with a state from the lighthouse's disk, which is not kept: only runs "
                    "that never lost all of their workers can be repeated"
                )
            own.append(RecordedLife(line))
        elif own:
            own[-1].rounds.append(line)
    for own in lives.values():
        for number, life in enumerate(own):
            own[number] = _landed(life) if agrees else life
    made = Script(lives, views_of(entries))
    _unheard(made, agrees=agrees)
    return made


def _landed(life: RecordedLife) -> RecordedLife:
    """Without rounds at the end that were put off, whose work is in nobody's weights."""
    rounds = list(life.rounds)
    while rounds and rounds[-1].outcome == ALONE:
        rounds.pop()
    for line in rounds:
        if line.outcome in (ALONE, LATE):
            raise ValueError(
                f"worker {line.seat} did not land round {line.round} in time: where rounds are put off, or a quorum is "
                "enough, a run is not repeated"
            )
    return RecordedLife(life.start, rounds)


def _unheard(script: Script, *, agrees: bool) -> None:
    """Add the rounds that only others tell of."""
    for own in list(script.lives.values()):
        for line in [line for life in own for line in life.rounds if line.outcome == WHOLE]:
            for seat in line.seats:
                if script.line(seat, line.round) is None:
                    life = next((one for one in script.lives.get(seat, ()) if _ends_before(one, line.round)), None)
                    if life is None:
                        raise ValueError(f"nothing is on record of worker {seat} in round {line.round}")
                    life.rounds.append(replace(line, seat=seat, spare=0, outcome=WHOLE if agrees else _LOST))


def _ends_before(life: RecordedLife, round: int) -> bool:
    done = life.rounds[-1].round if life.rounds else life.start.first - 1
    return done == round - 1


_FOREVER = 1e9  # seconds of the virtual clock: what is on record comes


def repeat(config: Config, run: Path, out: Path, on_notice: Callable[[str], None]) -> list[int]:
    """Do the run in `run`, of `config`, again; write its one model to the file `out`. Whose mean it is.

    ValueError, in one line, for a run that cannot be repeated.
    """
    entries, lines = recorded(run)
    if not lines or not any(entry["event"] == "view" for entry in entries):
        raise ValueError(f"{run}: holds no record of exchanges (members.jsonl, exchanges.jsonl): name an elastic run")
    if config.world.inner > 1:
        raise ValueError("world.inner: runs of islands are not repeated")
    made = script(entries, lines, agrees=lands_together(config))
    config = in_rounds(changed(config, {"world.backend": "virtual", "world.virtual.links": "lan"}), simulated=True)
    corpus, shelf, ended = load_corpus(config.data), Shelf(made), list[int]()

    def open_all(scheduler: Scheduler, wire: Any, transports: Sequence[VirtualTransport]) -> None:
        shelf.changed = [VirtualCondition(scheduler, worker) for worker in scheduler.workers]

    with lock_run(run), tempfile.TemporaryDirectory(prefix="isles-") as folder:

        def work(transport: VirtualTransport) -> None:
            own = Path(folder) / str(transport.rank)
            own.mkdir()
            gifts = RecordedGifts(transport.rank, shelf)
            waits = replace(deadlines(config), outer=_FOREVER)
            leader = RecordedLeader(made, Group(transport, (transport.rank,), "outer", waits, Ledger()))
            last = last_round(config, made.views[max(made.views)])
            worker = ElasticWorker(
                config,
                leader.alone,
                leader,
                IslandGroup(),
                gifts,
                corpus,
                own,
                report=lambda event: on_notice(event["notice"]) if "notice" in event else None,
                last=lambda: last,
            )
            leader.mixing = worker.optimizer.parts.mixing
            try:
                worker.obey(_decisions(config, worker, leader, gifts, last))
            finally:
                worker.close()
            if (own / f"{MODEL}.safetensors").exists():
                ended.append(transport.rank)

        with torch_threads(config.world.start_threads):
            VirtualCluster(max(made.lives) + 1, links="lan", step_seconds=0.0, seed=config.run.seed).run(
                work, before=open_all
            )
        if not ended:
            raise ValueError(f"{run}: nobody came to the run's last round: only runs that have ended are repeated")
        models = {seat: Path(folder) / str(seat) / f"{MODEL}.safetensors" for seat in sorted(ended)}
        consolidate(models, out, alike=lands_together(config), ratio=config.world.trust_ratio)
    return sorted(ended)


def _decisions(
    config: Config, worker: ElasticWorker, leader: RecordedLeader, gifts: RecordedGifts, last: int
) -> Decisions[None]:
    """Life after life, as they are on record. ValueError where a round comes to something else than it did."""
    every, views, spare = sync_every(config), leader.script.views, 0
    done: RoundLine | None = None
    for life in leader.lives:
        leader.life, gifts.life, start, expected = life, life, life.start, 0
        if start.donor < 0:
            yield Decision(kind="draw")
        else:
            yield Decision(kind="load", donor=start.donor, seconds=_FOREVER)
            if lands_together(config):
                yield Decision(
                    kind="catch up", donor=start.donor, round=start.copied + 1, until=start.first, seconds=_FOREVER
                )
        for done in life.rounds:
            round, view = done.round, views.get(done.view)
            if round != expected:  # the first one, or it went over some
                steps = (round - 1) * every
                began_at = steps if worker.states.lacks_moments else None
                yield Decision(kind="enter", round=round, steps=steps, began_at=began_at)
            place = None if view is None else view.place(worker.seat)
            read = () if view is None or place is None else tuple(batches(views, view, round, place))
            gifts.round, expected = round, round + 1
            yield Decision(
                kind="train", round=round, steps=round * every - (len(read) or every), slices=read, spare=spare
            )
            spare += 0 if read else every
            outcome = leader.outcome(round)[1]
            if (outcome == WHOLE) != (done.outcome == WHOLE) or (len(read) or every) != done.steps:
                raise ValueError(
                    f"worker {worker.seat}, round {round}: {outcome} after {len(read) or every} steps, and on record "
                    f"{done.outcome} after {done.steps}: the record is not of this run, or misses lines"
                )
            yield Decision(kind="keep", round=round)
        worker.optimizer.courier.progress(blocks=True)
    if done is not None and done.round >= last:
        yield Decision(kind="conclude")


class RecordedLeader(RoundLeader):
    """Decides of each round as is on record of the life that it is in. alone: see `RoundLeader`."""

    mixing: Mixing
    life: RecordedLife

    def __init__(self, made: Script, alone: Group) -> None:
        super().__init__(cast(Any, None), alone)  # nobody is asked
        self.script, self.lives = made, made.lives.get(self.seat, ())

    def exchange(self, round: int) -> Decision:
        """In the newest view in which those who exchanged met; this worker alone where the other one was not there."""
        self.note_begun(round)
        view, seats = self._met(round)
        return Decision(kind="exchange", round=round, members=seats, view=max(view, 0), seconds=_FOREVER)

    def _met(self, round: int) -> tuple[int, tuple[int, ...]]:
        line, alone = self._told(round), (-1, (self.seat,))
        if line is None or line.outcome == ALONE or not all(self._sends(seat, line) for seat in line.seats):
            return alone
        if self.mixing.agrees:
            return line.view, line.seats
        for number in sorted(self.script.views, reverse=True):
            view = self.script.views[number]
            place = view.place(self.seat)
            if view.since <= round and place is not None:
                members = self.mixing.members(round, len(view.seats), place)
                if sorted(view.seats[one] for one in members) == sorted(line.seats):
                    return number, view.seats
        return alone

    def _told(self, round: int) -> RoundLine | None:
        return next((line for line in self.life.rounds if line.round == round), None)

    def _sends(self, seat: int, line: RoundLine) -> bool:
        """Whether `seat` took part in the exchange of that line."""
        other = self.script.line(seat, line.round)
        return other is not None and sorted(other.seats) == sorted(line.seats)

    def lost(self, seat: int) -> bool:
        return False

    def is_answer_used(self, round: int, seats: Sequence[int]) -> bool:
        line = self._told(round)
        return len(seats) <= 1 or (line is not None and line.outcome == WHOLE)

    def accuse(self, round: int, error: CommError) -> None:
        """Nothing follows from it."""

    def start_round(self, round: int) -> Decision:
        view, seats = self._met(round)
        if view < 0:
            return Decision(kind="postpone", round=round)
        return Decision(kind="exchange", round=round, members=seats, view=view, seconds=_FOREVER)

    def finish_round(self, round: int, attempt: int, digest: int | None, error: CommError | None) -> Decision:
        line = self._told(round)
        if digest is None or line is None:
            return Decision(kind="postpone", round=round)
        self.note(round, line.seats, WHOLE)
        return Decision(kind="land", round=round)


class Shelf:
    """States and means of all workers, by giver, name and round, for those who used them. changed: by seat."""

    changed: Sequence[VirtualCondition]

    def __init__(self, made: Script) -> None:
        self.used = {(life.start.donor, life.start.copied) for each in made.lives.values() for life in each}
        self._kept: dict[tuple[str, str, int], tuple[bytes, dict[str, Any]]] = {}

    def put(self, seat: int, key: tuple[str, str, int], content: bytes, facts: dict[str, Any]) -> None:
        """Keep it, in the turn of `seat`."""
        self._kept[key] = content, facts
        with self.changed[seat]:
            for other in self.changed:
                other.notify_all()

    def take(self, seat: int, key: tuple[str, str, int], seconds: float) -> tuple[bytes, dict[str, Any]]:
        """Wait for it. NotOffered where nobody gives it."""
        with self.changed[seat]:
            if not self.changed[seat].wait_for(lambda: key in self._kept, seconds):
                raise NotOffered("it is not on record")
        return self._kept[key]


class RecordedGifts:
    """What the worker in `seat` gives and takes: what those who used it got. round: that it is in."""

    life: RecordedLife

    def __init__(self, seat: int, shelf: Shelf) -> None:
        self._seat, self._shelf, self.round = seat, shelf, 0

    def is_wanted(self, what: str) -> bool:
        return what in (STATE, ANCHORS) and (self._seat, self.round) in self._shelf.used

    def offer(self, what: str, path: Path, facts: dict[str, Any], write: Callable[[Path], None] = is_written) -> None:
        if "round" in facts:
            write(path)
            self._shelf.put(self._seat, (str(self._seat), what, facts["round"]), path.read_bytes(), facts)

    def shut(self, what: str) -> None:
        """Who used it may still come."""

    def withdraw(self, what: str) -> None:
        """Who used it may still come."""

    def expect(self, comes: Callable[[str], bool]) -> None:
        """Whatever was used comes."""

    def take(self, asked: GiftRequest, path: Path) -> dict[str, Any]:
        is_state = asked.what in (STATE, ANCHORS)
        round = self.life.start.copied if is_state else int(asked.what.rpartition("-")[2])
        content, facts = self._shelf.take(self._seat, (asked.giver, asked.what, round), asked.seconds)
        path.write_bytes(content)
        return facts
