"""A worker's counterpart of `coordinator`: what it knows of views, rounds and members. Calls in, messages out; no
clock.

    start_round(round)  at its first inner step: which data slice is this worker's to read
    group(round)        at its exchange: who takes part
    beat()              to the lighthouse at every start, and each second; one at a time, so replies come in order

Two rules keep all workers consistent. Groups: a member that has promised not to begin round s undecided, and reaches s
before the decision, exchanges with nobody. Data: a worker reads its own slices only in rounds with which no later view
can begin (`BeatReply.newest_round`), and at most one round beyond the newest that the lighthouse has answered;
unassigned samples beyond. So no two workers read the same slice, however long one of them was cut off or suspended; and
when a worker is lost, the lighthouse does not know of at most one slice that it has read.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from isles.membership.messages import MARGIN, Ack, Beat, BeatReply, Load, Proposal, View
from isles.membership.round_commit import RoundDecision

_RETAINED = 8  # rounds whose answers are cached; exchanges begin at most a few rounds late


@dataclass(frozen=True)
class RoundMembers:
    """The members of a round's exchange. members: the group, this worker included; view: its number, -1 for none.

    decided: False if this worker has promised not to begin the round before a proposal is decided.
    """

    view: int
    members: tuple[int, ...]
    decided: bool = True


class MemberState:
    """The state of one worker. member: its id."""

    def __init__(self, member: int) -> None:
        self.member = member
        self.views: dict[int, View] = {}
        self.round = 0
        self.seconds = 0.0  # of an inner step, 0 if unknown
        # How often it was asked to load another state; the newest of these requests whose state it has loaded.
        self.call, self.ready = 0, -1
        self._known = -1  # the newest view up to which no view is missing
        self._entered = -1  # views up to this number are of the time before the present state was loaded
        self._issued = -1
        self._answered = 0  # the newest round of a beat with a reply
        self._newest_round = 0  # of any member, as of the last reply
        self._asked = 0  # the newest round whose group is final
        self._promises: dict[int, Proposal] = {}
        self._excluded: dict[
            int, int
        ] = {}  # by member excluded against its wish: the first round of the view without it
        self.left_out: dict[int, int] = {}  # by member: the newest view when the others landed a round without it
        self._broken: frozenset[int] = frozenset()
        self._groups: dict[int, RoundMembers] = {}
        self._slice_views: dict[int, View | None] = {}  # by round: the view whose data slice it reads
        self._skipped: set[int] = set()
        self._seen: dict[int, int] = {}

    # Rounds

    def start_round(self, round: int) -> View | None:
        """Begin `round`. Returns the view whose data slice this worker reads; None: it reads unassigned data.

        The first answer for a round is final.
        """
        if round not in self._slice_views:
            since = self._since()
            if not self._slice_views and since is not None:  # rounds that the others did without it
                self._skipped.update(range(since, round))
            view = self._own(round) if self._decided(round) and self._may_read(round) else None
            self._slice_views = {**{r: v for r, v in self._slice_views.items() if r > round - _RETAINED}, round: view}
            if view is None:
                self._skipped.add(round)
            self.round = max(self.round, round)
        return self._slice_views[round]

    def skip(self, round: int) -> None:
        """Do no step of `round`: earlier work counts in its mean."""
        self._slice_views[round] = None
        self._skipped.add(round)
        self.round = max(self.round, round)

    def group(self, round: int) -> RoundMembers:
        """The members of the exchange of `round`; final once decided."""
        if round in self._groups:
            return self._groups[round]
        if not self._decided(round):
            return RoundMembers(-1, (self.member,), decided=False)
        view = self._own(round)
        round_members = RoundMembers(-1, (self.member,))
        if view is not None:
            round_members = RoundMembers(view.number, self._taking_part(view))
        self._groups = {**{r: s for r, s in self._groups.items() if r > round - _RETAINED}, round: round_members}
        self._asked = max(self._asked, round)  # a view that begins with this round would be too late now
        return round_members

    def accept(self, round: int, members: Collection[int]) -> bool:
        """Whether the answer of a complete exchange among `members` may be used. If so, their work counts as seen."""
        if any(self.lost(member) for member in members):
            return False
        for member in members:
            if member != self.member:
                self._seen[member] = max(self._seen.get(member, 0), round)
        return True

    def landed(self, decision: RoundDecision) -> None:
        """Note a round of an all-reduce method that this worker has landed, also when catching up."""
        view = self.view_of(decision.round)
        if view is not None:
            self.left_out |= dict.fromkeys(set(self._taking_part(view)) - set(decision.members), decision.view)

    def until(self) -> int | None:
        """The first round of a view, newer than this worker's own, that excludes it."""
        newest = max((view.number for view in self.views.values() if self.member in view.members), default=-1)
        return min((view.since for view in self.views.values() if view.number > newest), default=None)

    def earliest(self) -> int:
        """The earliest first round of a view that is not proposed yet."""
        return max(self.round, self._newest_round) + MARGIN

    def lost(self, member: int) -> bool:
        """Whether work of `member` is rejected: its connection broke, or the next view excludes it."""
        return member in self._broken or member in self.abandoned()

    def abandoned(self) -> frozenset[int]:
        """Members excluded against their wish by a proposed view, or by one that begins after this round."""
        promised = {member for promise in self._promises.values() for member in promise.lost}
        return frozenset(promised | {member for member, since in self._excluded.items() if since > self.round})

    def connection(self, member: int, *, broken: bool) -> None:
        """The transport reports that a connection broke or opened."""
        self._broken = self._broken | {member} if broken else self._broken - {member}

    def loaded(self, load: Load, round: int, left_out: Mapping[int, int] | None = None) -> None:
        """This worker has loaded the state that its donor had after `round`; it has nothing of its own any more.

        left_out: the donor's, at that moment.
        """
        self.left_out = dict(left_out or {})
        self.round = self._answered = self._asked = 0  # earlier rounds on unassigned data are not reported
        self.call, self.ready = max(self.call, load.call), load.call
        self._entered = self._issued
        self._slice_views, self._groups, self._skipped = {}, {}, set()
        self._seen, self._excluded = {load.donor: round} if load.donor >= 0 else {}, {}

    def first(self, ahead: int = 0) -> int | None:
        """The first round of a worker that has begun none with its present state, once other members are in a view with
        it, or `ahead` rounds earlier: the round that they are in. None: not yet.
        """
        since = None if self._slice_views else self._since()
        return None if since is None or since > self._newest_round + ahead else max(since, self._newest_round - 1)

    def is_known(self, round: int) -> bool:
        """Whether the lighthouse's replies go far enough for this worker to read its own data slice of `round`."""
        return not self._slice_views or round <= self._answered + 1

    def view_of(self, round: int) -> View | None:
        """The newest view known that covers `round`."""
        return max((v for v in self.views.values() if v.since <= round), key=lambda v: v.number, default=None)

    # Messages

    def beat(self) -> Beat:
        """The beat to send now."""
        seen = tuple(sorted(self._seen.items()))
        return Beat(self.round, self.ready, self._known, tuple(sorted(self._skipped)), seen, self.seconds)

    def answered(self, beat: Beat, answer: BeatReply) -> Ack | None:
        """Apply the reply to `beat`; returns the answer to the proposal in it, if there is one."""
        for view in answer.views:
            self._take(view)
        self._known = max(self._known, answer.newest)
        self._issued = max(self._issued, answer.issued)
        self.call = max(self.call, answer.call)
        pending = -1 if answer.proposal is None else answer.proposal.number
        self._drop(lambda number: number <= answer.issued and number != pending)
        self._skipped -= set(beat.skipped)
        self._seen = {member: round for member, round in self._seen.items() if (member, round) not in beat.seen}
        self._answered = max(self._answered, beat.round)
        self._newest_round = max(self._newest_round, answer.newest_round)
        return None if answer.proposal is None else self._promise(answer.proposal)

    def proposed(self, proposal: Proposal) -> Ack | None:
        """Answer a pushed proposal; None if a reply has already shown a later one."""
        if proposal.number <= self._issued and proposal.number not in self._promises:
            return None
        self._issued = max(self._issued, proposal.number)
        return self._promise(proposal)

    def _promise(self, proposal: Proposal) -> Ack:
        if proposal.number not in self._promises:
            if proposal.since <= max(self.round, self._asked):
                return Ack(proposal.number, False, self.beat())
            self._promises[proposal.number] = proposal
            self._drop(lambda number: proposal.base < number < proposal.number)
        return Ack(proposal.number, True, self.beat())

    def receive_view(self, view: View) -> None:
        """Apply a pushed view if no earlier one is missing; otherwise the next reply brings all."""
        promise = self._promises.get(view.number)
        if promise is not None and promise.base <= self._known:
            self._take(view)
            self._known = view.number
            self._drop(lambda number: number <= view.number)

    def _take(self, view: View) -> None:
        self.views[view.number] = view
        if (promise := self._promises.get(view.number)) is not None:
            later = {member: since for member, since in self._excluded.items() if since > self.round}
            self._excluded = later | dict.fromkeys(promise.lost, view.since)

    def _decided(self, round: int) -> bool:
        return not any(promise.since <= round for promise in self._promises.values())

    def _taking_part(self, view: View) -> tuple[int, ...]:
        """The members of `view` whose state is still that of the others."""
        return tuple(member for member in view.members if self.left_out.get(member, -1) < view.number)

    def _since(self) -> int | None:
        """The first round of the first view that includes this worker with its present state."""
        views = (view for view in self.views.values() if view.number > self._entered and self.member in view.members)
        return min((view.since for view in views if self._own(view.since) is not None), default=None)

    def _may_read(self, round: int) -> bool:
        """Whether no later view can begin with `round`, and the lighthouse misses at most this one report."""
        new = not self._slice_views  # no round begun: earlier replies were about a former state
        return round < self._newest_round + MARGIN and (new or round <= self._answered + 1)

    def _own(self, round: int) -> View | None:
        """The view of `round`; None if this worker is not in it."""
        view = self.view_of(round)
        return view if view is not None and view.number > self._entered and self.member in view.members else None

    def _drop(self, over: Callable[[int], bool]) -> None:
        self._promises = {number: promise for number, promise in self._promises.items() if not over(number)}
