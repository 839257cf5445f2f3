"""Which data a worker reads in a round of a view, and which data must be read again after a loss.

A data slice is what one index of a view reads in one round: `steps[index]` inner steps of one batch each. The slices of
a view are numbered round by round, index by index; the first of them read the backlog, and all others go on in the
order of the data. With s = the fresh steps of an index in a round, a round's fresh batches lie as in a fixed world:
step by step, and within a step row by row across the indices that take it. So a view without a backlog, in which every
member takes H steps, reads what a fixed world reads. This is plain arithmetic on views, the same at every worker.

A slice is read for good while somebody whose weights go on has its work: its reader, or a member that took part in an
exchange with the reader at the end of that round or a later one, or with one that had it from there. The `DataLedger`
puts everything else into the backlog of the next view:

    rounds that a worker did without knowing the view, on unassigned samples                (`begun(skipped=...)`)
    rounds of a lost worker whose work is in nobody's weights; also where those who had it are lost later
    what remains of the backlog where a view ended too early to read it

A worker's report counts up to the newest round that it named: the round it is in. So if the ledger is behind, a slice
is read twice, never not at all. It is at most one slice a death, for a worker reads its own slices one round ahead of
the lighthouse's answers and no further (`member`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from isles.membership.messages import SampleRange, View


class Batch(NamedTuple):
    """One batch of the data in plain numbers, for `isles.data.loader.rows`.

    start: batches before the round's first fresh one. fresh: fresh steps of each index in that round.
    index, step: whose it is, and which of its fresh steps.
    """

    start: int
    fresh: tuple[int, ...]
    index: int
    step: int


def batches(views: Mapping[int, View], view: View, round: int, index: int) -> list[Batch]:
    """What `index` reads in `round`, a batch an inner step. views: by number, those that `view.backlog` names."""
    taken = _taken(view, round, index)
    before = _before(view, round, index)
    backlog = [
        step
        for sample_range in part(view.backlog, before, taken)
        for step in range_batches(views[sample_range.view], sample_range)
    ]
    counts = fresh(view, round)
    begin = view.start + fresh_before(view, round)
    return backlog + [Batch(begin, counts, index, step) for step in range(counts[index])]


def range_batches(view: View, sample_range: SampleRange) -> list[Batch]:
    """The batches of a range of `view`, whose numbers are always those of fresh steps, never of another backlog."""
    found = []
    for number in range(sample_range.first, sample_range.first + sample_range.steps):
        rounds, step = divmod(number, view.steps[sample_range.index])
        round = view.since + rounds
        taken = _taken(view, round, sample_range.index)
        found.append(
            Batch(view.start + fresh_before(view, round), fresh(view, round), sample_range.index, step - taken)
        )
    return found


def fresh(view: View, round: int) -> tuple[int, ...]:
    """Inner steps of each index in `round` that read on in the order of the data, without those of the backlog."""
    total, before = count_steps(view.backlog), _before(view, round, 0)
    if before >= total:
        return view.steps
    counts = []
    for steps in view.steps:
        counts.append(steps - min(max(total - before, 0), steps))
        before += steps
    return tuple(counts)


def fresh_before(view: View, round: int) -> int:
    """Fresh batches of all indices in the rounds of the view before `round`."""
    steps = _before(view, round, 0)
    return max(steps - count_steps(view.backlog), 0)


def last_round(view: View, batches: int) -> int:
    """The round of `view` in which the data's order has come to so many batches, at the earliest that before its first.

    Debts are not counted: they come before.
    """
    steps = batches - view.start + count_steps(view.backlog)
    return view.since - 1 + (-(-steps // sum(view.steps)) if batches > view.start else 0)


def ranges_of(view: View, index: int, first: int, until: int) -> list[SampleRange]:
    """What the slices of `index` in rounds `first` .. `until` - 1 read, for whoever reads it in their stead."""
    found: list[SampleRange] = []
    own, total = view.steps[index], count_steps(view.backlog)
    for round in range(first, until):
        taken = _taken(view, round, index)
        found += part(view.backlog, _before(view, round, index), taken)
        if _before(view, round, 0) >= total:  # no backlog from here on: the rest is one range
            found.append(SampleRange(view.number, index, (round - view.since) * own, (until - round) * own))
            break
        if taken < own:
            found.append(SampleRange(view.number, index, (round - view.since) * own + taken, own - taken))
    return merged(found)


def left_over(view: View, until: int) -> list[SampleRange]:
    """The backlog that no slice of the view before round `until` was to read."""
    steps, total = max(_before(view, until, 0), 0), count_steps(view.backlog)
    return part(view.backlog, steps, total - steps) if steps < total else []


def part(queue: Sequence[SampleRange], first: int, steps: int) -> list[SampleRange]:
    """Steps `first` .. `first` + `steps` - 1 of a queue of ranges; fewer where the queue ends."""
    found = []
    for sample_range in queue:
        if steps <= 0:
            break
        if first < sample_range.steps:
            count = min(sample_range.steps - first, steps)
            found.append(sample_range._replace(first=sample_range.first + first, steps=count))
            steps -= count
        first = max(first - sample_range.steps, 0)
    return found


def merged(queue: Iterable[SampleRange]) -> list[SampleRange]:
    """The same steps in the same order, in as few ranges as possible."""
    found: list[SampleRange] = []
    for sample_range in queue:
        last = found[-1] if found else None
        if last is not None and last[:2] == sample_range[:2] and last.first + last.steps == sample_range.first:
            found[-1] = last._replace(steps=last.steps + sample_range.steps)
        else:
            found.append(sample_range)
    return found


def count_steps(queue: Iterable[SampleRange]) -> int:
    """Inner steps in a queue of ranges."""
    return sum(sample_range.steps for sample_range in queue)


def _before(view: View, round: int, index: int) -> int:
    """Inner steps of all slices of the view before that of `index` in `round`."""
    return (round - view.since) * sum(view.steps) + sum(view.steps[:index])


def _taken(view: View, round: int, index: int) -> int:
    """Inner steps of a slice that read the backlog."""
    return min(max(count_steps(view.backlog) - _before(view, round, index), 0), view.steps[index])


_WITNESSES = 8  # so many that live are enough: what they all have is not minded any longer


@dataclass(frozen=True)
class SliceAssignment:
    """The rounds `first` .. `until` - 1 in which a member held `index` of a view. until None: as long as the view."""

    view: int
    index: int
    first: int
    until: int | None = None


@dataclass(frozen=True)
class _Incarnation:
    """What is known of a member, from the state that it began with to its loss.

    begun: the newest round that it reported. skipped: rounds of unassigned samples that are in no backlog yet.
    witnesses: by member, the newest round of this one whose work it has, and the round of its own in which it got that.
    landed: the newest round of an all-reduce method with its work.
    """

    member: int
    begun: int = 0
    assignments: tuple[SliceAssignment, ...] = ()
    skipped: frozenset[int] = frozenset()
    witnesses: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    landed: int = 0

    def seen(self, witness: int, round: int, at: int) -> _Incarnation:
        """`witness` has its work up to `round` since its own round `at`. Of many the one who has least is forgotten."""
        if round <= self.witnesses.get(witness, (0, 0))[0]:
            return self
        witnesses = {**self.witnesses, witness: (round, at)}
        if len(witnesses) > 2 * _WITNESSES:
            del witnesses[min(witnesses, key=lambda member: witnesses[member])]
        return replace(self, witnesses=witnesses)

    def without(self, witnesses: Collection[int]) -> _Incarnation:
        """Those have nothing of it any more."""
        return replace(self, witnesses={w: seen for w, seen in self.witnesses.items() if w not in witnesses})

    def held(self, living: Collection[int]) -> int:
        """The newest of its rounds whose work somebody else of `living` has; 0 where there is none."""
        rounds = [seen for witness, (seen, _) in self.witnesses.items() if witness in living and witness != self.member]
        if any(member != self.member for member in living):  # what has landed, all have
            rounds.append(self.landed)
        return min(max(rounds, default=0), self.begun)

    def spread(self, others: Collection[int]) -> int:
        """The newest of its rounds whose work so many of `others` have that it is safe."""
        enough = min(len(others), _WITNESSES)
        rounds = sorted((r for witness, (r, _) in self.witnesses.items() if witness in others), reverse=True)
        seen = rounds[enough - 1] if 0 < enough <= len(rounds) else 0
        return min(max(seen, self.landed if others else 0), self.begun)


class DataLedger:
    """Told of every view, round and exchange; says where the next view begins and what it owes."""

    def __init__(self) -> None:
        self.views: dict[int, View] = {}  # those that an assignment or a backlog still names, and the newest
        self._incarnations: dict[int, _Incarnation] = {}  # by member
        self._lost: list[_Incarnation] = []  # whose work is in few others yet
        self._forgone: set[int] = set()  # incarnations that end with the next view

    @property
    def newest(self) -> View | None:
        """The last view that was opened."""
        return self.views[max(self.views)] if self.views else None

    def view_of(self, round: int) -> View | None:
        """The newest of those that are kept and had begun by `round`."""
        return max((v for v in self.views.values() if v.since <= round), key=lambda v: v.number, default=None)

    def begun(self, member: int, round: int, skipped: Iterable[int], seen: Mapping[int, int]) -> None:
        """`member` is in `round`; of its rounds it did `skipped` out of turn; it has taken part in exchanges with
        others, `seen` = the newest of their rounds, by member.
        """
        incarnation = self._incarnations.get(member, _Incarnation(member))
        newest = max(incarnation.begun, round)
        self._incarnations[member] = replace(incarnation, begun=newest, skipped=incarnation.skipped | set(skipped))
        if seen:
            for other, incarnation in self._incarnations.items():
                if other in seen or not incarnation.witnesses.keys().isdisjoint(seen):  # few of a large world
                    self._incarnations[other] = self._passed_on(incarnation, member, seen, alive=True)
            self._lost = [self._passed_on(incarnation, member, seen, alive=False) for incarnation in self._lost]

    def _passed_on(
        self, incarnation: _Incarnation, member: int, seen: Mapping[int, int], *, alive: bool
    ) -> _Incarnation:
        """`member` has the work of those it has seen, and what they had got of `incarnation` in the rounds before."""
        if alive and incarnation.member == member:
            return incarnation
        if alive and incarnation.member in seen:
            incarnation = incarnation.seen(member, seen[incarnation.member], seen[incarnation.member])
        for by, (round, at) in list(incarnation.witnesses.items()):
            if at < seen.get(by, 0):
                incarnation = incarnation.seen(member, round, seen[by])
        return incarnation

    def landed(self, round: int, members: Collection[int]) -> None:
        """The answer of `round` holds the work of `members`, and everybody has it whose weights go on."""
        for member in members:
            if member in self._incarnations:
                self._incarnations[member] = replace(self._incarnations[member], landed=round)

    def forgo(self, member: int) -> None:
        """What `member` has not shared by now is not waited for: it is dead, or begins again with another's state."""
        self._forgone.add(member)

    def reclaim(self, member: int) -> None:
        """`member` is back with everything it had, before any view went on without it."""
        self._forgone.discard(member)

    def next(self, since: int, living: Collection[int]) -> tuple[int, tuple[SampleRange, ...]]:
        """(`View.start`, `View.backlog`) of a view that takes over at round `since`; changes nothing.

        living: members whose weights go on; not those that are forgone.
        """
        view = self.newest
        if view is None:
            return 0, ()
        return view.start + fresh_before(view, since), tuple(self._settled(since, living)[0])

    def open(self, view: View, living: Collection[int]) -> None:
        """`view` takes over at its round, with the `start` and the backlog that `next` gave for the same `living`."""
        before = () if self.newest is None else self.newest.members
        if self.newest is not None:
            _, self._incarnations, self._lost = self._settled(view.since, living, view.members)
            self._forgone = set()
        for index, member in enumerate(view.members):
            incarnation = self._incarnations.get(member, _Incarnation(member))
            if member not in before:  # what it did outside is no data slice
                incarnation = replace(incarnation, begun=0, skipped=frozenset())
            self._incarnations[member] = replace(
                incarnation, assignments=(*incarnation.assignments, SliceAssignment(view.number, index, view.since))
            )
        self.views[view.number] = view
        named = {
            assignment.view
            for incarnation in [*self._incarnations.values(), *self._lost]
            for assignment in incarnation.assignments
        }
        named |= {sample_range.view for sample_range in view.backlog} | {view.number}
        named |= {
            sample_range.view for number in named & self.views.keys() for sample_range in self.views[number].backlog
        }
        self.views = {number: view for number, view in self.views.items() if number in named}

    def outstanding(self, until: int, living: Collection[int]) -> list[SampleRange]:
        """The backlog if the run ended before round `until`."""
        return self._settled(until, living)[0] if self.newest is not None else []

    def _settled(
        self, until: int, living: Collection[int], coming: Collection[int] = ()
    ) -> tuple[list[SampleRange], dict[int, _Incarnation], list[_Incarnation]]:
        """(the backlog if the newest view ends before round `until`, the incarnations that go on, those that are lost).

        coming: members that go on from then, too. They have what their donors had when they copied it: were they the
        only ones left, it would be all there is.
        """
        view, living = self.newest, frozenset(living)
        going_on = living.union(coming)
        assert view is not None
        backlog = left_over(view, until)
        lost: list[_Incarnation] = []
        incarnations: dict[int, _Incarnation] = {}
        everyone = [(incarnation, True) for incarnation in self._lost]
        everyone += [(self._incarnations[member], member in self._forgone) for member in sorted(self._incarnations)]
        for incarnation, is_lost in everyone:
            assignments = tuple(replace(t, until=min(t.until or until, until)) for t in incarnation.assignments)
            held = incarnation.held(living) if is_lost else until
            missed, assignments = self._unread(replace(incarnation, assignments=assignments), held)
            backlog += missed
            # Some of those that are forgone go on from then, with what they have from a donor.
            incarnation = incarnation.without(self._forgone)
            # Of one that is lost the member itself is among those who go on, where it began again.
            spread = incarnation.spread(going_on if is_lost else going_on - {incarnation.member})
            minded = tuple(t for t in assignments if (t.until or until) > spread + 1)
            skipped = frozenset(round for round in incarnation.skipped if round >= until)
            incarnation = replace(incarnation, assignments=minded, skipped=skipped)
            if not is_lost:
                incarnations[incarnation.member] = incarnation
            elif minded:
                lost.append(incarnation)
        return merged(backlog), incarnations, lost

    def _unread(self, incarnation: _Incarnation, held: int) -> tuple[list[SampleRange], tuple[SliceAssignment, ...]]:
        """(the slices whose work nobody has: unassigned, or in rounds after `held`; its assignments without them)."""
        backlog: list[SampleRange] = []
        remaining: list[SliceAssignment] = []
        for assignment in incarnation.assignments:
            view, first, until = self.views[assignment.view], assignment.first, assignment.until or assignment.first
            for round in sorted(r for r in incarnation.skipped if first <= r < min(until, held + 1)):
                backlog += ranges_of(view, assignment.index, round, round + 1)
                if first < round:
                    remaining.append(replace(assignment, first=first, until=round))
                first = round + 1
            if first < min(until, held + 1):
                remaining.append(replace(assignment, first=first, until=min(until, held + 1)))
            backlog += ranges_of(view, assignment.index, max(first, held + 1), until)
        return backlog, tuple(remaining)
