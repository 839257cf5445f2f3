"""How a worker begins in a run in clusters where workers come and leave: as a founder, or later."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

from isles.comm.errors import PeerLost
from isles.comm.mesh import Mesh
from isles.data import Corpus
from isles.network.clusters.growing import ClusterGrowth
from isles.pipeline.ravnest.entering import ClusterEntrance
from isles.pipeline.ravnest.seats import ClusterSeats
from isles.training.clustered.cuts import cluster_cuts, first_blocks, model_load
from isles.training.clustered.node import ClusterWorker
from isles.training.config.sections import Config
from isles.training.step import Left
from isles.training.swarmed.step import of_all


def found(
    config: Config,
    world: Mesh,
    corpus: Corpus,
    founders: Sequence[int],
    entrance: ClusterEntrance | None = None,
) -> ClusterWorker:
    """One of the first, `founders` of `world`, which has positions for all who may come. ValueError where they fill no
    cluster.
    """
    cuts = [first_blocks(cut) for cut in cluster_cuts(config)]
    own, seats = entrance or ClusterEntrance(world.world, run_number(config)), ClusterSeats.of(cuts, founders)
    worker = ClusterWorker(config, world, corpus, seats, entrance=own, growth=growth_of(config))
    worker.meet(founders)
    worker.average.begin()
    return worker


def enter(
    config: Config,
    world: Mesh,
    corpus: Corpus,
    others: Sequence[int],
    told: int,
    entrance: ClusterEntrance | None = None,
    gives_up: Callable[[], bool] = lambda: False,
) -> ClusterWorker:
    """One that comes later, once the `others` who are left have let it in. told: see
    `isles.network.clusters.telling`. Left where it has come too late, or gives up before.
    """
    entrance = entrance or ClusterEntrance(world.world, run_number(config))
    try:
        welcome = entrance.ask(others, told, gives_up)
    except PeerLost:
        raise Left from None
    if welcome is None:
        raise Left
    worker = ClusterWorker(config, world, corpus, welcome.seats, entrance=entrance, growth=growth_of(config))
    worker.come(welcome)
    return worker


def growth_of(config: Config) -> ClusterGrowth:
    """How new clusters are made of those who wait."""
    return ClusterGrowth(model_load(config, cluster_cuts(config)[0].costs), config.pipeline.ravnest.spares)


def run_number(config: Config) -> int:
    """That all workers of this run share, and those of another configuration do not."""
    return int.from_bytes(hashlib.sha256(of_all(config).encode()).digest()[:7], "little")
