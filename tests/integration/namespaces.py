"""Two machines on one, for tests: see benchmarks/_machines.py."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from benchmarks._machines import Machine, machines, unavailable

__all__ = ["Machine", "skip_unless_available", "two_machines"]


def skip_unless_available() -> None:
    """Skip the running test, with one line, where namespaces cannot be made."""
    if reason := unavailable("nft"):
        pytest.skip(reason)


@contextlib.contextmanager
def two_machines() -> Iterator[tuple[Machine, Machine]]:
    """Two machines that can reach each other; removed at the end, whatever happens."""
    skip_unless_available()
    with machines(2) as (left, right):
        yield left, right
