"""What a run must be so that peers of its stages may come and go over a lighthouse."""

from __future__ import annotations

from isles.comm.elastic.orders import Rules
from isles.training.config.clustered import refuse_growing
from isles.training.config.sections import Config
from isles.training.growing import refuse_full, refuse_idle, refuse_unsupported


def among_peers(config: Config) -> Config:
    """`config`, for peers that join a lighthouse. ValueError, with the key and the mend, where they cannot."""
    routing, world = config.pipeline.routing, config.world
    if routing == "ravnest":
        refuse_growing(config.method, config.data)
    elif routing != "swarm":
        why = "its workers hold whole replicas" if routing == "fixed" else "its workers do not come and go yet"
        mend = "join it with isles join" if config.pipeline.stages == 1 else "use isles train --nodes"
        raise ValueError(f'pipeline.routing = "{routing}": {why}: {mend}')
    if world.is_simulated:
        raise ValueError(
            'world.backend = "virtual": real peers join a lighthouse; take it out, or use isles simulate --churn'
        )
    refuse_idle(config, "peers", "world.silence")
    if config.model.autocast == "fp16":
        raise ValueError('model.autocast = "fp16" is not there yet where peers come and go: choose "bf16" or "none"')
    refuse_unsupported(config, "peers", "run.loggers", "run.tokens", "world.elastic.join_state", "memory.vectors")
    refuse_idle(config, "peers", "run.keep_checkpoints", "world.join_deadline")
    refuse_full(world, world.workers)
    return config


def peer_rules(config: Config) -> Rules:
    """Of the lighthouse: a step is a round."""
    world = config.world
    return Rules(founders=world.workers, sync_every=1, last=config.run.steps, most=world.elastic.max_members)
