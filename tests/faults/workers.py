"""What the worker processes of these tests do."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import torch

import isles
from isles.comm.group import Group
from isles.comm.mesh import Mesh
from tests.replicas.workers import Net, sgd, train_step, weights


def meets(world: Mesh, stopped: str) -> int:
    """Worker 1 stops itself (SIGSTOP) at a moment: in a round that the others wait for, or when they are done."""
    if world.rank == 1 and stopped == "in a round":
        os.kill(os.getpid(), signal.SIGSTOP)
    world.world.all_gather(torch.zeros(1))
    if world.rank == 1 and stopped == "at the end":
        os.kill(os.getpid(), signal.SIGSTOP)
    return world.rank


def ends_solo(world: Mesh, moment: str, signal_number: int) -> tuple[float, float, int]:
    """NoLoCo with `solo`; worker 1 gets a signal in the last collective of the run, `moment`."""
    model = Net()
    optimizer = isles.NoLoCo(model, sgd(model), world.outer, sync_every=3, on_peer_failure="solo")
    for step in range(1, 7):
        train_step(optimizer, world.rank, step)
    if world.rank == 1:
        mean = Group.mean

        def struck(self: Group, *arguments: Any, **more: Any) -> None:
            if (moment == "spread") == (more.get("channel") == "eval"):
                os.kill(os.getpid(), signal_number)
            mean(self, *arguments, **more)

        Group.mean = struck  # type: ignore[method-assign]
    spread = optimizer.replica_std()
    optimizer.consolidate()
    return spread, float(weights(model).double().sum()), optimizer.survivors().size


class Stands(isles.NoSync):
    """Worker 1 stands still in its third step."""

    def after_inner_step(self) -> None:
        while self.steps == 3 and self.group.rank == 1:
            time.sleep(1.0)


class Asked(isles.NoSync):
    """Worker 1 is asked to end in its fifth step."""

    def after_inner_step(self) -> None:
        if self.steps == 5 and self.group.rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.02)
