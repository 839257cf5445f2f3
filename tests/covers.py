"""Grids of which `make test` runs a cover, and `make test-long` the rest."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import pytest


def cover(names: Iterable[str], *axes: Sequence[Any], each: int) -> list[Any]:
    """Every (name, one value of each axis) as a parameter: `each` of them a name, others for the next name, are run
    always; the others are long. Neighbouring names together meet every value of every axis.
    """
    found = []
    for number, name in enumerate(names):
        chosen = {
            tuple(axis[(turn + number * (place + 1)) % len(axis)] for place, axis in enumerate(axes))
            for turn in range(each)
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
