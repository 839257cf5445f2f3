"""Which data a cell reads: today's order where nothing changes, and every batch once where it does."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from isles.data.order import rows, spare_rows
from isles.membership.data_ledger import (
    batches,
    count_steps,
    fresh_before,
    left_over,
    merged,
    part,
    range_batches,
    ranges_of,
)
from isles.membership.messages import SampleRange, View


def positions(views: dict[int, View], view: View, round: int, index: int, batch_size: int = 1) -> list[int]:
    read = (rows(*batch, batch_size=batch_size) for batch in batches(views, view, round, index))
    return [int(row) for batch in read for row in batch]


def test_a_fixed_world_reads_what_the_loader_reads() -> None:
    """The loader's formula: row i of worker w of W is n + i W + w, and n grows by b W a step."""
    steps, workers, b = 3, 4, 5
    view = View(0, 1, tuple(range(workers)), (steps,) * workers)
    for worker, round in itertools.product(range(workers), (1, 2, 7)):
        read = [rows(*batch, batch_size=b) for batch in batches({0: view}, view, round, worker)]
        n = ((round - 1) * steps + np.arange(steps)) * b * workers
        assert np.array_equal(np.stack(read), n[:, None] + np.arange(b) * workers + worker)


@pytest.mark.parametrize("steps", [(3, 3, 3), (4, 1, 2), (8, 1, 1)])
def test_every_batch_once_also_where_steps_differ(steps: tuple[int, ...]) -> None:
    view = View(0, 5, (7, 8, 9), steps, start=11)
    read = [p for round in range(5, 9) for index in range(3) for p in positions({0: view}, view, round, index, 2)]
    assert sorted(read) == list(range(22, 22 + 2 * 4 * sum(steps)))


def test_debts_come_first_and_the_order_goes_on_behind_them() -> None:
    old = View(0, 1, (0, 1), (4, 4))
    backlog = tuple(ranges_of(old, 1, 2, 4))
    assert backlog == (SampleRange(0, 1, 4, 8),)
    new = View(1, 4, (0, 5, 6), (2, 4, 3), fresh_before(old, 4), backlog)
    views = {0: old, 1: new}
    missing = [p for round in (2, 3) for p in positions(views, old, round, 1)]
    read = [p for round in range(4, 8) for index in range(3) for p in positions(views, new, round, index)]
    assert read[: len(missing)] == missing
    assert sorted(read[len(missing) :]) == list(range(24, 24 + 4 * 9 - 8))


def test_lots_name_exactly_what_a_place_reads() -> None:
    """In a view with debts of its own, of unequal steps, over every stretch of rounds."""
    old = View(0, 1, (0, 1), (3, 3))
    new = View(1, 3, (0, 2, 4), (3, 1, 2), 12, (SampleRange(0, 0, 1, 3), SampleRange(0, 1, 0, 4)))
    views = {0: old, 1: new}
    for index, first, until in itertools.product(range(3), range(3, 7), range(3, 9)):
        found = ranges_of(new, index, first, until)
        assert merged(found) == found
        named = [
            int(rows(*b, batch_size=1)[0])
            for sample_range in found
            for b in range_batches(views[sample_range.view], sample_range)
        ]
        assert named == [p for round in range(first, until) for p in positions(views, new, round, index)]


def test_what_a_view_ends_too_early_to_read_is_left_over() -> None:
    backlog = (SampleRange(0, 0, 0, 5), SampleRange(0, 1, 2, 4))
    view = View(1, 10, (0, 1), (2, 1), 40, backlog)
    for until in range(8, 14):
        read = 3 * max(until - 10, 0)
        assert count_steps(left_over(view, until)) == max(9 - read, 0)
        assert left_over(view, until) == part(backlog, read, 99)
        assert fresh_before(view, until) == max(read - 9, 0)


def test_spare_batches_are_in_nobodys_cells() -> None:
    seen = {int(p) for member in (0, 1, 900) for step in range(4) for p in spare_rows(member, step, batch_size=3)}
    assert len(seen) == 36 and min(seen) > 1 << 50
    with pytest.raises(ValueError, match="member -1"):
        spare_rows(-1, 0, batch_size=1)
    with pytest.raises(ValueError, match="member 1 has no step 2"):
        rows(0, (3, 2), 1, 2, batch_size=1)
