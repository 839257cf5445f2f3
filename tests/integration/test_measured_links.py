"""A network of machines measured pair by pair by `isles doctor --peer --write-links`, and a plan for it."""

from __future__ import annotations

import json
from itertools import combinations, permutations
from pathlib import Path

import pytest

from benchmarks._machines import Machine, machines, unavailable
from isles.network.links import read_links
from tests.cli.command import Command

RATES = (100e6, 20e6, 50e6)
"""Bits per second out of and into each machine: a pair has the smaller one."""


def measured(folder: Path, here: int, there: int, made: tuple[Machine, ...]) -> None:
    """One pair more in links.toml."""
    place = f"{made[there].address}:29400"
    host = Command("doctor", "--listen", place, folder=folder, machine=made[there])
    assert host.process.stderr is not None
    assert "waiting" in host.process.stderr.readline()
    words = ["--peer", place, "--write-links", "links.toml", "--nodes", f"{here},{there}"]
    caller = Command("doctor", *words, folder=folder, machine=made[here])
    ends = [caller.end(), host.end()]
    assert [code for code, _, _ in ends] == [0, 0], ends


@pytest.mark.long
def test_three_machines_are_measured_and_planned_for(tmp_path: Path) -> None:
    """All six ways within 15 % of what their token buckets let pass; `isles plan paths` reads the file."""
    if why := unavailable():
        pytest.skip(why)
    pairs = {pair: min(RATES[one] for one in pair) for pair in permutations(range(3), 2)}
    with machines(3) as made:
        for machine, rate in zip(made, RATES, strict=True):
            machine.limit(rate)
        for _ in range(3):  # where others keep the processors busy less comes through
            for here, there in combinations(range(3), 2):
                measured(tmp_path, here, there, made)
            links = read_links(str(tmp_path / "links.toml"))
            found = {pair: links.way_rate(*pair) for pair in pairs}
            if found == pytest.approx(pairs, rel=0.15):
                break
        words = ["links.toml", "--stages", "1,1,1", "--message", "1MB", "--task", "200ms", "--out", "plan.json"]
        code, _, error = Command("plan", "paths", *words, folder=tmp_path, machine=made[0]).end()
    assert code == 0, error
    assert found == pytest.approx(pairs, rel=0.15)
    assert json.loads((tmp_path / "plan.json").read_text())["paths"]
