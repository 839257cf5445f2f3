"""How long the workers of a run wait for each other, by what [world] asks for and what the run may take."""

from __future__ import annotations

from dataclasses import replace

from isles.comm.transport import Deadlines
from isles.training.config.conflicts import longest_wait, plan_of
from isles.training.config.sections import Config

_PAUSES = 1000.0  # mean lengths of a pause: chance e^-1000, and room for many pauses in a round


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
