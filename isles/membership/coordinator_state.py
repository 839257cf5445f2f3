"""The lighthouse's state that must survive a restart: members, data ledger, open and landed rounds. `coordinator` makes
the decisions; they are applied here as journal entries.

`Ballots` holds the open rounds of an all-reduce method, and those that have landed. `BanScores` decides which members
to ban: a member of which at least half of the others refuse shares, or which refuses theirs, in three rounds or more. A
disagreement does not show which of the two is wrong, so it counts against both: a member that reports many others is
banned like one that many report, and fewer than half of the members ban nobody. With two members none is ever banned.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from isles.membership.data_ledger import DataLedger
from isles.membership.effects import Coordinator, Worker, WorkerTable, of_another_version
from isles.membership.messages import Beat, Delivered, Done, PeerReport, View, from_plain, identity_of
from isles.membership.round_commit import Ballot, Graces, RoundDecision

_ROUNDS, _OTHERS = 3, 2  # least disputed rounds, and least other members in dispute, until a member is banned
Pair = frozenset[int]


class BanScores:
    """Rounds of refusals, by the pair of members concerned; not journalled, so a restarted lighthouse counts anew."""

    def __init__(self) -> None:
        self._rounds: dict[Pair, set[int]] = {}

    def refused(self, one: int, another: int, round: int) -> None:
        """One of the two has refused the other's share of `round`."""
        self._rounds.setdefault(frozenset((one, another)), set()).add(round)

    def are_enough(self, member: int, members: Collection[int]) -> bool:
        """Whether `member` is to be banned. members: all who have trained and are connected."""
        pairs = (frozenset((member, other)) for other in members if other != member)
        rounds = [self._rounds[pair] for pair in pairs if pair in self._rounds]
        return len(rounds) >= max(_OTHERS, len(members) / 2) and len(set().union(*rounds)) >= _ROUNDS

    def worst(self, members: Iterable[int], more: Collection[Pair] = ()) -> int:
        """The member in most disagreements; of equals the first. more: pairs in addition to those of refusals."""
        pairs = self._rounds.keys() | more
        return max(members, key=lambda member: sum(member in pair for pair in pairs))


_RETAINED = 64  # landed rounds to remember, for members that were asleep


class Ballots:
    """The ballots of all rounds.

    `apply` is called with journalled decisions, so these survive a restart. Answers and reports do not; members repeat
    them.
    """

    def __init__(self) -> None:
        self._open: dict[int, Ballot] = {}
        self._landed: dict[int, Ballot] = {}
        self._reports: dict[tuple[int, int, int], dict[int, PeerReport]] = {}  # (round, attempt, accused): by sender
        self._out: dict[int, int] = {}  # by member: the newest view when others landed without it
        self._view = -1
        self.graces, self.ban_scores = Graces(), BanScores()

    @property
    def are_open(self) -> bool:
        """Whether there are reports on a round that has not landed."""
        return bool(self._open)

    def done(self, member: int, done: Done, members: tuple[int, ...]) -> None:
        """A member has an answer. members: of the first attempt of that round."""
        ballot = self._of(done.round, members)
        if ballot is not None:
            self._open[done.round] = ballot.add_answer(done.attempt, member, done.digest)

    def delivered(self, now: float, member: int, delivered: Delivered, members: tuple[int, ...], quorum: float) -> None:
        """A member has a share of a round that needs a `quorum`."""
        ballot = self._of(delivered.round, members)
        if ballot is not None:
            self._open[delivered.round] = replace(ballot, quorum=quorum).add_share(member, delivered.steps)
            self.graces.delivered(now, delivered.round, delivered.seconds)

    def reported(self, member: int, peer_report: PeerReport, members: tuple[int, ...], living: Collection[int]) -> None:
        """`member` reports another member. The next attempt leaves out a member that more than half of the others
        refuse, or find late. In the first attempt, whose deadline is short, a member that is done does not count as
        late. If the witnesses or senders have more refusals than the accused, in this round or before, the one with the
        most is left out in its place.
        """
        ballot = self._of(peer_report.round, members)
        reported = peer_report.member
        if ballot is None or peer_report.attempt != len(ballot.attempts) - 1 or reported not in ballot.attempts[-1]:
            return
        reports = self._reports.setdefault((peer_report.round, peer_report.attempt, reported), {})
        reports[member] = peer_report
        others = [s for s in ballot.attempts[-1] if s in living and s != reported and s not in ballot.out]
        sayers = [s for s in others if s in reports]
        counted = [reports[s] for s in sayers]
        if not peer_report.attempt and any((0, reported) == rounds[:2] for rounds in ballot.done):
            counted = [one for one in counted if one.charge == "refused"]
        if 2 * len(counted) > len(others) and member in others:
            witnesses = [one.by for one in counted if one.by in others]
            ballot = ballot.without(self.ban_scores.worst((reported, *witnesses, *sayers)))
        self._open[peer_report.round] = ballot

    def _worst(self, round: int) -> Callable[[Sequence[int]], int] | None:
        """Picks the member with most reports of `round` and refusals of any; None if nobody was reported."""
        reports = {key[2]: who for key, who in self._reports.items() if key[0] == round}
        pairs = {frozenset((reported, member)) for reported, who in reports.items() for member in who}
        return partial(self.ban_scores.worst, more=pairs) if pairs else None

    def due(self, now: float, living: Mapping[int, float]) -> Iterator[RoundDecision]:
        """Decisions that are due now. Each must be recorded, which calls `apply`, before the next is taken.

        living: by member, the first round that waits for it.
        """
        here = {round: {member for member, entered in living.items() if entered <= round} for round in self._open}
        for round, ballot in self._open.items():
            if ballot.has_quorum(here[round]):
                self.graces.enough(now, round)
        for round in self.graces.over(now) & self._open.keys():
            self._open[round] = replace(self._open[round], is_closing=True)
        for round in sorted(self._open):
            decision = self._open[round].decide(here[round], self._worst(round))
            if decision is not None:
                (self.graces.landed if decision.outcome == "land" else self.graces.exchanging)(now, round)
                yield replace(decision, view=self._view)

    def apply(self, decision: RoundDecision, members: tuple[int, ...]) -> list[int]:
        """Apply a recorded decision. members: of the first attempt. Returns those without whom the others land."""
        ballot = self._open.get(decision.round) or Ballot(decision.round, (members,))
        ballot = ballot.decided(decision)
        if decision.outcome == "retry":
            self._open[decision.round] = ballot
            return []
        self._open.pop(decision.round, None)
        self._landed = {
            **{r: b for r, b in self._landed.items() if r > decision.round - _RETAINED},
            decision.round: ballot,
        }
        self._reports = {key: who for key, who in self._reports.items() if key[0] != decision.round}
        tried = ballot.attempts[1:] if ballot.taken else ballot.attempts  # members that were only late fetch the mean
        left = sorted({member for members in tried for member in members} - set(decision.members))
        self._out |= dict.fromkeys(left, decision.view)
        return left

    def has_landed(self, round: int) -> bool:
        """Whether the round has landed, and is still remembered."""
        return round in self._landed

    def decision(self, round: int, member: int | None = None) -> RoundDecision | None:
        """The decision on `round` for `member`; None: for any asker."""
        ballot = self._landed.get(round) or self._open.get(round)
        return None if ballot is None else ballot.decision(member)

    def opened(self, view: View) -> None:
        """A new view begins: its members have the others' state."""
        self._view = view.number

    def left_out(self, view: View) -> Collection[int]:
        """Members of `view` that missed a landing, and so take no part in its rounds."""
        return {member for member, number in self._out.items() if number >= view.number}

    def _of(self, round: int, members: tuple[int, ...]) -> Ballot | None:
        """The open ballot of a round, or a new one; None if it has landed."""
        if round in self._landed or (round not in self._open and not members):
            return None
        return self._open.get(round) or Ballot(round, (members,))


_BEHIND = 4  # a worker that is more rounds behind half of the members loads another state


class CoordinatorState(Coordinator):
    """workers: by member. ledger: of the data that was read. ballots: on rounds that all members land together.
    newest_round: the newest begun one. issued: the number of the newest view or proposal. entries, until: as in
    `Coordinator`.
    """

    def __init__(self, entries: Iterable[dict[str, Any]], until: float) -> None:
        self.workers = WorkerTable()
        self.ledger = DataLedger()
        self.ballots = Ballots()
        self.newest_round = 0
        self.issued = -1
        super().__init__(entries, until)

    @property
    def view(self) -> View | None:
        """The newest view; None before the first."""
        return self.ledger.newest

    def members(self) -> tuple[int, ...]:
        """Members whose weights count: in a view, connected, with an up-to-date state."""
        return self.workers.members("in", "leaving")

    def voters(self, round: int) -> tuple[int, ...]:
        """The members of the first attempt of `round`."""
        view = self.ledger.view_of(round)
        if view is None:
            return ()
        left_out = self.ballots.left_out(view)
        return tuple(member for member in view.members if member not in left_out)

    def _connected(self) -> Iterable[int]:
        return (worker.member for worker in self.workers.here)

    def _apply(self, entry: dict[str, Any]) -> None:
        match entry:
            case {"event": "join", "member": member, "certificates": certificates}:
                self.workers[member] = Worker(member, identity_of(certificates))
            case {"event": "beat", "member": member, "beat": beat}:
                self._apply_beat(self.workers[member], from_plain(beat))
                return
            case {"event": "lost", "member": member}:
                self._apply_gone(self.workers[member])
            case {"event": "back", "member": member}:
                self._apply_back(self.workers[member])
            case {"event": "leave", "member": member}:
                worker = self.workers[member]
                worker.state = "leaving" if worker.state == "in" and worker.connected else "left"
            case {"event": "call", "member": member}:
                self._call_again(self.workers[member])
            case {"event": "ban", "member": member}:
                self._call_again(self.workers[member])
                self.workers[member].state = "banned"
            case {"event": "issue", "number": number}:
                self.issued = number
            case {"event": "view", "view": view}:
                self._apply_view(from_plain(view))
            case {"event": "decision", "decision": decision}:
                self._apply_decision(from_plain(decision))
            case _:
                of_another_version(entry)
        self.workers.changed()

    def _apply_beat(self, worker: Worker, beat: Beat) -> None:
        worker.round = max(worker.round, beat.round)
        # what it had seen with its former state is lost
        seen = dict(beat.seen) if beat.ready == worker.call else {}
        self.ledger.begun(worker.member, beat.round, beat.skipped, seen)
        if worker.state == "outside" and beat.ready == worker.call:
            worker.state = "ready"
            self.workers.changed()
        if worker.state in ("in", "leaving"):
            self.newest_round = max(self.newest_round, beat.round)
        at = max(worker.round, worker.entered - 1)  # a joiner is not behind before its first round
        if worker.state == "in" and self.newest_round - at > _BEHIND:
            ahead = [member for member in self.members() if self.workers[member].round - at > _BEHIND]
            if 2 * len(ahead) >= len(self.members()):  # a single member may report a false round
                self._call_again(worker)

    def _apply_gone(self, worker: Worker) -> None:
        worker.connected = False
        if worker.state in ("in", "leaving"):
            self.ledger.forgo(worker.member)
        if worker.state == "leaving":
            worker.state = "left"
        elif worker.state == "ready":
            worker.state = "outside"

    def _apply_back(self, worker: Worker) -> None:
        if worker.state == "in":
            if not self.members():
                self._call_all_but((worker.member,))
            self.ledger.reclaim(worker.member)
        worker.connected = True

    def _apply_view(self, view: View) -> None:
        before = () if self.view is None else self.view.members
        known = [self.workers[member] for member in view.members if member in before]
        begins = any(worker.state == "in" and worker.entered <= self.newest_round for worker in known)
        if not self.members():
            self._call_all_but(view.members)
        self.ledger.open(view, self.members())
        for member in before:
            if member not in view.members and self.workers[member].state == "in":
                self._call_again(self.workers[member])
        for member in view.members:
            self.workers[member].enter(view.since)
        self.ballots.opened(view)
        if not begins:  # only joiners, which wait until a member has begun this round
            self.newest_round = max(self.newest_round, view.since)

    def _apply_decision(self, decision: RoundDecision) -> None:
        for member in self.ballots.apply(decision, self.voters(decision.round)):
            if self.workers[member].state == "in":
                self._call_again(self.workers[member])
        if decision.outcome == "land":
            self.ledger.landed(decision.round, decision.members)

    def _call_all_but(self, members: Collection[int]) -> None:
        """`members` are the first to have the run's state again: others must load theirs, not what was named before."""
        for worker in self.workers.waiting(members):
            self._call_again(worker)

    def _call_again(self, worker: Worker) -> None:
        """The worker must load another state: its own differs from the others', or no view waits for it."""
        self.ledger.forgo(worker.member)
        worker.state, worker.call = "outside", worker.call + 1
        worker.load, worker.tried = None, set()
        self.workers.changed()
