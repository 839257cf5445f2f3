"""Isles: train one language model on poorly connected workers.

    world = isles.init()
    optimizer = isles.NoLoCo(model, torch.optim.AdamW(model.parameters(), lr=6e-4), world.outer, sync_every=50)

Names are imported on first use, so `import isles` is quick and loads no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from isles.replicas import METHODS
from isles.version import __version__

_NAMES = {
    "init": "isles.comm.mesh",
    "mesh": "isles.comm.mesh",
    "Mesh": "isles.comm.mesh",
    "run_local": "isles.launch.workers",
    "run_virtual": "isles.comm.virtual.run",
    "Links": "isles.network.links",
    "Pauses": "isles.network.pauses",
    "Deadlines": "isles.comm.transport",
    "Group": "isles.comm.group",
    "PeerLost": "isles.comm.errors",
    "DeadlinePassed": "isles.comm.errors",
    "Diverged": "isles.comm.errors",
    "WorkerFailed": "isles.comm.errors",
    "Pipeline": "isles.pipeline.pipeline",
    "PipelineConfig": "isles.pipeline.config",
    "Plain": "isles.replicas.replica",
    "ReplicaSync": "isles.replicas.sync",
    "OuterSync": "isles.replicas.loop.outer",
    "shard": "isles.replicas.island.sharded",
    "unwrap": "isles.replicas.sync",
    "METHODS": "isles.replicas",
    "method": "isles.replicas",
    **{name: module for module, name in (row.place.split(":") for row in METHODS.values())},
}

__all__ = ["__version__", *_NAMES]

if TYPE_CHECKING:
    from isles.comm.errors import DeadlinePassed, Diverged, PeerLost, WorkerFailed
    from isles.comm.group import Group
    from isles.comm.mesh import Mesh, init, mesh
    from isles.comm.transport import Deadlines
    from isles.comm.virtual.run import run_virtual
    from isles.launch.workers import run_local
    from isles.network.links import Links
    from isles.network.pauses import Pauses
    from isles.pipeline.config import PipelineConfig
    from isles.pipeline.pipeline import Pipeline
    from isles.replicas import *  # every method by its class
    from isles.replicas import method
    from isles.replicas.island.sharded import shard
    from isles.replicas.loop.outer import OuterSync
    from isles.replicas.replica import Plain
    from isles.replicas.sync import ReplicaSync, unwrap


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module 'isles' has no attribute {name!r}")
    return getattr(import_module(_NAMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
