"""Slow lines live: deadlines count from the last byte, and a chain of workers that wait is no loss."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import isles
from isles.comm.gloo.transfers import connections
from tests import netns
from tests.faults import lines
from tests.gloo import run_gloo


@pytest.fixture(autouse=True)
def a_line_of_ones_own() -> None:
    netns.skip_unless_available()
    if shutil.which("tc") is None or shutil.which("ip") is None:
        pytest.skip("a slow line: needs tc and ip (Debian: apt install iproute2)")


def test_a_message_of_four_deadlines_arrives() -> None:
    """0.5 MB at 0.5 Mbit/s, with deadlines of two seconds."""
    _, seconds = netns.run_isolated("tests.faults.lines:over_a_slow_line", "broadcast", 2, 2.0)
    assert seconds > 3 * 2.0, "the line is not slow: this test shows nothing"


@pytest.mark.long
def test_who_waits_in_a_chain_waits() -> None:
    """No byte moves between 0 and 1 while 1 receives from 2: 1's own word that its line moves is a sign of life."""
    seconds, *_ = netns.run_isolated("tests.faults.lines:over_a_slow_line", "chain", 3, 6.0)
    assert seconds > 3 * 6.0, "the line is not slow: this test shows nothing"


def knows_its_connections(world: isles.Mesh) -> bool:
    """Every peer's connection is known after joining, and none is kept open."""
    life, before = world.transport.liveness, len(connections())  # type: ignore[attr-defined]
    for _ in range(3):
        life._looked = 0.0
        life.look()
    return set(life._known) == {0, 1, 2} - {world.rank} and len(connections()) == before


def test_every_peer_is_seen() -> None:
    assert run_gloo(knows_its_connections, 3) == [True] * 3


def test_a_group_that_is_destroyed_is_noticed(tmp_path: Path) -> None:
    """By the closing itself, not by the process's end, while the connections are looked at all the time: no look holds
    one open.
    """
    assert isles.run_local(lines.destroyed, 2, args=(str(tmp_path / "noticed"),)) == [True, True]
