"""The members of a world that may change: who is in which rounds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class View:
    """Round r of an outer method belongs to the newest view with `since` <= r.

    A seat is a worker's number in this run and never used twice. In a world that does not change it is the rank, and
    there is one view, number 0.
    """

    number: int
    since: int
    seats: tuple[int, ...]
