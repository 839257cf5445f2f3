"""What test_lines.py has done in a namespace of its own, where the loopback interface is as slow as it wants."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import torch

import isles
from isles.comm.collectives import basic as collectives
from isles.comm.errors import CommError, PeerLost
from isles.comm.group import Group
from isles.comm.mesh import Mesh
from isles.comm.transport import Deadlines
from tests.training.dying import wait_for

RATE = 0.5e6  # bits per second
BYTES = 500_000


def slow() -> None:
    """From now on loopback carries RATE."""
    for words in (
        "ip link set lo mtu 1500",
        f"tc qdisc replace dev lo root tbf rate {RATE:.0f}bit burst 6000 latency 400ms",
    ):
        subprocess.run(words.split(), check=True)


def over_a_slow_line(what: str, workers: int, deadline: float) -> list[Any]:
    """Results of `what` on real processes, with that deadline on every channel."""
    waits = Deadlines(control=deadline, inner=deadline, outer=deadline, eval=deadline, slowest_link=1e12)
    return isles.run_local(globals()[what], workers, deadlines=waits)


def meet(group: Group) -> None:
    """All have come here, however long a busy machine takes for what comes before."""
    group.start(collectives.all_gather(group.call(), torch.zeros(1)), deadline=60.0).wait()


def broadcast(world: Mesh) -> float:
    """Seconds of a message that takes four deadlines."""
    if world.rank == 0:
        slow()
    meet(world.world)
    start, data = time.monotonic(), torch.full((BYTES,), world.rank, dtype=torch.uint8)
    world.world.broadcast(data)
    assert not data.any()
    seconds = time.monotonic() - start
    world.world.barrier()  # the sender is done as soon as its kernel has taken the message
    return seconds


def chain(world: Mesh) -> float:
    """Seconds for which worker 0 waits for worker 1, which still receives from worker 2 over the slow line."""
    group, start = world.world, time.monotonic()
    if world.rank == 0:
        slow()
    meet(group)
    if world.rank > 0:
        group.among((1, 2)).broadcast(torch.zeros(3 * BYTES, dtype=torch.uint8), source=1)
    if world.rank < 2:
        group.exchange(1 - world.rank, torch.zeros(1))
    meet(group.among((0, 1, 2)))
    return time.monotonic() - start


def stopped(world: Mesh) -> float | None:
    """Worker 1 is stopped in the middle of what it sends; worker 0 waits for it."""
    if world.rank == 0:
        slow()
    meet(world.world)
    if world.rank == 1:
        group = world.world
        sending = group.start(collectives.broadcast(group.call(), torch.zeros(BYTES, dtype=torch.uint8), 1))
        time.sleep(1.0)
        os.kill(os.getpid(), signal.SIGSTOP)
        sending.wait()
    start = time.monotonic()
    try:
        world.world.broadcast(torch.zeros(BYTES, dtype=torch.uint8), source=1)
    except CommError:
        return time.monotonic() - start
    return None


def destroyed(world: Mesh, noticed: str) -> bool:
    """Worker 1 closes its connections, and lives until worker 0, which looks at them all the while and waits for it,
    has written `noticed`: whether that was so.
    """
    world.world.barrier()
    if world.rank == 1:
        time.sleep(1.0)
        world.transport.close()
        wait_for(Path(noticed))
        return Path(noticed).exists()
    try:
        world.world.start(collectives.exchange(world.world.call(), 1, torch.zeros(1)), deadline=60.0).wait()
    except PeerLost:
        Path(noticed).touch()
        return True
    return False
