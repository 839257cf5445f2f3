"""What each worker of a run does, whatever the run is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from isles.comm.mesh import Mesh
from isles.data import Corpus
from isles.training.config.sections import Config
from isles.training.draws import seed_draws
from isles.training.kinds import kind_of
from isles.training.records.checkpoint import Checkpoints


def train_worker(
    world: Mesh, config: Config, out: Path | None = None, resume: int | None = None, corpus: Corpus | None = None
) -> dict[str, Any] | None:
    """What each worker of a run does; the function that launchers start. resume: the step of the checkpoint to go on
    from. corpus: see `trainer_of`.
    """
    seed_draws(config.run.seed, world.rank)
    kind = kind_of(config.pipeline)
    return kind.train(world.arranged(kind.layout(config)), config, out, resume, corpus)


def train_replica(
    world: Mesh, config: Config, out: Path | None, resume: int | None, corpus: Corpus | None
) -> dict[str, Any] | None:
    """One whose trainer is a `Trainer`."""
    kind = kind_of(config.pipeline)
    trainer = kind.trainer(config, world, corpus)
    with trainer.memory:
        if resume is not None:
            assert out is not None
            checkpoints = Checkpoints(out)
            trainer.load_state_dict(checkpoints.read_shard(resume, kind.seat(checkpoints, resume, world.rank)))
        return trainer.run(out)
