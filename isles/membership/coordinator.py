"""Which members take part in which round: a pure state machine, driven by the lighthouse or the virtual clock.

Every method is a call in; it returns the effects to carry out, in order. There is no clock and no socket. An `Append`
must be on disk before any later effect leaves the machine: it records all that must survive a restart of the lighthouse
(`coordinator_state`). `RoundsCoordinator(rules, entries)` continues from a journal and waits for its workers.

A change (a member is ready, lost or leaving) becomes a proposal for the newest round + `MARGIN`. Every connected member
of the present view promises it, or answers that it has begun that round; once all have promised, the view is recorded
and sent. Training never waits for it. If a member has begun that round, a later one is proposed. A minority cannot
prevent a view: after `_TRIES` such proposals, or if it does not answer within `_UNANSWERED`, the view begins without
it, and it loads another state.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from statistics import median
from typing import Any

from isles.membership.coordinator_state import CoordinatorState
from isles.membership.data_ledger import count_steps, fresh_before, last_round
from isles.membership.effects import Effect, Notify, Reply, Rules, Worker
from isles.membership.messages import (
    MARGIN,
    Ack,
    Beat,
    BeatReply,
    Leave,
    Load,
    MemberStatus,
    Message,
    Over,
    PeerReport,
    Proposal,
    Refusal,
    Reload,
    RunStatus,
    SampleRange,
    View,
    plain,
)
from isles.membership.round_commit import NOTHING, Delivered, Done

_TIMES, _LEAST = 10, 60.0  # a stall is so many times a member's usual round, and so many seconds at least
_MOST = 10  # a member's own pace counts up to so many times the usual one
_LOOK = 1.0  # the longest interval between looks that counts, seconds
_FAR, _LONGEST = 1 << 40, 1e6  # the last round of a run without an end; seconds of a step, or of a round


class Stalls:
    """Finds members that make no progress. For a lighthouse that looks several times a second.

    now: seconds in which the lighthouse was running.
    """

    def __init__(self) -> None:
        self._looked_at, self.now = -math.inf, 0.0
        self._behind: dict[int, tuple[int, float]] = {}  # by member: its round, and since when others are further

    def look(
        self,
        at: float,
        rules: Rules,
        members: Sequence[Worker],
        first: int,
        last: int | None,
        over: Collection[int],
        newest: int = _FAR,
    ) -> dict[int, float]:
        """Look now. Returns by stalled member for how many seconds it has made no progress.

        at: seconds of any clock. first: the member of the view that validates. over: members that have done the last
        round. newest: the newest round as far as it is believed.
        """
        self.now += min(at - self._looked_at, _LOOK)
        self._looked_at, now = at, self.now
        rounds = {one.member: max(one.round, one.entered - 1) + (one.member in over) for one in members}
        # Not what those have entered who come later: a round may wait for one who has not come yet.
        newest = min(max((one.round + (one.member in over) for one in members), default=0), newest + 1)
        since = {member: self._behind.get(member, (-1, now)) for member, round in rounds.items() if round < newest}
        self._behind = {
            member: was if was[0] == rounds[member] else (rounds[member], now) for member, was in since.items()
        }
        usual = median([one.seconds for one in members if one.seconds] or [math.inf])
        stalled = {}
        for one in (one for one in members if one.member in self._behind):
            still = now - self._behind[one.member][1]
            round_seconds = rules.sync_every * min(one.seconds or usual, _MOST * usual)
            is_busy = one.member == first or rounds[one.member] == last or one.round <= one.entered
            if still > max(_TIMES * round_seconds, _LEAST) + (rules.evaluates if is_busy else rules.waits):
                stalled[one.member] = still
        return stalled


_TRIES, _UNANSWERED = 3, 15.0  # proposals that a minority may refuse one after the other; seconds for an answer
_UNASSIGNED = 1024  # a member's rounds on unassigned data until another view gives them to others
_ALIKE = 0.8  # above this share of the usual pace a worker takes all inner steps


class RoundsCoordinator(CoordinatorState):
    """rules: of the run. entries: of its journal so far. until: after a restart, when `tick` takes members that have
    not reconnected for lost.
    """

    def __init__(self, rules: Rules, entries: Iterable[dict[str, Any]] = (), *, until: float = 0.0) -> None:
        self.rules, self.quorum = rules, rules.quorum
        self.is_in_step = rules.agrees and not rules.quorum
        self.proposal: Proposal | None = None
        self._acks, self._refusals = set[int](), set[int]()
        self._tries, self._proposed_at = 0, 0.0
        self._stalls = Stalls()
        super().__init__(rules, entries, until)

    @property
    def last(self) -> int | None:
        """The run's last round, as far as it is known; None for a run without an end, and before the first view."""
        view, batches = self.view, self.rules.batches
        return self.rules.last if view is None or batches is None else last_round(view, batches)

    def backlog(self) -> list[SampleRange]:
        """Data that nobody would have read for good if the run ended with the newest begun round."""
        return self.ledger.outstanding(self.newest_round + 1, self.members())

    def read(self, until: int) -> int:
        """Inner steps of the rounds before `until` that were read for good, without what is in the backlog now."""
        view = self.ledger.view_of(until)
        if view is None:
            return 0
        return view.start + fresh_before(view, until) - count_steps(self.ledger.outstanding(until, self.members()))

    # Calls

    def beat(self, now: float, member: int, beat: Beat) -> list[Effect]:
        """Handle a heartbeat."""
        refusal = self._hear(now, member, beat)
        if refusal is None:
            self._step(now)  # before the reply, so that it reports what the beat changes
            self._reply(self._answer(member, beat))
        return refusal or self._effects(now)

    def ack(self, now: float, member: int, ack: Ack) -> list[Effect]:
        """Handle an answer to a proposal."""
        refusal = self._hear(now, member, ack.beat)
        if refusal is None and self.proposal is not None and ack.number == self.proposal.number:
            (self._acks if ack.promised else self._refusals).add(member)
        return refusal or self._effects(now)

    def leave(self, now: float, member: int) -> list[Effect]:
        """A worker leaves at the next view, and trains until then. If all leave, they may end at once; so may a worker
        whose connection counts as broken.
        """
        if member in self.workers and self.workers[member].state in ("outside", "ready", "in"):
            self._record("leave", member=member)
            leaving = self.workers.members("leaving")
            if leaving == self.members():  # no member remains for another view
                for each in leaving:
                    self._tell(each, Over())
        return self._effects(now)

    def reload(self, now: float, member: int) -> list[Effect]:
        """The state that a worker was to load did not arrive, or differs from the others': name another donor."""
        worker = self.workers.get(member)
        if worker is not None and worker.load is not None:
            worker.tried.add(worker.load.donor)
            worker.load = None
        elif worker is not None:
            self._stray(member, "its state did not arrive, or differs from the others'")
        return self._effects(now)

    def done(self, now: float, member: int, done: Done) -> list[Effect]:
        """A member reports its answer of an attempt of an all-reduce round."""
        if self.rules.agrees and self._here(member):
            self.ballots.done(member, done, self.voters(done.round))
            if done.digest == NOTHING and self.ballots.has_landed(done.round):
                self._stray(member, f"round {done.round} landed with an answer that it lacks")
        # First the effects, which may decide this round; the reply comes after their journal entries.
        effects = self._effects(now)
        decision = self.ballots.decision(done.round, member)
        return effects if decision is None else [*effects, Reply(decision)]

    def deliver(self, now: float, member: int, delivered: Delivered) -> list[Effect]:
        """A member has its share of a round with a quorum, and trains on."""
        if self.rules.quorum and self._here(member):
            quorum = (
                1.0 if delivered.round == self.last else self.rules.quorum
            )  # there is no later mean for a late share
            self.ballots.delivered(now, member, delivered, self.voters(delivered.round), quorum)
        effects = self._effects(now)
        decision = self.ballots.decision(delivered.round)
        return effects if decision is None else [*effects, Reply(decision)]

    def report_peer(self, now: float, member: int, peer_report: PeerReport) -> list[Effect]:
        """A member reports that another's share of an attempt was late or refused. Both must be in that round's view;
        the sender must have trained with its present state, otherwise it cannot judge others.
        """
        round, members, worker = peer_report.round, self.members(), self.workers.get(member)
        voters, both = self.voters(round), {member, peer_report.member}
        if worker is None or len(both) < 2 or not both <= {*voters} & {*members} or not worker.knows(round):
            return self._effects(now)
        if peer_report.charge == "refused" and peer_report.by < 0 and round <= self._reached():
            self.ballots.ban_scores.refused(member, peer_report.member, round)
        if self.rules.agrees:
            self.ballots.reported(member, peer_report, voters, members)
        everybody = [worker.member for worker in self.workers.here if worker.round]
        for one in (peer_report.member, member):
            if self.ballots.ban_scores.are_enough(one, everybody):
                rule = "in three rounds or more it and at least half of the other addresses refused each other's shares"
                why = f"shut out: {rule} (worker {member} says: {peer_report.reason[:200]})"
                self._record("ban", member=one, why=why)
                self._tell(one, Refusal(why))
        return self._effects(now)

    def tick(self, now: float) -> list[Effect]:
        """See `Coordinator`. Stalled members are left out; once they go on they load another state."""
        self._count_absent(now)
        members, first = [self.workers[member] for member in self.members()], self.view.members[0] if self.view else -1
        newest = self.newest_round
        for member, seconds in self._stalls.look(
            now, self.rules, members, first, self.last, self.finished, newest
        ).items():
            self._stray(member, f"no new round for {seconds:.0f} s", still=round(seconds))
        return self._effects(now)

    def hear(self, now: float, member: int, message: Any) -> list[Effect] | None:
        unfit(self, message)
        match message:
            case Leave():
                return self.leave(now, member)
            case Reload():
                return self.reload(now, member)
        calls: dict[type, Callable[..., list[Effect]]] = {
            Beat: self.beat, Ack: self.ack, Done: self.done, Delivered: self.deliver, PeerReport: self.report_peer
        }  # fmt: skip
        return calls[type(message)](now, member, message) if type(message) in calls else None

    def about(self) -> tuple[int, int, int]:
        return len(self.members()), self.newest_round, self.rules.last or 0

    def now(self, now: float, refused: Sequence[tuple[int, int, str, int]]) -> RunStatus:
        here = self.workers.here
        rows = tuple(MemberStatus(one.member, one.identity, one.state, one.round, one.seconds) for one in here)
        round = f"round {self.newest_round}" + (f" of {self.last}" if self.last else "")
        text = "waiting for the first view" if self.view is None else f"{round}; view {self.view.number}"
        return RunStatus(text, "round", self.newest_round, rows, tuple(refused))

    # Consequences

    def _hear(self, now: float, member: int, beat: Beat) -> list[Effect] | None:
        """Record what a beat reports; a refusal if the worker does not belong to the run."""
        worker = self.workers.get(member)
        if worker is None or worker.state in ("left", "banned"):
            why = f" ({worker.why})" if worker is not None and worker.why else ""
            return [Reply(Refusal(f"member {member} is no longer in this run{why}: join again"))]
        worker.seconds = beat.seconds or worker.seconds
        becomes_ready = worker.state == "outside" and beat.ready == worker.call
        if becomes_ready or beat.round > worker.round or beat.skipped or beat.seen:
            self._record("beat", member=member, beat=plain(beat))
        if self.ledger.unassigned(member) > _UNASSIGNED:
            self._stray(member, f"more than {_UNASSIGNED} rounds on unassigned data")
        return None  # a beat is no sign of a connection: it may have been on its way when the connection broke

    def _stray(self, member: int, why: str, **more: int) -> None:
        """A member's state differs from the others': it loads another one, or is lost if it was leaving."""
        event = {"in": "call", "leaving": "lost"}.get(self.workers[member].state)
        if event is not None:
            self._record(event, member=member, why=why, **more)

    def _step(self, now: float) -> None:
        # Not before it is known who survived a restart.
        if self._awaited:
            return
        self._propose()
        if self.ballots.are_open and self.view is not None:
            begun = self.newest_round if self.rules.quorum else self._reached()
            if self.proposal is not None:  # its view names the members of the rounds from there on
                begun = min(begun, self.proposal.since - 1)
            living = {member: self._awaited_from(member) for member in self.members()}
            for decision in self.ballots.due(now, living, begun):
                self._record("decision", decision=plain(decision))
                for member in decision.members:
                    self._tell(member, decision)
            left_out = self.ballots.left_out(self.view)
            for member in self.workers.members("leaving"):
                if member in left_out:
                    self._stray(member, "a round landed without its share")
        self._assign()

    def _propose(self) -> None:
        for member in {*self.proposal.lost} & {*self.workers.members("in")} if self.proposal is not None else ():
            self._stray(member, "the next view was proposed without it")  # those who promised accept no work of it
        wanted = self.workers.members("in", "ready")
        view = self.view
        if view is None:
            if len(wanted) >= self.rules.founders:
                self._record("issue", number=0)
                self._commit(Proposal(0, -1, 1, wanted))
            return
        if self.proposal is not None and not set(self.proposal.members) <= set(wanted):
            self.proposal = None  # a proposed member is no longer available
        newcomers = bool(self.workers.members("ready"))
        since = self._since()
        if self.proposal is None and since is not None and wanted and (newcomers or wanted != view.members):
            lost = tuple(s for s in view.members if s not in wanted and self.workers[s].state != "leaving")
            # Recorded before it is sent: a restarted lighthouse must not use the number for another proposal.
            self._record("issue", number=self.issued + 1)
            self.proposal, self._proposed_at = Proposal(self.issued, view.number, since, wanted, lost), self._stalls.now
            self._acks, self._refusals = set(), set()
            for member in self._voters_of_view():
                self._tell(member, self.proposal)
        if self.proposal is not None:
            self._count_answers(self.proposal)

    def _count_answers(self, proposal: Proposal) -> None:
        """Commit the proposal if enough have promised it, or propose a later round if a member has begun this one."""
        voters = self._voters_of_view()
        missing = [member for member in voters if member not in self._acks]
        refused = [member for member in missing if member in self._refusals]
        has_begun = any(proposal.since <= self.workers[one].round + 1 <= self.newest_round + 1 for one in refused)
        if self.workers.outvote(refused, voters) or (has_begun and self._tries < _TRIES):
            self.proposal, self._tries = None, self._tries + 1
        elif not missing:
            self._tries = 0
            self._commit(proposal)
        elif self.workers.outvote(missing, voters) or (
            refused != missing and self._stalls.now - self._proposed_at <= _UNANSWERED
        ):
            return
        for member in missing if self.proposal is proposal else ():
            self._stray(member, "it did not promise the next view")
        self._propose()  # without those, or for whoever became ready meanwhile

    def _since(self) -> int | None:
        """The first round of a view that is proposed now; None if the run ends before it. If no member is left that
        could end the run, joiners get a view after the last round, only to hand in their models.
        """
        since, last = self.newest_round + MARGIN, self.last
        if last is None or since <= last:
            return since
        return None if self._voters_of_view() else last + 1

    def _commit(self, proposal: Proposal) -> None:
        going_on = self.members()
        start, backlog = self.ledger.next(proposal.since, going_on)
        steps = steps_by_pace([self.workers[member].seconds for member in proposal.members], self.rules.sync_every)
        known_by = tuple(self.workers[member].identity for member in proposal.members)
        identities = known_by if any(known_by) else ()
        view = View(proposal.number, proposal.since, proposal.members, steps, start, backlog, identities)
        self.proposal = None
        # Before the record, which changes who the voters are; the record is before the view leaves.
        audience = {*self._voters_of_view(), *proposal.members}
        self._record("view", view=plain(view))
        for member in sorted(audience):
            self._tell(member, view)

    def _assign(self) -> None:
        """Name a donor for every worker that must load a state."""
        donors = self.workers.members("in")
        waiting = [self.workers[member] for member in self.workers.members("outside")]
        for worker in waiting:
            load = worker.load
            if load is not None and (load.donor in donors or (load.donor < 0 and not donors)):
                continue
            loads = [w.load.donor for w in waiting if w.load is not None]
            donor = min(donors, key=lambda member: (member in worker.tried, loads.count(member), member), default=-1)
            pace = self.workers[donor].seconds if donor >= 0 else 0.0
            worker.load = Load(worker.call, donor, round(pace * self.rules.sync_every, 3), worker.why)
            self._tell(worker.member, worker.load)

    def _answer(self, member: int, beat: Beat) -> BeatReply:
        worker = self.workers[member]
        views = tuple(view for number, view in sorted(self.ledger.views.items()) if number > beat.known)
        newest = -1 if self.view is None else self.view.number
        proposal = self.proposal if worker.state in ("in", "leaving") else None
        if worker.state == "outside" and worker.load is not None:
            self._tell(member, worker.load)
        return BeatReply(beat.round, self.issued, newest, self.newest_round, views, proposal, worker.call)

    def _awaited_from(self, member: int) -> float:
        """The first round that waits for `member`. With a quorum, no round does before the member has begun one."""
        worker = self.workers[member]
        return worker.entered if not self.rules.quorum or worker.round >= worker.entered else float("inf")

    def _voters_of_view(self) -> list[int]:
        view = self.view
        here = set(self.members())
        return [] if view is None else [member for member in view.members if member in here]

    def _here(self, member: int) -> bool:
        return member in self.workers and self.workers[member].here

    def _tell(self, member: int, message: Message) -> None:
        self._out.append(Notify(member, message))


def steps_by_pace(seconds: Sequence[float], most: int) -> tuple[int, ...]:
    """Inner steps per round of each worker: `most` for workers about as fast as the median or faster.

    seconds: of one inner step of each worker, 0 if unknown. No worker gets less than an eighth of `most`.
    """
    known = [one for one in seconds if one > 0]
    usual = median(known) if known else 0.0
    paces = (usual / one if one > 0 else 1.0 for one in seconds)
    return tuple(most if pace > _ALIKE else max(int(most * pace), -(-most // 8)) for pace in paces)


def unfit(membership: RoundsCoordinator, message: Any) -> None:
    """ValueError for a message with impossible rounds, members, steps or seconds: they would be journalled, or others
    would act on them.
    """
    last, claim = membership.rules.last or _FAR, getattr(message, "beat", message)
    seconds = claim.seconds if isinstance(claim, Beat | Delivered) else 0.0
    steps = claim.steps if isinstance(claim, Delivered) else 1
    if not 0 <= seconds <= _LONGEST or not 0 < steps <= last * membership.rules.sync_every:
        raise ValueError("impossible seconds of a step, or an impossible number of steps")
    match claim:
        case Beat(round=round, skipped=skipped, seen=seen):
            if not all(0 <= one <= last for one in (round, *skipped, *(newest for _, newest in seen))):
                raise ValueError("a round that this run does not have")
            if max(skipped, default=0) > round:
                raise ValueError("a skipped round that it has not begun")
            if not all(member in membership.workers for member, _ in seen):
                raise ValueError("the work of an unknown member")
        case Done() | PeerReport() | Delivered():
            attempt, whose = getattr(claim, "attempt", 0), getattr(claim, "member", None)
            if not 0 < claim.round <= membership.newest_round + MARGIN or not 0 <= attempt < 1 << 20:
                raise ValueError("an answer for a round that no member is in")
            if whose is not None and whose not in membership.workers:
                raise ValueError("the share of an unknown member")
