"""What the benchmarks share: interleaved timing, rows with bounds, tables.

Shared machines are noisy, so parties that are compared run in turns, and a number is a median. CPU seconds of the
process (all threads) are what bounds look at; wall seconds stand beside them.
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from statistics import median

import torch


@dataclass(frozen=True)
class Times:
    """Seconds of every repeat of one party, in the order of the repeats."""

    cpu: list[float]
    wall: list[float]

    def per(self, other: Times) -> float:
        """Median over the repeats of this party's CPU seconds per the other's in the same repeat."""
        return median(mine / theirs for mine, theirs in zip(self.cpu, other.cpu, strict=True))


@dataclass(frozen=True)
class Row:
    """One result; `bound` is a relation to it, such as ("<=", 1.25), or None where it is for information."""

    name: str
    value: float
    unit: str
    bound: tuple[str, float] | None = None
    note: str = ""

    @property
    def kept(self) -> bool:
        """True if the value keeps its bound."""
        if self.bound is None:
            return True
        relation, limit = self.bound
        return self.value >= limit if relation == ">=" else self.value <= limit


def interleaved(parties: Mapping[str, Callable[[], object]], repeats: int, warm_up: int = 1) -> dict[str, Times]:
    """Run the parties in turns, `repeats` times each after `warm_up`; who begins moves on by one every turn."""
    names = list(parties)
    times = {name: Times([], []) for name in names}
    for turn in range(warm_up + repeats):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            wall, cpu = time.perf_counter(), time.process_time()
            parties[name]()
            cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
            if turn >= warm_up:
                times[name].cpu.append(cpu)
                times[name].wall.append(wall)
    return times


def machine() -> str:
    """Processor and versions, in words."""
    model = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo") as lines:
            model = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    return f"{model}, {os.cpu_count()} cores, torch {torch.__version__}, Python {platform.python_version()}"


def report(rows: list[Row], as_json: bool) -> int:
    """Print the rows; the exit code: 1 if a bound is missed."""
    if as_json:
        print(json.dumps({"machine": machine(), "rows": [{**asdict(row), "kept": row.kept} for row in rows]}, indent=1))
        return int(not all(row.kept for row in rows))
    print(machine())
    width = max(len(row.name) for row in rows)
    for row in rows:
        bound = "" if row.bound is None else f"{row.bound[0]} {row.bound[1]:g}"
        verdict = "" if row.bound is None else ("ok" if row.kept else "MISSED")
        print(f"{row.name:<{width}}  {row.value:8.3f} {row.unit:<12} {bound:<8} {verdict:<6}  {row.note}".rstrip())
    return int(not all(row.kept for row in rows))
