"""Isles: train one language model on poorly connected workers.

    world = isles.init()
    optimizer = isles.NoLoCo(model, torch.optim.AdamW(model.parameters(), lr=6e-4), world.outer, sync_every=50)

Names are imported on first use, so `import isles` is quick and loads no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from isles.base.imports import on_first_use
from isles.base.version import __version__
from isles.replicas import METHODS

if TYPE_CHECKING:
    from isles.comm.errors import DeadlinePassed, Diverged, PeerLost, WorkerFailed
    from isles.comm.group import Group
    from isles.comm.mesh import Mesh, init, mesh
    from isles.comm.transport import Deadlines
    from isles.comm.virtual.cluster import run_virtual
    from isles.launch.workers import run_local
    from isles.network.links import Links
    from isles.network.pauses import Pauses
    from isles.pipeline.config import PipelineConfig
    from isles.pipeline.pipeline import Pipeline
    from isles.replicas import *  # every method by its class
    from isles.replicas import method
    from isles.replicas.island.fsdp import shard
    from isles.replicas.loop.outer import OuterSync
    from isles.replicas.replica import Plain
    from isles.replicas.sync import ReplicaSync, unwrap

_names, __getattr__, __dir__ = on_first_use(
    __name__,
    {
        "isles.comm.errors": "DeadlinePassed Diverged PeerLost WorkerFailed",
        "isles.comm.group": "Group",
        "isles.comm.mesh": "Mesh init mesh",
        "isles.comm.transport": "Deadlines",
        "isles.comm.virtual.cluster": "run_virtual",
        "isles.launch.workers": "run_local",
        "isles.network.links": "Links",
        "isles.network.pauses": "Pauses",
        "isles.pipeline.config": "PipelineConfig",
        "isles.pipeline.pipeline": "Pipeline",
        "isles.replicas": "METHODS method",
        "isles.replicas.island.fsdp": "shard",
        "isles.replicas.loop.outer": "OuterSync",
        "isles.replicas.replica": "Plain",
        "isles.replicas.sync": "ReplicaSync unwrap",
        **dict(row.target.split(":") for row in METHODS.values()),
    },
)
__all__ = ["__version__", *_names]
