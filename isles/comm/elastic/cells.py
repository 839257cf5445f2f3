"""Which data a worker reads in a round of a view. Plain arithmetic on views; the same at every worker.

A cell is what one place of a view reads in one round: `steps[place]` inner steps of one batch each. The cells of a view
are numbered round by round, place by place; the first of them read what is owed from before, as long as there is any,
and all others read on in the order of the data. With s = the fresh steps of a place in a round, a round's fresh batches
lie as they always did: step by step, and within a step row by row across the places that take it. So a view without
debts, in which everybody takes H steps, reads what a fixed world reads.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from isles.comm.view import Lot, View


class Batch(NamedTuple):
    """One batch of the data in plain numbers, for `isles.data.lots.rows`.

    start: batches before the round's first fresh one. fresh: fresh steps of each place in that round.
    place, step: whose it is, and which of its fresh steps.
    """

    start: int
    fresh: tuple[int, ...]
    place: int
    step: int


def batches(views: Mapping[int, View], view: View, round: int, place: int) -> list[Batch]:
    """What `place` reads in `round`, a batch an inner step. views: by number, those that `view.owed` names."""
    taken = _taken(view, round, place)
    before = _before(view, round, place)
    owed = [step for lot in part(view.owed, before, taken) for step in lot_batches(views[lot.view], lot)]
    counts = fresh(view, round)
    begin = view.start + fresh_before(view, round)
    return owed + [Batch(begin, counts, place, step) for step in range(counts[place])]


def lot_batches(view: View, lot: Lot) -> list[Batch]:
    """The batches of a lot of `view`: the numbers of a lot are always those of fresh steps, never of another debt."""
    found = []
    for number in range(lot.first, lot.first + lot.steps):
        rounds, step = divmod(number, view.steps[lot.place])
        round = view.since + rounds
        taken = _taken(view, round, lot.place)
        found.append(Batch(view.start + fresh_before(view, round), fresh(view, round), lot.place, step - taken))
    return found


def fresh(view: View, round: int) -> tuple[int, ...]:
    """Inner steps of each place in `round` that read on in the order of the data, debts taken off."""
    total, before = debt(view.owed), _before(view, round, 0)
    if before >= total:
        return view.steps
    counts = []
    for steps in view.steps:
        counts.append(steps - min(max(total - before, 0), steps))
        before += steps
    return tuple(counts)


def fresh_before(view: View, round: int) -> int:
    """Fresh batches of all places in the rounds of the view before `round`."""
    steps = _before(view, round, 0)
    return max(steps - debt(view.owed), 0)


def last_round(view: View, batches: int) -> int:
    """The round of `view` in which the data's order has come to so many batches, at the earliest that before its first.

    Debts are not counted: they come before.
    """
    steps = batches - view.start + debt(view.owed)
    return view.since - 1 + (-(-steps // sum(view.steps)) if batches > view.start else 0)


def lots(view: View, place: int, first: int, until: int) -> list[Lot]:
    """What the cells of `place` in rounds `first` .. `until` - 1 read, for whoever reads it in their stead."""
    found: list[Lot] = []
    own, total = view.steps[place], debt(view.owed)
    for round in range(first, until):
        taken = _taken(view, round, place)
        found += part(view.owed, _before(view, round, place), taken)
        if _before(view, round, 0) >= total:  # nothing is owed from here on: the rest is one piece
            found.append(Lot(view.number, place, (round - view.since) * own, (until - round) * own))
            break
        if taken < own:
            found.append(Lot(view.number, place, (round - view.since) * own + taken, own - taken))
    return merged(found)


def left_over(view: View, until: int) -> list[Lot]:
    """The debts that no cell of the view before round `until` was to read."""
    steps, total = max(_before(view, until, 0), 0), debt(view.owed)
    return part(view.owed, steps, total - steps) if steps < total else []


def part(queue: Sequence[Lot], first: int, steps: int) -> list[Lot]:
    """Steps `first` .. `first` + `steps` - 1 of a queue of lots; fewer where the queue ends."""
    found = []
    for lot in queue:
        if steps <= 0:
            break
        if first < lot.steps:
            count = min(lot.steps - first, steps)
            found.append(lot._replace(first=lot.first + first, steps=count))
            steps -= count
        first = max(first - lot.steps, 0)
    return found


def merged(queue: Iterable[Lot]) -> list[Lot]:
    """The same steps in the same order, in as few lots as possible."""
    found: list[Lot] = []
    for lot in queue:
        last = found[-1] if found else None
        if last is not None and last[:2] == lot[:2] and last.first + last.steps == lot.first:
            found[-1] = last._replace(steps=last.steps + lot.steps)
        else:
            found.append(lot)
    return found


def debt(queue: Iterable[Lot]) -> int:
    """Inner steps in a queue of lots."""
    return sum(lot.steps for lot in queue)


def _before(view: View, round: int, place: int) -> int:
    """Inner steps of all cells of the view before that of `place` in `round`."""
    return (round - view.since) * sum(view.steps) + sum(view.steps[:place])


def _taken(view: View, round: int, place: int) -> int:
    """Inner steps of a cell that go to what is owed."""
    return min(max(debt(view.owed) - _before(view, round, place), 0), view.steps[place])
