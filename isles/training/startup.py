"""How workers of each backend are started, and what that takes on all of them: how long they wait.

A backend is a row of `isles.base.schema.BACKENDS` (what it is), a row here, and the module named here (how it starts).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from isles.comm.transport import Deadlines
from isles.launch.nodes import NodeGroup
from isles.training.config.conflicts import longest_wait, plan_of
from isles.training.config.sections import Config

STARTERS: dict[str, str] = {
    "distributed": "isles.running.backends",
    "virtual": "isles.running.virtual",
}
_PAUSES = 1000.0  # mean lengths of a pause: chance e^-1000, and room for many pauses in a round


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


def starter(backend: str) -> Any:
    """The module of a backend, which [world] has checked: `train`, a `StartTraining`, and `call(worker, workers,
    config, args, out)`, which starts `worker(world, *args)` on so many workers. out: for their logs.
    """
    return import_module(STARTERS[backend])


def deadlines(config: Config) -> Deadlines:
    """The waits that [world] asks for. A deadline tells a lost worker from a slow one; one that pauses comes back, so
    who cannot go on alone waits for it however long it stays away.
    """
    world = config.world
    own = Deadlines(
        outer=world.outer_deadline,
        eval=world.eval_deadline,
        pipeline=world.pipeline_deadline,
        slowest_link=world.slowest_link,
        join=world.join_deadline,
        silence=world.silence,
    )
    plan = plan_of(config.pipeline)
    if plan is not None:
        waits = {name: max(own.of(name), longest_wait(plan)) for name in ("inner", "outer", "pipeline")}
        own = replace(own, **waits)
    if world.virtual.pauses is None:
        return own
    patience = {
        name: max(_PAUSES * world.virtual.pause_seconds, own.of(name))
        for name in ("control", "inner", "outer", "pipeline", "eval")
    }
    return replace(own, **(patience | ({"outer": own.outer} if config.replicas.survives else {})))
