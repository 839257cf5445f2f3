"""Benchmarks on several machines: what is left when a worker fails."""

from __future__ import annotations

import os
import subprocess
from typing import Any

import pytest

from benchmarks._machines import machines
from benchmarks._stage import play
from tests.integration.namespaces import skip_unless_available


def stumble(world: Any, rank: int) -> None:
    if world.rank == rank:
        raise ValueError("not today")
    world.world.barrier()


@pytest.mark.parametrize("function", ["stumbling:anything", pytest.param("test_stage:stumble", marks=pytest.mark.long)])
def test_a_worker_that_fails_ends_the_play(function: str) -> None:
    """Its words are told at once, although the other goes on or waits for it; no namespace is left."""
    skip_unless_available()
    with pytest.raises(RuntimeError, match=r"machine 1: .*ValueError: not today"), machines(2) as cast:
        cast[0].limit(50e6)
        assert f"isles-{os.getpid()}-" in cast[0].name
        play(cast, f"tests.integration.{function}", {"rank": 1}, 60)
    left = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert f"isles-{os.getpid()}-" not in left
