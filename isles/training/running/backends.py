"""How the workers of each backend are started: the one table of it, loaded when it is used.

A backend is a row of `isles.schema.BACKENDS` (what it is), a row here, and the module named here (how it starts).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, cast

from isles.launch.nodes import NodeGroup
from isles.training.config.sections import Config

STARTERS: dict[str, str] = {
    "distributed": "isles.training.running.processes",
    "virtual": "isles.training.running.virtual",
}


class Started(Protocol):
    """Workers under way, such as `isles.launch.workers.Workers`."""

    @property
    def failures(self) -> Sequence[int]:
        """Ranks in the order in which they failed."""

    def stop(self) -> None:
        """Ask all to stop after a common inner step (`Mesh.stop_here`). May be called from a signal handler."""

    def join(
        self,
        on_event: Callable[[Any], None] | None = None,
        on_failure: Callable[[int, Exception], None] | None = None,
    ) -> list[Any]:
        """All results in rank order, a failed worker's being its exception. Arguments as of `Workers.join`."""


StartTraining = Callable[[Config, Path, int | None, NodeGroup], Started]
"""(config, directory of the run, step to go on from, the machines)."""


class Starter(Protocol):
    """What a module of `STARTERS` holds."""

    def train(self, config: Config, out: Path, resume: int | None, node_group: NodeGroup) -> Started:
        """The workers of a run. resume: the step of the checkpoint to go on from."""

    def call(self, worker: Callable[..., Any], workers: int, config: Config, args: Sequence[Any], out: Path) -> Started:
        """`worker(world, *args)` on `workers` workers. out: for their logs."""


def starter(backend: str) -> Starter:
    """Of a backend's name, which [world] has checked."""
    return cast(Starter, import_module(STARTERS[backend]))
