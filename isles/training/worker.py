"""What each worker of a run does, whatever the run is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from isles.comm.mesh import Mesh
from isles.data import Corpus
from isles.pipeline.ravnest.seats import ClusterSeats
from isles.training.clustered.node import ClusterWorker
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
        return _train_clustered(world, config, out, resume, corpus)
    trainer = (SwarmTrainer if config.pipeline.routing == "swarm" else trainer_of)(config, world, corpus)
    with trainer.memory:
        if resume is not None:
            assert out is not None
            checkpoints, seat = Checkpoints(out), world.rank
            if isinstance(trainer, SwarmTrainer):
                seat = seat_of(checkpoints, resume, world.rank)
            trainer.load_state_dict(checkpoints.read_shard(resume, seat))
        return trainer.run(out)


def _train_clustered(
    world: Mesh, config: Config, out: Path | None, resume: int | None, corpus: Corpus | None
) -> dict[str, Any] | None:
    """One that was lost when the checkpoint was written takes part again without a state: in its place, from the next
    average on, or standing by.
    """
    if resume is None:
        node = ClusterWorker(config, world, corpus)
        node.meet(range(world.size))
        node.average.begin()
        return node.run(out)
    assert out is not None
    checkpoints = Checkpoints(out)
    saved, absent = checkpoints.seats(resume), checkpoints.absent(resume)
    here = world.rank if world.rank in saved else next((worker for worker in saved if worker not in absent), saved[0])
    state = checkpoints.read_shard(resume, here)
    seats = ClusterSeats.of_plain(state["seats"], world.size)
    gone = set(range(world.size)) - set(saved)
    node = ClusterWorker(config, world, corpus, seats.without(gone - seats.lost).returned())
    node.meet(range(world.size))
    if world.rank in saved:
        node.load_state_dict(state)
    else:
        node.come_back(state)
    return node.run(out)
