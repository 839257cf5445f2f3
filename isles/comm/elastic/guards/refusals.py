"""What was not taken from others, counted: by the seat that said it, and by the reason."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Annotated

from pydantic import Field

from isles.fields import Str, read

_MOST = 256  # reasons that are told apart: what a stranger writes must not fill the memory
_LONGEST = 100  # characters
OTHERS = "other reasons"
RefusalRow = tuple[int, str, int]
_Rows = Annotated[
    list[
        tuple[
            Annotated[int, Field(strict=True, ge=-1, lt=1 << 30)],
            Annotated[Str, Field(max_length=_LONGEST)],
            Annotated[int, Field(strict=True, gt=0, lt=1 << 53)],
        ]
    ],
    Field(max_length=_MOST + 1, fail_fast=True),
]


class Refusals(Counter[tuple[int, str]]):
    """By (seat, reason); seat -1: somebody without a seat, or in another's name. Safe to call from several threads."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()

    def note(self, seat: int, why: str) -> None:
        """Once more."""
        key = (seat, why[:_LONGEST])
        with self._lock:
            if key not in self and len(self) >= _MOST:
                key = (-1, OTHERS)
            self[key] += 1

    def rows(self) -> list[RefusalRow]:
        """(seat, reason, how often), JSON-able."""
        with self._lock:
            return [(seat, why, times) for (seat, why), times in sorted(self.items())]


def together(told: Iterable[Sequence[RefusalRow]]) -> list[RefusalRow]:
    """The rows of several workers put together, as if one had refused all of it."""
    every = Refusals()
    for seat, why, times in chain.from_iterable(told):
        key = (seat, why) if (seat, why) in every or len(every) < _MOST else (-1, OTHERS)
        every[key] += times
    return every.rows()


def told_rows(told: object) -> list[RefusalRow]:
    """`rows` as another machine tells them. ValueError where they are none."""
    return read(_Rows, told, "a list of refusals that is none")
