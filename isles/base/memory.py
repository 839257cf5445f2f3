"""The memory of this machine."""

from __future__ import annotations

import os
from pathlib import Path


def free_memory() -> float:
    """Bytes of memory that are available, as the kernel estimates; all memory if it does not say."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return 1024.0 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    except (OSError, ValueError, StopIteration, IndexError):
        return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
