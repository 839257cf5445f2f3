"""A method whose workers are hit while they compute; in a module of its own, so that `--method` finds it."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import isles
from isles.replicas.methods.config import NoLoCoConfig
from tests.training.dying import wait_for

STEP = 6  # inner steps that are done when it happens, in the middle of a round of three


@dataclass(frozen=True, kw_only=True)
class StruckConfig(NoLoCoConfig):
    orders: str = ""
    """A file with the signal, the worker that it is sent to, and a file that is there before it is; without orders
    nobody is hit.
    """


class StruckNoLoCo(isles.NoLoCo):
    """NoLoCo; a worker gets a signal in its second forward pass of a step, and writes down when."""

    Config = StruckConfig

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._orders, self._passes = Path(self.config.orders), 0
        self.model.register_forward_hook(self._passed)

    def _passed(self, *_: Any) -> None:
        if self.steps != STEP or not self.model.training or not self._orders.is_file():
            return
        self._passes += 1
        number, victim, awaited = self._orders.read_text().split(maxsplit=2)
        if self._passes == 2 and self.group.transport.rank == int(victim):
            wait_for(Path(awaited))
            self._orders.with_suffix(".when").write_text(repr(time.time()))
            os.kill(os.getpid(), int(number))
