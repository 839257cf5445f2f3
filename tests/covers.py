"""Grids of which `make test` runs a cover, and `make test-long` the rest."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import pytest


def cover(names: Iterable[str], *axes: Sequence[Any], each: int) -> Iterator[Any]:
    """Every (name, one value of each axis) as a parameter: `each` of them a name, others for the next name, are run
    always; the others are long. Neighbouring names together meet every value of every axis.
    """
    for number, name in enumerate(names):
        chosen = {
            tuple(axis[(turn + number * (place + 1)) % len(axis)] for place, axis in enumerate(axes))
            for turn in range(each)
        }
        for values in itertools.product(*axes):
            yield pytest.param(name, *values, marks=() if values in chosen else pytest.mark.long)


def share(names: Iterable[str], turn: int, of: int, always: Collection[str] = ()) -> Iterator[Any]:
    """Every name as a parameter: those of `always` and the `turn`-th of every `of` are run always; the others are long.
    Tests of what is decided in one place for all names take turns, so that together they meet every name.
    """
    for number, name in enumerate(names):
        chosen = name in always or number % of == turn % of
        yield pytest.param(name, marks=() if chosen else pytest.mark.long)
