"""A run whose workers came and went, done again from its record, on the virtual clock: the same weights, bit for bit.

What decides there is not decided again: whose state each worker began with, which view it read by, with whom each
exchange was whole, and which were not, are as `RUN/members.jsonl` and `RUN/exchanges.jsonl` say. The rest is the code
of a worker (`joining.Participant`). Between workers there is no time: each waits for what it used.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from isles.comm.elastic.ballot import Word
from isles.comm.elastic.company import Company
from isles.comm.elastic.gifts.giving import is_written
from isles.comm.elastic.gifts.taking import GiftRequest, NotOffered
from isles.comm.elastic.member import Member, Standing
from isles.comm.elastic.messages import Done, Entry, Finished, Over
from isles.comm.elastic.record import ALONE, WHOLE, RoundLine
from isles.comm.view import View
from isles.comm.virtual.churn.session import VirtualNetwork, VirtualSession
from isles.comm.virtual.cluster import VirtualCluster
from isles.comm.virtual.scheduler import Scheduler
from isles.comm.virtual.transport import VirtualTransport
from isles.comm.virtual.wire import VirtualWire
from isles.data import load_corpus
from isles.modes import torch_threads
from isles.replicas.parts.interfaces import Mixing
from isles.tables import changed
from isles.training.config.sections import Config
from isles.training.elastic.churn.script import RecordedLife, Script, script
from isles.training.elastic.figures import recorded
from isles.training.elastic.given import ANCHORS, MODEL, STATE
from isles.training.elastic.joining import Ending, Participant
from isles.training.elastic.lighthouse.averaging import consolidate
from isles.training.elastic.terms import in_rounds, lands_together, last_round
from isles.training.records.rundir import held

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
    corpus, companies, store = load_corpus(config.data), dict[int, RepeatedCompany](), dict[Any, Any]()
    results: dict[int, Any] = {}
    last = last_round(config, made.views[max(made.views)])

    def open_all(scheduler: Scheduler, wire: VirtualWire, transports: Sequence[VirtualTransport]) -> None:
        network = VirtualNetwork(scheduler, wire)
        for transport in transports:
            session = VirtualSession(network, scheduler.workers[transport.rank])
            companies[transport.rank] = RepeatedCompany(made, session, transport.rank, last, results.__setitem__)

    with held(run), tempfile.TemporaryDirectory(prefix="isles-") as folder:

        def work(transport: VirtualTransport) -> None:
            company, own = companies[transport.rank], Path(folder) / str(transport.rank)
            own.mkdir()
            gifts = _Gifts(company, companies, store, STATE if config.world.elastic.join_state == "full" else ANCHORS)
            worker = Repeater(config, company, transport, gifts, corpus, own, on_notice)
            company.mixing = worker.optimizer.parts.mixing
            try:
                worker.run()
            finally:
                worker.close()

        with torch_threads(config.world.start_threads):
            VirtualCluster(max(made.lives) + 1, links="lan", step_seconds=0.0, seed=config.run.seed).run(
                work, before=open_all
            )
        seats = sorted(results)
        models = {seat: Path(folder) / str(seat) / f"{MODEL}.safetensors" for seat in seats}
        if not models:
            raise ValueError(f"{run}: nobody came to the run's last round: only runs that have ended are repeated")
        consolidate(models, out, alike=lands_together(config), ratio=config.world.trust_ratio)
    return seats


class Repeater(Participant):
    """A worker that does what it did."""

    company: RepeatedCompany

    def run(self) -> Ending:
        """Life after life, as they are on record."""
        waits = replace(self.roster.founders.deadlines, outer=_FOREVER)
        self.roster.founders = replace(self.roster.founders, deadlines=waits)
        self.roster.learns = False
        ending: Ending = "over"
        for life in self.company.own:
            self.company.begin_life(life)
            if life.start.donor < 0:
                self._acts.begin_anew()
            else:
                self._acts.take(life.start.donor, _FOREVER)
                if self._agrees:
                    self._acts.follow(life.start.donor, life.start.copied + 1, life.start.first, _FOREVER)
            ending = self._train(life.start.first)
        if ending == "finished":
            self.company.ended = Over()
            self._conclude()
        return ending

    def _round(self, round: int, every: int) -> int:
        """As it was done; then on to the next one that is on record, for it may have gone over some."""
        over, following = super()._round(round, every), self.company.after(round)
        if following is None or following <= round + over:
            return over
        self._enter(following, (following - 1) * every)
        return following - round


class RepeatedCompany(Company):
    """A line to a lighthouse that says what it said. last: the run's last round. ended_with: gets the result of each
    worker that was there at the end.
    """

    mixing: Mixing

    def __init__(
        self, made: Script, session: VirtualSession, seat: int, last: int, ended_with: Callable[[int, Any], None]
    ) -> None:
        super().__init__(session, Entry(seat, ""))
        self.own = made.lives.get(self.seat, ())
        self.current = 0
        self._script, self._last, self._ended_with = made, last, ended_with
        self._done = 0
        self._life: RecordedLife | None = None
        self.member = Member(self.seat, made.views.values())

    def begin_life(self, life: RecordedLife) -> None:
        """Begin with `life`: what is asked from here on is answered as it was then."""
        self._life, self._done, self.ended = life, 0, None
        self._look()

    @property
    def copied(self) -> int:
        """The round of the state that this life began with."""
        assert self._life is not None
        return self._life.start.copied

    def gives(self) -> bool:
        """Whether somebody began with this worker's state after the round that it is in."""
        starts = (life.start for lives in self._script.lives.values() for life in lives)
        return any((start.donor, start.copied) == (self.seat, self.current) for start in starts)

    def begin(self, round: int) -> View | None:
        line = self._line_of(round)
        assert line is not None
        self.current = round
        return self._script.views.get(line.view)

    def standing(self, round: int) -> Standing:
        """The newest view in which those who exchanged met; this worker alone where the other one was not there."""
        line = self._line_of(round)
        if line is None or line.outcome == ALONE or not all(self._sends(seat, line) for seat in line.seats):
            return Standing(-1, (self.seat,))
        if self.mixing.agrees:
            return Standing(line.view, line.seats)
        for number in sorted(self._script.views, reverse=True):
            view = self._script.views[number]
            place = view.place(self.seat)
            if view.since <= round and place is not None:
                members = self.mixing.members(round, len(view.seats), place)
                if sorted(view.seats[one] for one in members) == sorted(line.seats):
                    return Standing(number, view.seats)
        return Standing(-1, (self.seat,))

    def after(self, round: int) -> int | None:
        """The first round of this life behind that one."""
        assert self._life is not None
        return min((line.round for line in self._life.rounds if line.round > round), default=None)

    def _line_of(self, round: int) -> RoundLine | None:
        assert self._life is not None
        return next((line for line in self._life.rounds if line.round == round), None)

    def _sends(self, seat: int, line: RoundLine) -> bool:
        """Whether `seat` took part in the exchange of that line."""
        other = self._script.line(seat, line.round)
        return other is not None and sorted(other.seats) == sorted(line.seats)

    def lost(self, seat: int) -> bool:
        return False

    def accepts(self, round: int, seats: Sequence[int]) -> bool:
        line = self._line_of(round)
        return len(seats) <= 1 or (line is not None and line.outcome == WHOLE)

    def landed(self, word: Word) -> None:
        """Nothing follows from it."""

    @property
    def is_called(self) -> bool:
        return self._is_through and self._life is not self.own[-1]

    @property
    def is_over(self) -> bool:
        return False

    @property
    def _is_through(self) -> bool:
        assert self._life is not None
        return self._done >= len(self._life.rounds)

    def _look(self) -> None:
        """Where nothing more is on record it ended here, if that was not the run's end."""
        assert self._life is not None
        done = self._life.rounds
        if self._is_through and self._life is self.own[-1] and (not done or done[-1].round < self._last):
            self.ended = Over()

    def report(self, event: Mapping[str, Any]) -> None:
        if "round" in event:
            line, told = event["round"], self._line_of(event["round"]["round"])
            assert told is not None
            if (line["outcome"] == WHOLE) != (told.outcome == WHOLE) or line["steps"] != told.steps:
                raise ValueError(
                    f"worker {self.seat}, round {told.round}: {line['outcome']} after {line['steps']} steps, and on "
                    f"record {told.outcome} after {told.steps}: the record is not of this run, or misses lines"
                )
            self._done += 1
            self._look()
        elif "result" in event:
            self._ended_with(self.seat, event["result"])

    def ask(self, message: Any, seconds: float = 0.0, key: str = "") -> Any:
        if isinstance(message, Done):
            line = self._line_of(message.round)
            assert line is not None
            return Word(message.round, "land", message.attempt, line.seats)
        return True if isinstance(message, Finished) else None

    def left_out(self) -> dict[int, int]:
        return {}

    def pace(self, seconds: float) -> None:
        """Of no use."""

    def poke(self) -> None:
        """Nobody is to know."""


class _Gifts:
    """States and means as those who used them got them. store: of all workers, by giver, name and round."""

    def __init__(
        self, company: RepeatedCompany, companies: Mapping[int, RepeatedCompany], store: dict[Any, Any], kind: str
    ) -> None:
        self._company, self._companies, self._store, self._kind = company, companies, store, kind

    def is_wanted(self, what: str) -> bool:
        return what == self._kind and self._company.gives()

    def offer(self, what: str, path: Path, facts: dict[str, Any], write: Callable[[Path], None] = is_written) -> None:
        if "round" in facts:
            write(path)
            self._store[str(self._company.seat), what, facts["round"]] = path.read_bytes(), facts
            with self._company.changed:
                for company in self._companies.values():
                    company.changed.notify_all()

    def shut(self, what: str) -> None:
        """Who used it may still come."""

    def withdraw(self, what: str) -> None:
        """Who used it may still come."""

    def expect(self, comes: Callable[[str], bool]) -> None:
        """Whatever was used comes."""

    def take(self, asked: GiftRequest, path: Path) -> dict[str, Any]:
        round = self._company.copied if asked.what == self._kind else int(asked.what.rpartition("-")[2])
        key = asked.giver, asked.what, round
        if not self._company.wait(lambda: key in self._store, asked.seconds):
            raise NotOffered("it is not on record")
        content, facts = self._store[key]
        path.write_bytes(content)
        return facts
