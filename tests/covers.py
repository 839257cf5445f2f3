"""Grids of which `make test` runs a cover, and `make test-long` the rest."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import pytest


def cover(names: Iterable[str], *axes: Sequence[Any], each: int, of: int = 1, turn: int = 0) -> list[Any]:
    """Every (name, one value of each axis) as a parameter: `each` of them a name, others for the next name, are run
    always; the others are long. Neighbouring names together meet every value of every axis. of, turn: of so many names
    only one is run always, as in `share`.
    """
    found = []
    for number, name in enumerate(names):
        chosen = {
            tuple(axis[(index + number * (place + 1)) % len(axis)] for place, axis in enumerate(axes))
            for index in range(each if number % of == turn % of else 0)
        }
        for values in itertools.product(*axes):
            found.append(pytest.param(name, *values, marks=() if values in chosen else pytest.mark.long))
    return found


def share(names: Iterable[str], turn: int, of: int, always: Collection[str] = ()) -> list[Any]:
    """Every name as a parameter: those of `always` and the `turn`-th of every `of` are run always; the others are long.
    Tests of what is decided in one place for all names take turns, so that together they meet every name.
    """
    found = []
    for number, name in enumerate(names):
        chosen = name in always or number % of == turn % of
        found.append(pytest.param(name, marks=() if chosen else pytest.mark.long))
    return found


def pairs(
    columns: Sequence[Sequence[Any]], fits: Callable[[tuple[Any, ...]], bool], alone: Collection[tuple[int, int]] = ()
) -> list[tuple[Any, ...]]:
    """Rows, a value of each column, in which every two values that any fitting row has together meet at least once.

    alone: pairs of columns whose values need not meet. Greedy: each row is the one that brings the most pairs that have
    not met, the first of equals, so it is always the same table.
    """
    every = [row for row in itertools.product(*columns) if fits(row)]
    meets = {
        row: {
            (one, other) for one, other in itertools.combinations(enumerate(row), 2) if (one[0], other[0]) not in alone
        }
        for row in every
    }
    missing = set().union(*meets.values())
    most = {row: len(met) for row, met in meets.items()}  # that a row may bring: ever less, so few are counted again
    found = []
    while missing:
        best = 0
        for one in every:
            if most[one] > best:
                most[one] = len(meets[one] & missing)
                if most[one] > best:
                    best, row = most[one], one
        found.append(row)
        missing -= meets[row]
    return found
