"""How a worker of a run in clusters begins: in a world of fixed size with what was drawn, its own state, or none; where
workers come and leave as a founder, or later.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from isles.comm.errors import PeerLost
from isles.comm.mesh import Mesh
from isles.data import Corpus
from isles.network.clusters.growing import ClusterGrowth
from isles.pipeline.ravnest.entering import ask_in
from isles.pipeline.ravnest.seats import ClusterSeats
from isles.pipeline.swarm.post import Post
from isles.training.clustered.cuts import cluster_cuts, first_blocks, model_load, post_of
from isles.training.clustered.node import ClusterWorker
from isles.training.config.sections import Config
from isles.training.records.checkpoint import Checkpoints
from isles.training.step import Left


def train_clustered(
    world: Mesh, config: Config, out: Path | None, resume: int | None, corpus: Corpus | None
) -> dict[str, Any] | None:
    """What each worker of such a run does; see `isles.training.worker.train_worker`. One that was lost when the
    checkpoint was written takes part again without a state: in its place, from the next average on, or standing by.
    """
    if resume is None:
        return found(config, world, corpus, range(world.size)).run(out)
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


def found(
    config: Config,
    world: Mesh,
    corpus: Corpus | None,
    founders: Sequence[int],
    post: Post | None = None,
    growth: ClusterGrowth | None = None,
) -> ClusterWorker:
    """One of the first, `founders` of `world`, which has positions for all who may come. post, growth: as in
    `ClusterWorker`. ValueError where they fill no cluster.
    """
    cuts = [first_blocks(cut) for cut in cluster_cuts(config)]
    seats = ClusterSeats.of(cuts, founders)
    worker = ClusterWorker(config, world, corpus, seats, post=post, growth=growth)
    worker.meet(founders)
    worker.average.begin()
    return worker


def enter(
    config: Config,
    world: Mesh,
    corpus: Corpus,
    others: Sequence[int],
    told: int,
    post: Post | None = None,
    gives_up: Callable[[], bool] = lambda: False,
) -> ClusterWorker:
    """One that comes later, once the `others` who are left have let it in. told: see
    `isles.network.clusters.telling`. Left where it has come too late, or gives up before.
    """
    post = post or post_of(config, world)
    try:
        welcome = ask_in(post, others, told, gives_up)
    except PeerLost:
        raise Left from None
    if welcome is None:
        raise Left
    worker = ClusterWorker(config, world, corpus, welcome.seats, post=post, growth=growth_of(config))
    worker.come(welcome)
    return worker


def growth_of(config: Config) -> ClusterGrowth:
    """How new clusters are made of those who wait."""
    return ClusterGrowth(model_load(config, cluster_cuts(config)[0].costs), config.pipeline.ravnest.spares)
