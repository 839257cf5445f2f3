"""What a lighthouse knows of a run that it must know again when it is started again: `membership` decides, and what it
decides comes here as entries of the journal.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from isles.comm.elastic.account import Account
from isles.comm.elastic.ballot import Word
from isles.comm.elastic.ballots import Ballots
from isles.comm.elastic.identity import identity_of
from isles.comm.elastic.lasting.journalled import of_another_version
from isles.comm.elastic.messages import Beat, from_plain
from isles.comm.elastic.orders import SeatTable, Worker
from isles.comm.view import View

_BEHIND = 4  # rounds behind half of the members from which one is better off with another's state


class Register:
    """workers: by seat. account: of what was read. ballots: on rounds that all land together. newest_round: that a
    member has begun. issued: the number of the newest view or proposal.
    """

    def __init__(self) -> None:
        self.workers = SeatTable()
        self.account = Account()
        self.ballots = Ballots()
        self.newest_round = 0
        self.issued = -1

    @property
    def view(self) -> View | None:
        """The newest."""
        return self.account.newest

    def members(self) -> tuple[int, ...]:
        """Seats whose weights count: in a view, connected, and not to begin with another's state."""
        return self.workers.seats("in", "leaving")

    def voters(self, round: int) -> tuple[int, ...]:
        """Who exchanges in the first attempt of `round`."""
        view = self.account.view_of(round)
        if view is None:
            return ()
        left_out = self.ballots.left_out(view)
        return tuple(seat for seat in view.seats if seat not in left_out)

    def apply(self, entry: dict[str, Any]) -> None:
        """ValueError for an event that this version does not know."""
        match entry:
            case {"event": "join", "seat": seat, "description": description, "certificates": certificates}:
                self.workers[seat] = Worker(seat, description, identity_of(certificates))
            case {"event": "beat", "seat": seat, "beat": beat}:
                self._apply_beat(self.workers[seat], from_plain(beat))
                return
            case {"event": "gone", "seat": seat}:
                self._apply_gone(self.workers[seat])
            case {"event": "back", "seat": seat}:
                self._apply_back(self.workers[seat])
            case {"event": "leave", "seat": seat}:
                worker = self.workers[seat]
                worker.state = "leaving" if worker.state == "in" and worker.connected else "left"
            case {"event": "call", "seat": seat}:
                self._call_again(self.workers[seat])
            case {"event": "shut", "seat": seat}:
                self._call_again(self.workers[seat])
                self.workers[seat].state = "shut"
            case {"event": "issue", "number": number}:
                self.issued = number
            case {"event": "view", "view": view}:
                self._apply_view(from_plain(view))
            case {"event": "word", "word": word}:
                self._apply_word(from_plain(word))
            case _:
                of_another_version(entry)
        self.workers.changed()

    def _apply_beat(self, worker: Worker, beat: Beat) -> None:
        worker.round = max(worker.round, beat.round)
        # what it got before it was to take another's state it will not have any more
        seen = dict(beat.seen) if beat.ready == worker.call else {}
        self.account.begun(worker.seat, beat.round, beat.skipped, seen)
        if worker.state == "outside" and beat.ready == worker.call:
            worker.state = "ready"
            self.workers.changed()
        if worker.state in ("in", "leaving"):
            self.newest_round = max(self.newest_round, beat.round)
        at = max(worker.round, worker.entered - 1)  # a newcomer is not behind before its first round
        if worker.state == "in" and self.newest_round - at > _BEHIND:
            ahead = [seat for seat in self.members() if self.workers[seat].round - at > _BEHIND]
            if 2 * len(ahead) >= len(self.members()):  # one of several may say what is not so
                self._call_again(worker)

    def _apply_gone(self, worker: Worker) -> None:
        worker.connected = False
        if worker.state in ("in", "leaving"):
            self.account.forgo(worker.seat)
        if worker.state == "leaving":
            worker.state = "left"
        elif worker.state == "ready":
            worker.state = "outside"

    def _apply_back(self, worker: Worker) -> None:
        if worker.state == "in":
            if not self.members():
                self._call_all_but((worker.seat,))
            self.account.reclaim(worker.seat)
        worker.connected = True

    def _apply_view(self, view: View) -> None:
        before = () if self.view is None else self.view.seats
        known = [self.workers[seat] for seat in view.seats if seat in before]
        begins = any(worker.state == "in" and worker.entered <= self.newest_round for worker in known)
        if not self.members():
            self._call_all_but(view.seats)
        self.account.open(view, self.members())
        for seat in before:
            if seat not in view.seats and self.workers[seat].state == "in":
                self._call_again(self.workers[seat])
        for seat in view.seats:
            self.workers[seat].enter(view.since)
        self.ballots.opened(view)
        if not begins:  # nobody would be in that round before those who wait for their first one are
            self.newest_round = max(self.newest_round, view.since)

    def _apply_word(self, word: Word) -> None:
        for seat in self.ballots.apply(word, self.voters(word.round)):
            if self.workers[seat].state == "in":
                self._call_again(self.workers[seat])
        if word.verdict == "land":
            self.account.landed(word.round, word.seats)

    def _call_all_but(self, seats: Collection[int]) -> None:
        """`seats` are the first to have the run's state again: what others were to begin with is another one."""
        for worker in self.workers.waiting(seats):
            self._call_again(worker)

    def _call_again(self, worker: Worker) -> None:
        """Its state is not that of the others any more, or no view waits for it."""
        self.account.forgo(worker.seat)
        worker.state, worker.call = "outside", worker.call + 1
        worker.load, worker.tried = None, set()
        self.workers.changed()
