"""Islands as members of a run whose workers come and go: one seat each, several workers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.training.elastic.processes import Processes
from tests.training.elastic.test_runs import fixed, small
from tests.training.runs import run

pytest.importorskip("zenoh")

ISLANDS = ("replicas.method=diloco", "world.inner=2")


@contextmanager
def processes(folder: Path, steps: int, islands: int) -> Iterator[Processes]:
    world = Processes(folder, *ISLANDS, founders=2 * islands, steps=steps)
    try:
        yield world
    finally:
        world.end()


def test_without_churn_they_are_those_of_the_fixed_world(tmp_path: Path) -> None:
    """The bits of the one model."""
    with processes(tmp_path, 20, 2) as world:
        joined = [world.join() for _ in range(2)]
        world.until(lambda: world.light.poll() is not None)
        world.until(lambda: all(process.poll() is not None for process in joined))
        assert [process.returncode for process in world.started] == [0, 0, 0], world.logs()
    config = small(tmp_path, 20, 4, "inner.lr=0.001", *ISLANDS)
    run(fixed(config), tmp_path / "fixed")
    mine, other = (load_file(str(tmp_path / name / "model.safetensors")) for name in ("run", "fixed"))
    assert mine.keys() == other.keys() and all(mine[name].equal(other[name]) for name in mine)
