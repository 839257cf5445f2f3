"""What each worker of a run does, whatever the run is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from isles.comm.mesh import Mesh
from isles.data import Corpus
from isles.training.clustered.opening import train_clustered
from isles.training.config.sections import Config
from isles.training.draws import seed_draws
from isles.training.parts import trainer_of
from isles.training.placement import layout_of
from isles.training.records.checkpoint import Checkpoints, seat_of
from isles.training.swarmed.trainer import SwarmTrainer


def train_worker(
    world: Mesh, config: Config, out: Path | None = None, resume: int | None = None, corpus: Corpus | None = None
) -> dict[str, Any] | None:
    """What each worker of a run does; the function that launchers start. resume: the step of the checkpoint to go on
    from. corpus: see `trainer_of`.
    """
    seed_draws(config.run.seed, world.rank)
    world = world.arranged(layout_of(config))
    if config.pipeline.routing == "ravnest":
        return train_clustered(world, config, out, resume, corpus)
    trainer = (SwarmTrainer if config.pipeline.routing == "swarm" else trainer_of)(config, world, corpus)
    with trainer.memory:
        if resume is not None:
            assert out is not None
            checkpoints, seat = Checkpoints(out), world.rank
            if isinstance(trainer, SwarmTrainer):
                seat = seat_of(checkpoints, resume, world.rank)
            trainer.load_state_dict(checkpoints.read_shard(resume, seat))
        return trainer.run(out)
