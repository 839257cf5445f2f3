"""What troubles cost the members of a run: who was lost without a reason, and how soon all were whole again."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

LATE = 5.0  # seconds after the end of a worker's trouble in which it may still be called lost: the lease, and some
LASTING = ("kill", "leave")  # a worker in such a trouble does not come back


@dataclass
class Trouble:
    """Something that was done to a run. worker: whom it was done to; "" for the lighthouse. at, free: seconds; from
    `free` on nothing keeps anybody from recovering.
    """

    what: str
    worker: str
    at: float
    free: float

    def excuses(self, worker: str, moment: float) -> bool:
        """Whether the loss of `worker` at that moment has this reason."""
        lasts = self.what in LASTING or moment <= self.free + LATE
        return self.worker == worker and self.at <= moment and lasts


def false_losses(
    entries: Iterable[Mapping[str, Any]], numbers: Mapping[int, str], troubles: Sequence[Trouble]
) -> list[tuple[float, str]]:
    """(moment, worker) of those who were lost, and to whom nothing had been done. entries: of the journal. numbers: the
    workers' names by member number, of all who have done a round; others are lost for good reason: they were killed.
    """
    lost = [(entry["at"], numbers.get(entry["member"], "")) for entry in entries if entry["event"] == "lost"]
    return [
        (moment, worker)
        for moment, worker in lost
        if worker and not any(one.excuses(worker, moment) for one in troubles if one.what not in ("join", "disk full"))
    ]


def recoveries(troubles: Sequence[Trouble], whole: Mapping[str, Sequence[float]]) -> dict[str, list[float]]:
    """By kind, the seconds from each trouble's end until those whom it concerns have exchanged with others again: the
    worker itself, or all others, where it is gone or the lighthouse was in trouble.

    whole: the ends of each worker's whole rounds, in order. Who falls into other trouble meanwhile is left out.
    """
    took: dict[str, list[float]] = {}
    for trouble in troubles:
        everybody = not trouble.worker or trouble.what in LASTING
        concerned = [
            worker
            for worker, ends in whole.items()
            if (ends and ends[0] < trouble.at and worker != trouble.worker if everybody else worker == trouble.worker)
        ]
        seconds = []
        for worker in concerned:
            back = next((end for end in whole[worker] if end > trouble.free), math.inf)
            others = (one for one in troubles if one is not trouble and one.worker == worker and one.what != "join")
            if not any(one.at < back and (one.what in LASTING or one.free > trouble.at) for one in others):
                seconds.append(back - trouble.free)
        took.setdefault(trouble.what, []).extend([max(seconds)] if seconds else [])
    return took


def table(troubles: Sequence[Trouble], took: Mapping[str, Sequence[float]]) -> str:
    """A line a kind: how many, and how long it took until all were whole again."""
    lines = [f"{'':28}{'number':>8}{'judged':>8}{'median s':>10}{'longest s':>11}"]
    for what, seconds in sorted(took.items()):
        number = sum(one.what == what for one in troubles)
        middle, most = (statistics.median(seconds), max(seconds)) if seconds else (math.nan, math.nan)
        lines.append(f"{what:28}{number:8}{len(seconds):8}{middle:10.2f}{most:11.2f}")
    return "\n".join(lines)
