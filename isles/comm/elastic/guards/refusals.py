"""What was not taken from others, counted: by the seat that said it, and by the reason."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain

_MOST = 256  # reasons that are told apart: what a stranger writes must not fill the memory
_LONGEST = 100  # characters
OTHERS = "other reasons"
RefusalRow = tuple[int, str, int]


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
    if isinstance(told, Sequence) and len(told) <= _MOST + 1:
        found = [one for one in told if _is_row(one)]
        if len(found) == len(told):
            return [(seat, why, times) for seat, why, times in found]
    raise ValueError("a list of refusals that is none")


def _is_row(one: object) -> bool:
    match one:
        case [int(seat), str(why), int(times)]:
            return -1 <= seat < 1 << 30 and len(why) <= _LONGEST and why.isprintable() and 0 < times < 1 << 53
    return False
