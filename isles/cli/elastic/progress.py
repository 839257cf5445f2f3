"""Live progress of a run whose workers come and go."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from typing_extensions import override

from isles.cli.progress import Progress


class ComingAndGoing(Progress):
    """Progress of the workers that are there: one that is lost does not hold the bar up. members: their seats now."""

    def __init__(self, method: str, steps: int) -> None:
        super().__init__(method, 0, steps)
        self.members: Callable[[], Sequence[int]] = list

    @override
    def counted(self) -> list[dict[str, Any]]:
        there = self.members()
        self.workers = len(there)
        self.latest = {seat: line for seat, line in self.latest.items() if seat in there}
        return list(self.latest.values())
