"""Whether so many worker processes have room on this machine, asked before the first is started."""

from __future__ import annotations

import os
from pathlib import Path

_A_CORE = 8
_A_PROCESS = 200e6  # bytes that a worker takes before it has a model: torch and its libraries, after sharing


def refuse_too_many(
    workers: int, option: str = "world.workers =", mend: str = 'world.backend = "virtual" trains them in one process'
) -> None:
    """ValueError for more workers of this machine than 8 a core, or than its free memory holds. option: how they were
    asked for.
    """
    cores = os.cpu_count() or 1
    if workers > _A_CORE * cores:
        raise ValueError(f"{option} {workers}: more than {_A_CORE} a core of this machine's {cores}; {mend}")
    free = _free_memory()
    if free is not None and workers * _A_PROCESS > free:
        raise ValueError(
            f"{option} {workers}: each takes 0.2 GB before it has a model, {free / 1e9:.1f} GB are free; {mend}"
        )


def _free_memory() -> float | None:
    """Bytes, as the kernel thinks; None where it does not say."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return 1024.0 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    except (OSError, ValueError, StopIteration, IndexError):
        return None
