"""Who is in which round: a view names the workers of the rounds from `since` on, until a newer view takes over."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, NamedTuple

from isles.fields import MANY, Exact, Int, Ints, Str


class Lot(NamedTuple):
    """Data that nobody has read for good: `steps` inner steps of the worker at `place` in the view numbered `view`.

    first: the first of them, counted over all inner steps of that place since the view began.
    """

    view: Int
    place: Int
    first: Int
    steps: Int


@dataclass(frozen=True, slots=True)
class View(Exact):
    """The workers of a run for the rounds that it covers.

    Round r belongs to the newest committed view with `since` <= r. A fixed world has one view, number 0.

    seats: numbers of the workers, in the order of their places; a number is never used twice in a run.
    steps: inner steps a round of each place; empty: as many as the method is set to, for everybody.
    start: batches (of one worker and inner step) of the data that come before the first one of this view.
    owed: what the first rounds of this view read before they go on in the order of the data.
    identities: of the workers, in the order of `seats`, what others know them by; empty where they have none.
    """

    number: Int
    since: Int
    seats: Ints
    steps: Ints = ()
    start: Int = 0
    owed: Annotated[tuple[Lot, ...], MANY] = ()
    identities: Annotated[tuple[Str, ...], MANY] = ()

    def place(self, seat: int) -> int | None:
        """Where `seat` stands in this view; None where it is not in it."""
        return self.seats.index(seat) if seat in self.seats else None
