"""Faults that a worker process of a trial brings upon itself; the plan lies beside the run directory.

FOLDER/fault.json    {"kind", "moment", "worker"}; taken away when the run is resumed
FOLDER/when          host time (seconds) at which it struck
FOLDER/run           the run directory
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from isles.comm.gloo.transport import DistributedTransport
from isles.comm.mesh import Mesh
from isles.running.backends import train_process
from isles.training import trainer as training
from isles.training.config.sections import Config
from isles.training.records.checkpoint import Checkpoints

SIGNALS = {"KILL": signal.SIGKILL, "STOP": signal.SIGSTOP, "TERM": signal.SIGTERM}
KINDS = (*SIGNALS, "SEGV", "thread", "NaN", "length", "round", "disk")
MOMENTS = ("join", "first round", "round", "checkpoint", "validation", "end")
FIRST, LATER = 3, 7  # inner steps before which "first round" and "round" begin


def struck_process(world: Mesh, config: Config, out: Path, resume: int | None) -> dict[str, Any] | None:
    """`train_process` in a trial."""
    plan = out.parent / "fault.json"
    if plan.exists():
        fault = json.loads(plan.read_text())
        if fault["worker"] == world.rank:
            _arm(fault["kind"], fault["moment"], out)
    return train_process(world, config, out, resume)


def note_time(out: Path) -> None:
    """When it struck."""
    (out.parent / "when").write_text(repr(time.time()))


def _arm(kind: str, moment: str, out: Path) -> None:
    """Have `kind` happen at `moment`, once."""

    def strike(trainer: Any) -> None:
        if not armed:
            return
        armed.clear()
        note_time(out)
        if kind in SIGNALS:
            os.kill(os.getpid(), SIGNALS[kind])
        elif kind == "SEGV":
            ctypes.string_at(0)
        elif kind == "thread":
            threading.Thread(target=os._exit, args=(7,)).start()
            time.sleep(5.0)
        elif kind == "NaN":
            with torch.no_grad():
                for parameter in trainer.model.parameters():
                    parameter.fill_(float("nan"))
        elif kind in ("length", "round"):
            _spoil_a_message(kind)
        elif kind == "disk":
            _fill_the_disk()

    armed = [True]
    run, seen = training.Trainer.run, []

    def at(name: str, when: Callable[[Any], bool] = lambda trainer: True) -> None:
        method = getattr(training.Trainer, name)

        def hit(self: Any, *arguments: Any) -> Any:
            if when(self):
                strike(self)
            return method(self, *arguments)

        setattr(training.Trainer, name, hit)

    def remembered(self: Any, *arguments: Any) -> Any:
        seen.append(self)
        return run(self, *arguments)

    training.Trainer.run = remembered  # type: ignore[method-assign]
    if moment == "first round":
        at("step", lambda trainer: trainer.optimizer.steps == FIRST - 1)
    elif moment == "round":
        at("step", lambda trainer: trainer.optimizer.steps == LATER - 1)
    elif moment == "validation":
        at("validate")
    elif moment == "end":
        at("conclude")
    elif moment == "checkpoint":
        write = Checkpoints.write_shard

        def hit(self: Any, step: int, *arguments: Any) -> Any:
            if step > 4:  # the first one is whole
                strike(seen[0])
            return (write if Checkpoints.write_shard is hit else Checkpoints.write_shard)(self, step, *arguments)

        Checkpoints.write_shard = hit  # type: ignore[method-assign]


def _spoil_a_message(kind: str) -> None:
    """The next message goes out short, or under the next round's address."""
    send, left = DistributedTransport.send, [True]

    def spoilt(self: Any, peer: int, data: Any, tag: Any) -> Any:
        if left and tag.channel != "control":
            left.clear()
            if kind == "length":
                data = data[: max(data.numel() // 2, 1)].contiguous()
            else:
                tag = tag._replace(round=tag.round + 1)
        return send(self, peer, data, tag)

    DistributedTransport.send = spoilt  # type: ignore[method-assign]


def _fill_the_disk() -> None:
    """From now on nothing is written."""

    def full(*arguments: Any, **more: Any) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    Checkpoints.write_shard = full  # type: ignore[method-assign]
    training.save_model = full
