"""Isles: train one language model on poorly connected workers.

    world = isles.init()
    optimizer = isles.NoLoCo(model, torch.optim.AdamW(model.parameters(), lr=6e-4), world.outer, sync_every=50)

Names are imported on first use, so `import isles` is quick and loads no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

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
    "ReplicaSync": "isles.replicas.sync",
    "OuterSync": "isles.replicas.loop.outer",
    "NoSync": "isles.replicas.methods.none",
    "DDP": "isles.replicas.methods.ddp",
    "FSDP": "isles.replicas.methods.fsdp",
    "shard": "isles.replicas.island.sharded",
    "DCTDP": "isles.replicas.methods.dct_dp",
    "LocalSGD": "isles.replicas.methods.localsgd",
    "DiLoCo": "isles.replicas.methods.diloco",
    "StreamingDiLoCo": "isles.replicas.methods.streaming",
    "DelayedDiLoCo": "isles.replicas.methods.delayed",
    "EagerDiLoCo": "isles.replicas.methods.eager",
    "NoLoCo": "isles.replicas.methods.noloco",
    "StreamingNoLoCo": "isles.replicas.methods.streaming_noloco",
    "FedAvg": "isles.replicas.methods.fedavg",
    "DiLoCoX": "isles.replicas.methods.dilocox.dilocox",
    "SlowMo": "isles.replicas.methods.slowmo",
    "PostLocalSGD": "isles.replicas.methods.postlocal",
    "SPARTA": "isles.replicas.methods.sparta",
    "SparseLoCo": "isles.replicas.methods.sparseloco",
    "DeMo": "isles.replicas.methods.demo.demo",
    "IST": "isles.replicas.methods.ist.ist",
    "Custom": "isles.replicas.methods.custom",
    "METHODS": "isles.replicas",
    "method": "isles.replicas",
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
    from isles.replicas import METHODS, method
    from isles.replicas.island.sharded import shard
    from isles.replicas.loop.outer import OuterSync
    from isles.replicas.methods.custom import Custom
    from isles.replicas.methods.dct_dp import DCTDP
    from isles.replicas.methods.ddp import DDP
    from isles.replicas.methods.delayed import DelayedDiLoCo
    from isles.replicas.methods.demo.demo import DeMo
    from isles.replicas.methods.diloco import DiLoCo
    from isles.replicas.methods.dilocox.dilocox import DiLoCoX
    from isles.replicas.methods.eager import EagerDiLoCo
    from isles.replicas.methods.fedavg import FedAvg
    from isles.replicas.methods.fsdp import FSDP
    from isles.replicas.methods.ist.ist import IST
    from isles.replicas.methods.localsgd import LocalSGD
    from isles.replicas.methods.noloco import NoLoCo
    from isles.replicas.methods.none import NoSync
    from isles.replicas.methods.postlocal import PostLocalSGD
    from isles.replicas.methods.slowmo import SlowMo
    from isles.replicas.methods.sparseloco import SparseLoCo
    from isles.replicas.methods.sparta import SPARTA
    from isles.replicas.methods.streaming import StreamingDiLoCo
    from isles.replicas.methods.streaming_noloco import StreamingNoLoCo
    from isles.replicas.sync import ReplicaSync


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module 'isles' has no attribute {name!r}")
    return getattr(import_module(_NAMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
