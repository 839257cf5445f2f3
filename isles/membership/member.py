"""A worker's side of `coordinator`: which round is whose, as far as this worker knows. Calls in, messages out; no
clock.

    start_round(round)  at its first inner step: which data slice is this worker's to read
    group(round)        at its exchange: who takes part
    beat()              to the lighthouse at every start, and each second; one at a time, for answers come in order

Two promises make all workers' worlds one. Of groups: a member that has promised not to begin round s undecided, and
reaches it before it knows, is a group of itself alone. Of data: a worker reads its own slices in rounds that no later
view can begin with (`BeatReply.newest_round`), at most one round beyond the newest that the lighthouse has answered it
for, and unassigned samples beyond. So no two workers read one slice, however long one of them was cut off or stood
still, and when it is lost, there is at most one slice of which only others know that it was read.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from isles.membership.messages import MARGIN, Ack, Beat, BeatReply, Load, Proposal, View
from isles.membership.round_commit import RoundDecision

_RETAINED = 8  # rounds whose answers stay final; an exchange is begun at most a few rounds after its round


@dataclass(frozen=True)
class RoundMembers:
    """Who takes part in a round. members: its group, the worker's own included; view: the number of theirs, -1 for
    none.

    decided: False where this worker has promised not to begin the round before it knows more than it does.
    """

    view: int
    members: tuple[int, ...]
    decided: bool = True


class MemberState:
    """One worker. member: its number."""

    def __init__(self, member: int) -> None:
        self.member = member
        self.views: dict[int, View] = {}
        self.round = 0
        self.seconds = 0.0  # of an inner step, 0 where unknown
        self.call, self.ready = 0, -1
        self._known = -1  # the newest view of those of which none before is missing
        self._entered = -1  # views up to this number were for what this worker was before it took another's state
        self._issued = -1
        self._answered = 0  # the newest round of a beat whose answer is here
        self._newest_round = 0  # anybody's, as of the last answer
        self._asked = 0  # the newest round whose group is final
        self._promises: dict[int, Proposal] = {}
        self._parted: dict[int, int] = {}  # by member that did not ask to leave: the first round of the view without it
        self.left_out: dict[int, int] = {}  # by member: the newest view when the others landed a round without it
        self._broken: frozenset[int] = frozenset()
        self._groups: dict[int, RoundMembers] = {}
        self._cells: dict[int, View | None] = {}
        self._skipped: set[int] = set()
        self._seen: dict[int, int] = {}

    # Rounds

    def start_round(self, round: int) -> View | None:
        """This worker is in `round` now. The view whose cell it reads; None: it reads out of turn.

        The first answer for a round is final.
        """
        if round not in self._cells:
            since = self._since()
            if not self._cells and since is not None:  # rounds that went on without it
                self._skipped.update(range(since, round))
            view = self._own(round) if self._decided(round) and self._may_read(round) else None
            self._cells = {**{r: v for r, v in self._cells.items() if r > round - _RETAINED}, round: view}
            if view is None:
                self._skipped.add(round)
            self.round = max(self.round, round)
        return self._cells[round]

    def skip(self, round: int) -> None:
        """This worker does no step of `round`: what it did before counts in the mean of that one."""
        self._cells[round] = None
        self._skipped.add(round)
        self.round = max(self.round, round)

    def group(self, round: int) -> RoundMembers:
        """Who takes part in the exchange of `round`; final once it is decided."""
        if round in self._groups:
            return self._groups[round]
        if not self._decided(round):
            return RoundMembers(-1, (self.member,), decided=False)
        view = self._own(round)
        round_members = RoundMembers(-1, (self.member,))
        if view is not None:
            round_members = RoundMembers(view.number, self._taking_part(view))
        self._groups = {**{r: s for r, s in self._groups.items() if r > round - _RETAINED}, round: round_members}
        self._asked = max(self._asked, round)  # from here on a view that begins with this round comes too late
        return round_members

    def accept(self, round: int, members: Collection[int]) -> bool:
        """Whether the answer of an exchange among `members`, whole by now, may be used. If so they count as seen."""
        if any(self.lost(member) for member in members):
            return False
        for member in members:
            if member != self.member:
                self._seen[member] = max(self._seen.get(member, 0), round)
        return True

    def landed(self, decision: RoundDecision) -> None:
        """A round of an all-reduce method that this worker has landed, or whose mean it has caught up with."""
        view = self.view_of(decision.round)
        if view is not None:
            self.left_out |= dict.fromkeys(set(self._taking_part(view)) - set(decision.members), decision.view)

    def until(self) -> int | None:
        """The first round that goes on without this worker, where a newer view than its own says so."""
        own = max((view.number for view in self.views.values() if self.member in view.members), default=-1)
        return min((view.since for view in self.views.values() if view.number > own), default=None)

    def earliest(self) -> int:
        """The first round that a view can begin with that nobody has proposed yet."""
        return max(self.round, self._newest_round) + MARGIN

    def lost(self, member: int) -> bool:
        """Whether no work of `member` is taken any more: its connection broke, or a view without it is on its way."""
        return member in self._broken or member in self.abandoned()

    def abandoned(self) -> frozenset[int]:
        """Who is left out, though not by its own wish, of a view that is on its way or begins later than this round."""
        promised = {member for promise in self._promises.values() for member in promise.lost}
        return frozenset(promised | {member for member, since in self._parted.items() if since > self.round})

    def connection(self, member: int, *, broken: bool) -> None:
        """What the network says about `member`."""
        self._broken = self._broken | {member} if broken else self._broken - {member}

    def loaded(self, load: Load, round: int, left_out: Mapping[int, int] | None = None) -> None:
        """This worker has the state that its donor had after `round`, and nothing of its own any more.

        left_out: the donor's, at that moment.
        """
        self.left_out = dict(left_out or {})
        self.round = self._answered = self._asked = 0  # what it did out of turn before, nobody is told any more
        self.call, self.ready = max(self.call, load.call), load.call
        self._entered = self._issued
        self._cells, self._groups, self._skipped = {}, {}, set()
        self._seen, self._parted = {load.donor: round} if load.donor >= 0 else {}, {}

    def first(self, ahead: int = 0) -> int | None:
        """The first round of a worker that has begun none since it loaded its state: once others are in a view that it
        is in, or `ahead` rounds before it, the round that they are in. None: not yet.
        """
        since = None if self._cells else self._since()
        return None if since is None or since > self._newest_round + ahead else max(since, self._newest_round - 1)

    def is_known(self, round: int) -> bool:
        """Whether the lighthouse's answers go far enough for this worker to read its own cell of `round`."""
        return not self._cells or round <= self._answered + 1

    def view_of(self, round: int) -> View | None:
        """The newest view known that covers `round`."""
        return max((v for v in self.views.values() if v.since <= round), key=lambda v: v.number, default=None)

    # Messages

    def beat(self) -> Beat:
        """What the lighthouse is to know now."""
        seen = tuple(sorted(self._seen.items()))
        return Beat(self.round, self.ready, self._known, tuple(sorted(self._skipped)), seen, self.seconds)

    def answered(self, beat: Beat, answer: BeatReply) -> Ack | None:
        """The lighthouse's answer to `beat`; this worker's to the proposal in it, if there is one."""
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
        """The answer to a proposal that was pushed; None where an answer has said more already."""
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
        """A view that was pushed. Taken if nothing before it is missing; otherwise the next answer brings all."""
        promise = self._promises.get(view.number)
        if promise is not None and promise.base <= self._known:
            self._take(view)
            self._known = view.number
            self._drop(lambda number: number <= view.number)

    def _take(self, view: View) -> None:
        self.views[view.number] = view
        if (promise := self._promises.get(view.number)) is not None:
            later = {member: since for member, since in self._parted.items() if since > self.round}
            self._parted = later | dict.fromkeys(promise.lost, view.since)

    def _decided(self, round: int) -> bool:
        return not any(promise.since <= round for promise in self._promises.values())

    def _taking_part(self, view: View) -> tuple[int, ...]:
        """The members of `view` whose state is still that of the others."""
        return tuple(member for member in view.members if self.left_out.get(member, -1) < view.number)

    def _since(self) -> int | None:
        """The first round of the first view that this worker is in with the state it has."""
        own = (view for view in self.views.values() if view.number > self._entered and self.member in view.members)
        return min((view.since for view in own if self._own(view.since) is not None), default=None)

    def _may_read(self, round: int) -> bool:
        """Whether no later view can begin with `round`, and it is the only one that the lighthouse does not know of."""
        new = not self._cells  # it has begun none: whatever was answered was about another life
        return round < self._newest_round + MARGIN and (new or round <= self._answered + 1)

    def _own(self, round: int) -> View | None:
        """The view of `round`; None where this worker is not in it."""
        view = self.view_of(round)
        return view if view is not None and view.number > self._entered and self.member in view.members else None

    def _drop(self, over: Callable[[int], bool]) -> None:
        self._promises = {number: promise for number, promise in self._promises.items() if not over(number)}
