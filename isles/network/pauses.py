"""Workers that pause and resume: when worker `rank` of a run is away, as a function of the seed alone.

    up for Exp(every) seconds, away for Exp(seconds), up again, ...        from clock 0 on, each worker by itself

A pause is a suspended machine: it computes nothing and notices no arrival until it resumes with its state. Messages
that it handed to its link before still leave.
"""

from __future__ import annotations

import math
import threading
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from isles.network.noise import uniform

_STREAM = 0x70617573  # keeps these numbers apart from those of the messages' jitter


@dataclass(frozen=True, slots=True, kw_only=True)
class Pauses:
    """every: mean seconds from a return to the next pause. seconds: mean length of a pause; both exponential."""

    every: float
    seconds: float

    def __post_init__(self) -> None:
        for key in ("every", "seconds"):
            if not 0 < getattr(self, key) < math.inf:
                raise ValueError(f"pauses: {key} = {getattr(self, key)}: choose a positive number of seconds")

    def of(self, rank: int, seed: int) -> Absences:
        return Absences(self, rank, seed)


@dataclass(frozen=True, slots=True)
class KnownPauses:
    """Pauses that are written down: by rank, (leaves, returns) in seconds, in their order."""

    pauses: Mapping[int, Sequence[tuple[float, float]]]

    def of(self, rank: int, seed: int) -> Absences | None:
        pauses = self.pauses.get(rank)
        return KnownAbsences(pauses) if pauses else None


class Absences:
    """When one worker is away. Answers depend on the arguments alone, not on what was asked before."""

    def __init__(self, pauses: Pauses, rank: int, seed: int) -> None:
        self._pauses, self._key = pauses, (seed, rank, _STREAM)
        self._leaves: list[float] = []
        self._returns: list[float] = []
        self._growing = threading.Lock()  # its worker computes while events ask for the same pauses

    def back(self, time: float) -> float:
        """`time` (seconds) if the worker is up then, else when it is back."""
        at = self._last(time)
        return time if at < 0 else max(time, self._returns[at])

    def after(self, time: float, seconds: float) -> float:
        """When `seconds` of being up, begun at `time`, are over."""
        time = self.back(time)
        at = self._last(time) + 1
        while time + seconds > self._leaves[at]:
            seconds -= self._leaves[at] - time
            time = self._returns[at]
            at += 1
            self._grow(time)
        return time + seconds

    def next(self, time: float) -> float:
        """When the first pause that has not begun at `time` begins."""
        return self._leaves[self._last(time) + 1]

    def between(self, start: float, end: float) -> list[tuple[float, float]]:
        """(leaves, returns) of each pause between two moments, cut off there."""
        first, last = self._last(start), self._last(end)
        pauses = zip(self._leaves[max(first, 0) : last + 1], self._returns[max(first, 0) : last + 1], strict=True)
        return [(max(leaves, start), min(back, end)) for leaves, back in pauses if leaves < end and back > start]

    def _last(self, time: float) -> int:
        """The number of the latest pause that has begun by `time`, -1 before the first; one more is known."""
        self._grow(time)
        return bisect_right(self._leaves, time) - 1

    def _grow(self, time: float) -> None:
        if self._leaves and self._leaves[-1] > time:
            return
        with self._growing:
            while not self._leaves or self._leaves[-1] <= time:
                number = len(self._leaves)
                leaves = (self._returns[-1] if number else 0.0) + self._draw(self._pauses.every, 2 * number)
                self._returns.append(leaves + self._draw(self._pauses.seconds, 2 * number + 1))
                self._leaves.append(leaves)  # last: whoever does not hold the lock looks at these first

    def _draw(self, mean: float, number: int) -> float:
        return -mean * math.log(uniform(*self._key, number))


class KnownAbsences(Absences):
    """Those that are known beforehand: (leaves, returns) in their order."""

    def __init__(self, pauses: Sequence[tuple[float, float]]) -> None:
        self._leaves = [*(leaves for leaves, _ in pauses), math.inf]
        self._returns = [*(back for _, back in pauses), math.inf]

    def _grow(self, time: float) -> None:
        """All are known."""
