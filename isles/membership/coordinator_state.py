"""The lighthouse's state that must survive a restart: members, data ledger, open and landed rounds. `coordinator` makes
the decisions; they are applied here as journal entries.

`Ballots` holds the open rounds of an all-reduce method, and those that have landed. `BanScores` decides which members
to ban: a member of which at least half of the others refuse shares, or which refuses theirs, in three rounds or more. A
disagreement does not show which of the two is wrong, so it counts against both: a member that reports many others is
banned like one that many report, and fewer than half of the members ban nobody. With two members none is ever banned.
Disagreements add up over all views: a new one does not clear a member.

Whenever members are counted, all that joined from one address have one vote together (`WorkerTable.votes`). So fewer
hostile addresses than half of all outvote nobody, however many members they add. Of two the first one counts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from isles.membership.data_ledger import DataLedger
from isles.membership.effects import Coordinator, MemberLimits, Worker, WorkerTable
from isles.membership.messages import Beat, PeerReport, View, from_plain
from isles.membership.round_commit import Ballot, Delivered, Done, Graces, RoundDecision

_ROUNDS, _OTHERS = 3, 2
_PAIRS = 1 << 16  # the most pairs to remember
Pair = frozenset[int]


class BanScores:
    """Rounds of refusals, by the pair of members concerned; not journalled, so a restarted lighthouse counts anew.
    votes: counts those of some members.
    """

    def __init__(self, votes: Callable[[Collection[int]], int] = len) -> None:
        self._rounds: dict[Pair, set[int]] = {}
        self._votes = votes

    def refused(self, one: int, another: int, round: int) -> None:
        """One of the two has refused the other's share of `round`."""
        rounds = self._rounds.setdefault(frozenset((one, another)), set())
        if len(rounds) < _ROUNDS:
            rounds.add(round)
        if len(self._rounds) > _PAIRS:
            del self._rounds[next(iter(self._rounds))]

    def are_enough(self, member: int, members: Collection[int]) -> bool:
        """Whether `member` is to be banned. members: all who have trained and are connected."""
        pairs = {other: self._rounds.get(frozenset((member, other))) for other in members if other != member}
        rounds = {other: rounds for other, rounds in pairs.items() if rounds}
        enough = max(_OTHERS, self._votes(members) / 2)
        return self._votes(rounds) >= enough and len(set().union(*rounds.values())) >= _ROUNDS

    def worst(self, members: Iterable[int], more: Collection[Pair] = ()) -> int:
        """The member in most disagreements; of equals the first. more: pairs in addition to those of refusals."""
        pairs = self._rounds.keys() | more
        return max(members, key=lambda one: self._votes(set().union(*(pair for pair in pairs if one in pair)) - {one}))


_RETAINED = 64  # landed rounds to remember, for members that were asleep


class Ballots:
    """The ballots of all rounds.

    `apply` is called with journalled decisions, so these survive a restart. Answers and reports do not; members repeat
    them. votes: counts those of some members. quorum: see `Ballot`.
    """

    def __init__(self, votes: Callable[[Collection[int]], int] = len, quorum: float = 0.0) -> None:
        self._votes, self._quorum = votes, quorum
        self._open: dict[int, Ballot] = {}
        self._landed: dict[int, Ballot] = {}
        self._reports: dict[tuple[int, int, int], dict[int, PeerReport]] = {}  # (round, attempt, accused): by sender
        self._out: dict[int, int] = {}  # by member: the newest view when others landed without it
        self._view = -1
        self.graces, self.ban_scores = Graces(), BanScores(votes)

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
        most is left out in its place; and if there are only two votes, the member that joined later.
        """
        ballot = self._of(peer_report.round, members)
        reported = peer_report.member
        if ballot is None or peer_report.attempt != len(ballot.attempts) - 1 or reported not in ballot.attempts[-1]:
            return
        reports = self._reports.setdefault((peer_report.round, peer_report.attempt, reported), {})
        reports[member] = peer_report
        others = [s for s in ballot.attempts[-1] if s in living and s != reported and s not in ballot.out]
        others = [s for s in others if self._votes((s, reported)) == 2]  # not those behind its own address
        counted = {s: reports[s] for s in others if s in reports}
        if not peer_report.attempt and any((0, reported) == rounds[:2] for rounds in ballot.done):
            counted = {s: one for s, one in counted.items() if one.charge == "refused"}
        if 2 * self._votes(counted) > self._votes(others) and member in others:
            witnesses = [one.by for one in counted.values() if one.by in others]
            both = self._votes({reported, *others}) == 2 and peer_report.charge == "refused"
            worst = max(reported, *counted) if both else self.ban_scores.worst((reported, *witnesses, *counted))
            ballot = ballot.without(worst)
        self._open[peer_report.round] = ballot

    def _worst(self, round: int) -> Callable[[Sequence[int]], int] | None:
        """Picks the member with most reports of `round` and refusals of any; None if nobody was reported."""
        reports = {key[2]: who for key, who in self._reports.items() if key[0] == round}
        pairs = {frozenset((reported, member)) for reported, who in reports.items() for member in who}
        return partial(self.ban_scores.worst, more=pairs) if pairs else None

    def due(self, now: float, living: Mapping[int, float], begun: int) -> Iterator[RoundDecision]:
        """Decisions that are due now. Each must be recorded, which calls `apply`, before the next is taken.

        living: by member, the first round that waits for it. begun: the newest round to decide; a view may still begin
        with a later one.
        """
        here = {round: {member for member, entered in living.items() if entered <= round} for round in self._open}
        for round, ballot in self._open.items():
            if ballot.has_quorum(here[round]):
                self.graces.enough(now, round)
        for round in self.graces.over(now) & self._open.keys():
            self._open[round] = replace(self._open[round], is_closing=True)
        for round in sorted(round for round in self._open if round <= begun):
            decision = self._open[round].decide(here[round], self._worst(round), self._votes)
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
        for round, later in self._open.items():
            if len(later.attempts) == 1:  # opened by a member that claims a later round
                here = tuple(member for member in later.attempts[0] if member not in left)
                self._open[round] = replace(later, attempts=(here,))
        return left

    def has_landed(self, round: int) -> bool:
        """Whether the round has landed, and is still remembered."""
        return round in self._landed

    def decision(self, round: int, member: int | None = None) -> RoundDecision | None:
        """The decision on `round` for `member`; None: for any asker."""
        ballot = self._landed.get(round) or self._open.get(round)
        return None if ballot is None else ballot.decision(member)

    def opened(self, view: View, members: tuple[int, ...]) -> None:
        """A new view begins: its members have the others' state. members: of the first attempt of its rounds."""
        self._view = view.number
        for round, ballot in self._open.items():
            if round >= view.since and len(ballot.attempts) == 1:  # opened by a member that claims a later round
                self._open[round] = replace(ballot, attempts=(members,))

    def left_out(self, view: View) -> Collection[int]:
        """Members of `view` that missed a landing, and so take no part in its rounds."""
        return {member for member, number in self._out.items() if number >= view.number}

    def _of(self, round: int, members: tuple[int, ...]) -> Ballot | None:
        """The open ballot of a round, or a new one; None if it has landed."""
        if round in self._landed or (round not in self._open and not members):
            return None
        return self._open.get(round) or Ballot(round, (members,), quorum=self._quorum)


_APART = 4  # a worker that is more rounds behind half of the members loads another state; one ahead is not believed


class CoordinatorState(Coordinator):
    """workers: by member. ledger: of the data that was read. ballots: on rounds that all members land together.
    newest_round: the newest begun one, as far as it is believed: a single member may report a false round. issued: the
    number of the newest view or proposal. is_in_step: whether no member can be more than a round ahead of the others.
    quorum: see `Rules`. limits, entries, until: as in `Coordinator`.
    """

    kind = Worker
    is_in_step, quorum = False, 0.0

    def __init__(self, limits: MemberLimits, entries: Iterable[dict[str, Any]], until: float) -> None:
        self.workers = WorkerTable()
        self.ledger = DataLedger()
        self.ballots = Ballots(self.workers.votes, self.quorum)
        self.newest_round = self._furthest = 0
        self.issued = -1
        super().__init__(self.workers, limits, entries, until)

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

    def alive(self) -> Sequence[int]:
        return self.members()

    def _change(self, entry: dict[str, Any]) -> bool:
        match entry:
            case {"event": "beat", "member": member, "beat": beat}:
                self._apply_beat(self.workers[member], from_plain(beat))
            case {"event": "lost", "member": member}:
                self._apply_gone(self.workers[member])
            case {"event": "back", "member": member}:
                self._apply_back(self.workers[member])
            case {"event": "leave", "member": member}:
                worker = self.workers[member]
                worker.state = "leaving" if worker.state == "in" and worker.connected else "left"
            case {"event": "call" | "ban", "member": member}:
                self._call_again(self.workers[member], entry.get("why", ""))
                if entry["event"] == "ban":
                    self.workers[member].state = "banned"
            case {"event": "issue", "number": number}:
                self.issued = number
            case {"event": "view", "view": view}:
                self._apply_view(from_plain(view))
            case {"event": "decision", "decision": decision}:
                self._apply_decision(from_plain(decision))
            case _:
                return False
        return True

    def _apply_beat(self, worker: Worker, beat: Beat) -> None:
        if beat.ready == worker.call:  # else it is of a state that the worker is to replace
            worker.round = max(worker.round, beat.round)
        # what it had seen with its former state is lost; with a quorum, its donor's work may be in no mean yet
        seen = dict(beat.seen) if beat.ready == worker.call and not self.quorum else {}
        self.ledger.begun(worker.member, beat.round, beat.skipped, seen)
        if worker.state == "outside" and beat.ready == worker.call:
            worker.state = "ready"
            self.workers.changed()
        if worker.state in ("in", "leaving") and worker.round > self.newest_round:
            self._furthest = max(self._furthest, worker.round)
            # all land a round of one mean together, so nobody is further than the next one
            self.newest_round = max(self.newest_round, self._reached(1 if self.is_in_step else _APART))
        at = max(worker.round, worker.entered - 1)  # a joiner is not behind before its first round
        if worker.state == "in" and self._furthest - at > _APART:
            self._apply_apart(worker, at)

    def _apply_apart(self, worker: Worker, at: int) -> None:
        """Others are far ahead of `worker`: it loads another state, or if they are as many without the first member,
        they do.
        """
        members = self.members()
        ahead = [member for member in members if self.workers[member].round - at > _APART]
        behind = f"half of the members are more than {_APART} rounds apart from it"
        if self.workers.outvote(ahead, members):
            self._call_again(worker, behind)
        elif 2 * self.workers.votes(ahead) == self.workers.votes(members):
            for member in ahead:
                self._call_again(self.workers[member], behind)

    def _reached(self, ahead: int = 0) -> int:
        """The newest round of a member that is not more than `ahead` rounds beyond the newest one that at least half of
        the votes have reached (of two halves, that of the first member). Joiners are as far as the others.
        """
        rounds, votes = [0], dict[str | int, int]()
        for member in self.members():
            worker, voter = self.workers[member], self.workers.voter(member)
            at = worker.round if worker.round >= worker.entered else min(worker.entered - 1, self.newest_round)
            rounds.append(at)
            votes[voter] = max(votes.get(voter, 0), at)
        if not votes:
            return 0
        (first, *_), ranked, half = votes.values(), sorted(votes.values(), reverse=True), len(votes) // 2
        reached = ranked[half] if len(ranked) % 2 else max(ranked[half], min(ranked[half - 1], first))
        return max(round for round in rounds if round <= reached + ahead)

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
                self._call_again(self.workers[member], f"view {view.number} began without it")
        for member in view.members:
            self.workers[member].enter(view.since)
        self.ballots.opened(view, self.voters(view.since))
        if not begins:  # only joiners, which wait until a member has begun this round
            self.newest_round = max(self.newest_round, view.since)

    def _apply_decision(self, decision: RoundDecision) -> None:
        for member in self.ballots.apply(decision, self.voters(decision.round)):
            if self.workers[member].state == "in":
                self._call_again(self.workers[member], f"round {decision.round} landed without its share")
        if decision.outcome == "land":
            self.ledger.landed(decision.round, decision.members)

    def _call_all_but(self, members: Collection[int]) -> None:
        """`members` are the first to have the run's state again: others must load theirs, not what was named before."""
        for worker in self.workers.waiting(members):
            self._call_again(worker, "")

    def _call_again(self, worker: Worker, why: str) -> None:
        """The worker must load another state: its own differs from the others', or no view waits for it. One that is
        leaving leaves at once.
        """
        worker.why = why
        self.ledger.forgo(worker.member)
        worker.state, worker.call = "left" if worker.state == "leaving" else "outside", worker.call + 1
        worker.round = min(worker.round, self.newest_round)  # before its next view, also if it said a later one
        worker.load, worker.tried = None, set()
        self.workers.changed()
