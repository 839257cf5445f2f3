"""How a worker begins in a run in clusters where workers come and leave: as a founder, or later."""

from __future__ import annotations

from collections.abc import Callable, Sequence

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
from isles.training.step import Left


def found(
    config: Config,
    world: Mesh,
    corpus: Corpus,
    founders: Sequence[int],
    post: Post | None = None,
) -> ClusterWorker:
    """One of the first, `founders` of `world`, which has positions for all who may come. ValueError where they fill no
    cluster.
    """
    cuts = [first_blocks(cut) for cut in cluster_cuts(config)]
    seats = ClusterSeats.of(cuts, founders)
    worker = ClusterWorker(config, world, corpus, seats, post=post, growth=growth_of(config))
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
