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
    "OuterSync": "isles.replicas.outer",
    "NoSync": "isles.replicas.none",
    "DDP": "isles.replicas.ddp",
    "FSDP": "isles.replicas.fsdp",
    "shard": "isles.replicas.sharded",
    "DCTDP": "isles.replicas.dct_dp",
    "LocalSGD": "isles.replicas.localsgd",
    "DiLoCo": "isles.replicas.diloco",
    "StreamingDiLoCo": "isles.replicas.streaming",
    "DelayedDiLoCo": "isles.replicas.delayed",
    "EagerDiLoCo": "isles.replicas.eager",
    "NoLoCo": "isles.replicas.noloco",
    "StreamingNoLoCo": "isles.replicas.streaming_noloco",
    "FedAvg": "isles.replicas.fedavg",
    "DiLoCoX": "isles.replicas.dilocox",
    "SlowMo": "isles.replicas.slowmo",
    "PostLocalSGD": "isles.replicas.postlocal",
    "SPARTA": "isles.replicas.sparta",
    "SparseLoCo": "isles.replicas.sparseloco",
    "DeMo": "isles.replicas.demo",
    "IST": "isles.replicas.ist",
    "Custom": "isles.replicas.custom",
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
    from isles.replicas.custom import Custom
    from isles.replicas.dct_dp import DCTDP
    from isles.replicas.ddp import DDP
    from isles.replicas.delayed import DelayedDiLoCo
    from isles.replicas.demo import DeMo
    from isles.replicas.diloco import DiLoCo
    from isles.replicas.dilocox import DiLoCoX
    from isles.replicas.eager import EagerDiLoCo
    from isles.replicas.fedavg import FedAvg
    from isles.replicas.fsdp import FSDP
    from isles.replicas.ist import IST
    from isles.replicas.localsgd import LocalSGD
    from isles.replicas.noloco import NoLoCo
    from isles.replicas.none import NoSync
    from isles.replicas.outer import OuterSync
    from isles.replicas.postlocal import PostLocalSGD
    from isles.replicas.sharded import shard
    from isles.replicas.slowmo import SlowMo
    from isles.replicas.sparseloco import SparseLoCo
    from isles.replicas.sparta import SPARTA
    from isles.replicas.streaming import StreamingDiLoCo
    from isles.replicas.streaming_noloco import StreamingNoLoCo
    from isles.replicas.sync import ReplicaSync


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module 'isles' has no attribute {name!r}")
    return getattr(import_module(_NAMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
