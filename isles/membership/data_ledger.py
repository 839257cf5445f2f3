"""Which data a worker reads in a round of a view, and which data must be read again after a loss.

A data slice is what one index of a view reads in one round: `steps[index]` inner steps of one batch each. The slices of
a view are numbered round by round, index by index; the first of them read the backlog, and all others go on in the
order of the data. With s = the fresh steps of an index in a round, a round's fresh batches lie as in a fixed world:
step by step, and within a step row by row across the indices that take it. So a view without a backlog, in which every
member takes H steps, reads what a fixed world reads. This is plain arithmetic on views, the same at every worker.

A slice is read for good while a member whose weights go on has its work: its reader; a member that took part in an
exchange with the reader at the end of that round or later; or a member that got it from one of these. The `DataLedger`
puts everything else into the backlog of the next view:

    rounds that a worker did without knowing the view, on unassigned samples                (`begun(skipped=...)`)
    rounds of a lost worker whose work is in no weights, also if the members that had it are lost later
    what remains of the backlog if a view ended too early to read it

A worker's report counts up to the newest round that it named: the round it is in. If the ledger is behind, a slice is
read twice, but never skipped. That is at most one slice per death, because a worker reads its own slices at most one
round ahead of the lighthouse's replies (`member`).
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
    """The batches that `index` reads in `round`, one per inner step. views: by number, those in `view.backlog`."""
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
    result = []
    for number in range(sample_range.first, sample_range.first + sample_range.steps):
        rounds, step = divmod(number, view.steps[sample_range.index])
        round = view.since + rounds
        taken = _taken(view, round, sample_range.index)
        result.append(
            Batch(view.start + fresh_before(view, round), fresh(view, round), sample_range.index, step - taken)
        )
    return result


def fresh(view: View, round: int) -> tuple[int, ...]:
    """Inner steps of each index in `round` that read new data, not the backlog."""
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
    """The round of `view` in which `batches` batches of the data's order are reached; at the earliest the one before
    its first.

    The backlog is not counted: it is read before.
    """
    steps = batches - view.start + count_steps(view.backlog)
    return view.since - 1 + (-(-steps // sum(view.steps)) if batches > view.start else 0)


def ranges_of(view: View, index: int, first: int, until: int) -> list[SampleRange]:
    """The data of the slices of `index` in rounds `first` .. `until` - 1, to be read again."""
    ranges: list[SampleRange] = []
    own, total = view.steps[index], count_steps(view.backlog)
    for round in range(first, until):
        taken = _taken(view, round, index)
        ranges += part(view.backlog, _before(view, round, index), taken)
        if _before(view, round, 0) >= total:  # no backlog from here on: the rest is one range
            ranges.append(SampleRange(view.number, index, (round - view.since) * own, (until - round) * own))
            break
        if taken < own:
            ranges.append(SampleRange(view.number, index, (round - view.since) * own + taken, own - taken))
    return merged(ranges)


def left_over(view: View, until: int) -> list[SampleRange]:
    """The part of the backlog that the slices of the view before round `until` do not reach."""
    steps, total = max(_before(view, until, 0), 0), count_steps(view.backlog)
    return part(view.backlog, steps, total - steps) if steps < total else []


def part(queue: Sequence[SampleRange], first: int, steps: int) -> list[SampleRange]:
    """Steps `first` .. `first` + `steps` - 1 of a queue of ranges; fewer where the queue ends."""
    ranges = []
    for sample_range in queue:
        if steps <= 0:
            break
        if first < sample_range.steps:
            count = min(sample_range.steps - first, steps)
            ranges.append(sample_range._replace(first=sample_range.first + first, steps=count))
            steps -= count
        first = max(first - sample_range.steps, 0)
    return ranges


def merged(queue: Iterable[SampleRange]) -> list[SampleRange]:
    """The same steps in the same order, in as few ranges as possible."""
    ranges: list[SampleRange] = []
    for sample_range in queue:
        last = ranges[-1] if ranges else None
        if last is not None and last[:2] == sample_range[:2] and last.first + last.steps == sample_range.first:
            ranges[-1] = last._replace(steps=last.steps + sample_range.steps)
        else:
            ranges.append(sample_range)
    return ranges


def count_steps(queue: Iterable[SampleRange]) -> int:
    """Inner steps in a queue of ranges."""
    return sum(sample_range.steps for sample_range in queue)


def _before(view: View, round: int, index: int) -> int:
    """Inner steps of all slices of the view before that of `index` in `round`."""
    return (round - view.since) * sum(view.steps) + sum(view.steps[:index])


def _taken(view: View, round: int, index: int) -> int:
    """Inner steps of a slice that read the backlog."""
    return min(max(count_steps(view.backlog) - _before(view, round, index), 0), view.steps[index])


_SKIPPED = 2048  # rounds on unassigned data to remember of a member, which loads another state before there are so many
_WITNESSES = 8  # work that so many living members have counts as safe


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

    begun: the newest round that it reported. skipped: rounds on unassigned samples that are in no backlog yet.
    witnesses: by member that has its work: (the newest such round, the witness's own round when it got it). landed: the
    newest round of an all-reduce method with its work.
    """

    member: int
    begun: int = 0
    assignments: tuple[SliceAssignment, ...] = ()
    skipped: frozenset[int] = frozenset()
    witnesses: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    landed: int = 0

    def seen(self, witness: int, round: int, at: int) -> _Incarnation:
        """`witness` has its work up to `round` since its own round `at`. Of too many witnesses the least is dropped."""
        if round <= self.witnesses.get(witness, (0, 0))[0]:
            return self
        witnesses = {**self.witnesses, witness: (round, at)}
        if len(witnesses) > 2 * _WITNESSES:
            del witnesses[min(witnesses, key=lambda member: witnesses[member])]
        return replace(self, witnesses=witnesses)

    def without(self, witnesses: Collection[int]) -> _Incarnation:
        """These members no longer have any of its work."""
        return replace(self, witnesses={w: seen for w, seen in self.witnesses.items() if w not in witnesses})

    def held(self, living: Collection[int]) -> int:
        """The newest of its rounds whose work another living member has; 0: none."""
        rounds = [seen for witness, (seen, _) in self.witnesses.items() if witness in living and witness != self.member]
        if any(member != self.member for member in living):  # landed work is at all members
            rounds.append(self.landed)
        return min(max(rounds, default=0), self.begun)

    def spread(self, others: Collection[int]) -> int:
        """The newest of its rounds whose work enough of `others` have, so that it is safe."""
        enough = min(len(others), _WITNESSES)
        rounds = sorted((r for witness, (r, _) in self.witnesses.items() if witness in others), reverse=True)
        seen = rounds[enough - 1] if 0 < enough <= len(rounds) else 0
        return min(max(seen, self.landed if others else 0), self.begun)


class DataLedger:
    """Records every view, round and exchange; computes where the next view begins, and its backlog."""

    def __init__(self) -> None:
        self.views: dict[int, View] = {}  # the newest, and those that an assignment or a backlog refers to
        self._incarnations: dict[int, _Incarnation] = {}  # by member
        self._lost: list[_Incarnation] = []  # lost ones whose work few others have yet
        self._forgone: set[int] = set()  # members whose incarnation ends with the next view

    @property
    def newest(self) -> View | None:
        """The last view that was opened."""
        return self.views[max(self.views)] if self.views else None

    def view_of(self, round: int) -> View | None:
        """The newest recorded view that had begun by `round`."""
        return max((v for v in self.views.values() if v.since <= round), key=lambda v: v.number, default=None)

    def begun(self, member: int, round: int, skipped: Iterable[int], seen: Mapping[int, int]) -> None:
        """`member` is in `round`. skipped: its rounds on unassigned data. seen: by member, the newest round of others
        whose work it has by exchanges.
        """
        incarnation = self._incarnations.get(member, _Incarnation(member))
        newest = max(incarnation.begun, round)
        every = incarnation.skipped.union(skipped)
        every = frozenset(sorted(every)[-_SKIPPED:]) if len(every) > _SKIPPED else every
        self._incarnations[member] = replace(incarnation, begun=newest, skipped=every)
        if seen:
            for other, incarnation in self._incarnations.items():
                if other in seen or not incarnation.witnesses.keys().isdisjoint(seen):  # only few of a large world
                    self._incarnations[other] = self._passed_on(incarnation, member, seen, alive=True)
            self._lost = [self._passed_on(incarnation, member, seen, alive=False) for incarnation in self._lost]

    def _passed_on(
        self, incarnation: _Incarnation, member: int, seen: Mapping[int, int], *, alive: bool
    ) -> _Incarnation:
        """`member` has the work of those that it has seen, and what they had of `incarnation` before."""
        if alive and incarnation.member == member:
            return incarnation
        if alive and incarnation.member in seen:
            incarnation = incarnation.seen(member, seen[incarnation.member], seen[incarnation.member])
        for by, (round, at) in list(incarnation.witnesses.items()):
            if at < seen.get(by, 0):
                incarnation = incarnation.seen(member, round, seen[by])
        return incarnation

    def unassigned(self, member: int) -> int:
        """The number of rounds that `member` did on unassigned data in the newest view."""
        incarnation = self._incarnations.get(member)
        return 0 if incarnation is None else len(incarnation.skipped)

    def landed(self, round: int, members: Collection[int]) -> None:
        """The answer of `round` holds the work of `members`, and is at all members whose weights go on."""
        for member in members:
            if member in self._incarnations:
                self._incarnations[member] = replace(self._incarnations[member], landed=round)

    def forgo(self, member: int) -> None:
        """Do not wait for what `member` has not shared yet: it is dead, or loads another state."""
        self._forgone.add(member)

    def reclaim(self, member: int) -> None:
        """`member` is back with its state before any view excluded it."""
        self._forgone.discard(member)

    def next(self, since: int, living: Collection[int]) -> tuple[int, tuple[SampleRange, ...]]:
        """(`View.start`, `View.backlog`) of a view from round `since` on; changes nothing.

        living: members whose weights go on, without forgone ones.
        """
        view = self.newest
        if view is None:
            return 0, ()
        return view.start + fresh_before(view, since), tuple(self._settled(since, living)[0])

    def open(self, view: View, living: Collection[int]) -> None:
        """Record a `view` with the `start` and backlog that `next` returned for the same `living`."""
        before = () if self.newest is None else self.newest.members
        if self.newest is not None:
            _, self._incarnations, self._lost = self._settled(view.since, living, view.members)
            self._forgone = set()
        for index, member in enumerate(view.members):
            incarnation = self._incarnations.get(member, _Incarnation(member))
            if member not in before:  # what it did outside a view was no data slice
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
        """(backlog if the newest view ends before round `until`, incarnations that go on, lost incarnations).

        coming: members that go on from then too, with what their donors had when they copied it; they may be the only
        ones left.
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
            newest_held = incarnation.held(living) if is_lost else until
            missed, assignments = self._unread(replace(incarnation, assignments=assignments), newest_held)
            backlog += missed
            # Forgone members that go on have only a donor's state, so they are no witnesses.
            incarnation = incarnation.without(self._forgone)
            # A lost incarnation's own member counts as another one if it began again.
            spread = incarnation.spread(going_on if is_lost else going_on - {incarnation.member})
            minded = tuple(t for t in assignments if (t.until or until) > spread + 1)
            skipped = frozenset(round for round in incarnation.skipped if round >= until)
            incarnation = replace(incarnation, assignments=minded, skipped=skipped)
            if not is_lost:
                incarnations[incarnation.member] = incarnation
            elif minded:
                lost.append(incarnation)
        return merged(backlog), incarnations, lost

    def _unread(
        self, incarnation: _Incarnation, newest_held: int
    ) -> tuple[list[SampleRange], tuple[SliceAssignment, ...]]:
        """(slices whose work nobody has: unassigned, or in rounds after `held`; the other assignments)."""
        backlog: list[SampleRange] = []
        remaining: list[SliceAssignment] = []
        for assignment in incarnation.assignments:
            view, first, until = self.views[assignment.view], assignment.first, assignment.until or assignment.first
            for round in sorted(r for r in incarnation.skipped if first <= r < min(until, newest_held + 1)):
                backlog += ranges_of(view, assignment.index, round, round + 1)
                if first < round:
                    remaining.append(replace(assignment, first=first, until=round))
                first = round + 1
            if first < min(until, newest_held + 1):
                remaining.append(replace(assignment, first=first, until=min(until, newest_held + 1)))
            backlog += ranges_of(view, assignment.index, max(first, newest_held + 1), until)
        return backlog, tuple(remaining)
