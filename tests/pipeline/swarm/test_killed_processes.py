"""Peers as processes over gloo, killed by SIGKILL at messages of their own: what the others have is one process's."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import pytest

import isles
from isles.comm.errors import WorkerFailed
from isles.comm.mesh import Mesh
from tests.pipeline.swarm import peers
from tests.pipeline.swarm.peers import Setting, furthest

SETTING = Setting(peers=(2, 2, 2), steps=2)
WORKERS = 6
MOMENTS = 10
VICTIMS = (0, 2, 4)  # of each stage


def killed(world: Mesh, setting: Setting, victim: int, at: int) -> tuple[Any, int]:
    """What the peer came to, and the messages that it sent or posted. victim: killed before the one of number `at`."""
    transport: Any = world.transport
    count, lock = 0, threading.Lock()

    def counted(verb: Any) -> Any:
        def act(*of: Any) -> Any:
            nonlocal count
            with lock:
                count += 1
                if world.rank == victim and count > at:
                    os.kill(os.getpid(), signal.SIGKILL)
            return verb(*of)

        return act

    transport.send, transport.recv = counted(transport.send), counted(transport.recv)
    return peers.train(world, setting), count


@pytest.fixture(scope="module")
def messages() -> list[int]:
    done = isles.run_local(killed, WORKERS, args=(SETTING, -1, 0))
    assert furthest(SETTING, [each for each, _ in done]) < 1e-12
    return [count for _, count in done]


@pytest.mark.long
@pytest.mark.parametrize("moment", range(MOMENTS))
def test_the_summed_gradients_of_the_others_are_one_process(moment: int, messages: list[int]) -> None:
    """Of both steps, in and around which it is killed."""
    victim = VICTIMS[moment % len(VICTIMS)]
    at = messages[victim] * (2 * moment + 1) // (2 * MOMENTS + 4)
    done = isles.run_local(killed, WORKERS, args=(SETTING, victim, at), return_errors=True)
    assert isinstance(done[victim], WorkerFailed)
    left = [each[0] for rank, each in enumerate(done) if rank != victim]
    assert furthest(SETTING, left) < 1e-12
