"""How a worker of a run in clusters begins: with what was drawn, its own state, or none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from isles.comm.mesh import Mesh
from isles.data import Corpus
from isles.pipeline.ravnest.seats import ClusterSeats
from isles.training.clustered.node import ClusterWorker
from isles.training.config.sections import Config
from isles.training.records.checkpoint import Checkpoints


def train_clustered(
    world: Mesh, config: Config, out: Path | None, resume: int | None, corpus: Corpus | None
) -> dict[str, Any] | None:
    """What each worker of such a run does; see `isles.training.worker.train_worker`. One that was lost when the
    checkpoint was written takes part again without a state: in its place, from the next average on, or standing by.
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
