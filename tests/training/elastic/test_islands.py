"""Islands as members of a run whose workers come and go: one seat each, several workers."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from isles.comm.elastic.record import EXCHANGES, RoundLine, from_line
from tests.training.elastic.processes import Processes
from tests.training.elastic.test_runs import small
from tests.training.runs import run

pytest.importorskip("zenoh")

ISLANDS = ("replicas.method=diloco", "world.inner=2")


@contextmanager
def processes(folder: Path, steps: int, islands: int, *settings: str) -> Iterator[Processes]:
    world = Processes(folder, *ISLANDS, *settings, founders=2 * islands, steps=steps)
    try:
        yield world
    finally:
        world.end()


@pytest.mark.long
@pytest.mark.parametrize(("inside", "backend"), [("ddp", "virtual"), ("fsdp", "distributed")])
def test_without_churn_they_are_those_of_the_fixed_world(tmp_path: Path, inside: str, backend: Any) -> None:
    """The bits of the one model. Each place is linked directly with its place in the other island; and whoever keeps
    the run needs no torch from its beginning to its end.
    """
    with processes(tmp_path, 10, 2, f"world.inside={inside}") as world:
        joined = [world.join("--listen", "127.0.0.1:0") for _ in range(2)]
        world.until(lambda: world.light.poll() is not None)
        world.until(lambda: all(process.poll() is not None for process in joined))
        assert [process.returncode for process in world.started] == [0, 0, 0], world.logs()
        assert all(re.search(rf"{line}worker [01]: direct\n", world.logs()) for line in ("isles: ", "place 1: "))
        links = json.loads((tmp_path / "run" / "summary.json").read_text())["links"]
        assert links["direct"] > 4 * links["relayed"], links  # it may be that they begin before they have met
        assert (tmp_path / "0.log").read_text().endswith("loaded: zenoh\n"), world.logs()
    config = small(tmp_path, 10, 4, "inner.lr=0.001", *ISLANDS, f"world.inside={inside}")
    real = replace(config, world=replace(config.world, backend=backend))
    run(real, tmp_path / "fixed")
    mine, other = (load_file(str(tmp_path / name / "model.safetensors")) for name in ("run", "fixed"))
    assert mine.keys() == other.keys() and all(mine[name].equal(other[name]) for name in mine)


def rounds(out: Path) -> dict[int, list[RoundLine]]:
    """By seat, as they were reported."""
    found: dict[int, list[RoundLine]] = {}
    for text in (out / EXCHANGES).read_text().splitlines():
        line = from_line(json.loads(text))
        if isinstance(line, RoundLine):
            found.setdefault(line.seat, []).append(line)
    return found


def workers_of(pid: int) -> list[int]:
    """The processes of an island: grandchildren of the command, by way of what it forks them from."""
    parents = {int(each.name): int(each.joinpath("stat").read_text().rsplit(")", 1)[1].split()[1]) for each in alive()}
    return [child for child, parent in parents.items() if parents.get(parent) == pid]


def alive() -> list[Path]:
    return [each for each in Path("/proc").iterdir() if each.name.isdecimal() and each.joinpath("stat").exists()]


@pytest.mark.long
def test_they_come_and_go(tmp_path: Path) -> None:
    """A third one joins and lands the means of all; one that loses a worker leaves as a whole, and the others go on;
    one that is asked to leave ends its round first. All workers are killed, and the run goes on where the lighthouse's
    state was.
    """
    with processes(tmp_path, 600_000, 2, "run.checkpoint_every=20") as world:
        founders = [world.join() for _ in range(2)]

        def newest(seat: int) -> int:
            return max((line.round for line in rounds(world.out).get(seat, [])), default=0)

        world.until(lambda: min(newest(0), newest(1)) >= 10)
        third = world.join()
        world.until(lambda: newest(2) > 0)
        since = newest(2)
        world.until(lambda: newest(2) >= since + 10)
        assert {line.seats for line in rounds(world.out)[2][-8:]} == {(0, 1, 2)}
        os.kill(workers_of(founders[1].pid)[1], signal.SIGKILL)
        world.until(lambda: founders[1].poll() is not None)
        assert founders[1].returncode == 1 and "lost a worker" in world.logs()
        assert not workers_of(founders[1].pid)
        since = newest(0)
        world.until(lambda: min(newest(0), newest(2)) >= since + 10)
        third.send_signal(signal.SIGINT)
        world.until(lambda: third.poll() is not None)
        assert third.returncode == 0, world.logs()
        world.until(lambda: list((world.out / "states").glob("round-*-place-1*")))
        for pid in workers_of(founders[0].pid):
            os.kill(pid, signal.SIGKILL)
        world.until(lambda: founders[0].poll() is not None)
        kept = max(int(path.name.split("-")[1]) for path in (world.out / "states").glob("round-*-place-1*"))
        for _ in range(2):
            world.join()
        world.until(lambda: min(newest(3), newest(4)) >= kept + 10, 120.0)
        assert min(line.round for line in rounds(world.out)[3]) > kept
