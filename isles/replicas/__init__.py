"""What copies of the model exchange, when, with whom, and how it is applied: one file a method.

`METHODS` is the table of names a user types; a method of one's own is named "package.module:Class".
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from isles.errors import unknown_name
from isles.imports import is_place, named

if TYPE_CHECKING:  # for type checkers, which see `isles.DiLoCo` through these; the names themselves come from METHODS
    from isles.replicas.methods.custom import Custom as Custom
    from isles.replicas.methods.dct_dp import DCTDP as DCTDP
    from isles.replicas.methods.ddp import DDP as DDP
    from isles.replicas.methods.delayed import DelayedDiLoCo as DelayedDiLoCo
    from isles.replicas.methods.demo.demo import DeMo as DeMo
    from isles.replicas.methods.diloco import DiLoCo as DiLoCo
    from isles.replicas.methods.dilocox.dilocox import DiLoCoX as DiLoCoX
    from isles.replicas.methods.eager import EagerDiLoCo as EagerDiLoCo
    from isles.replicas.methods.fedadam import FedAdam as FedAdam
    from isles.replicas.methods.fedavg import FedAvg as FedAvg
    from isles.replicas.methods.fedyogi import FedYogi as FedYogi
    from isles.replicas.methods.fsdp import FSDP as FSDP
    from isles.replicas.methods.ist.ist import IST as IST
    from isles.replicas.methods.localsgd import LocalSGD as LocalSGD
    from isles.replicas.methods.noloco import NoLoCo as NoLoCo
    from isles.replicas.methods.none import NoSync as NoSync
    from isles.replicas.methods.postlocal import PostLocalSGD as PostLocalSGD
    from isles.replicas.methods.slowmo import SlowMo as SlowMo
    from isles.replicas.methods.sparseloco import SparseLoCo as SparseLoCo
    from isles.replicas.methods.sparta import SPARTA as SPARTA
    from isles.replicas.methods.streaming import StreamingDiLoCo as StreamingDiLoCo
    from isles.replicas.methods.streaming_noloco import StreamingNoLoCo as StreamingNoLoCo
    from isles.replicas.sync import ReplicaSync

METHODS: dict[str, tuple[str, str]] = {
    "none": ("isles.replicas.methods.none:NoSync", "every worker trains alone"),
    "ddp": ("isles.replicas.methods.ddp:DDP", "average gradients every step"),
    "fsdp": ("isles.replicas.methods.fsdp:FSDP", "the same, every worker holding a share of weights and inner state"),
    "dct-dp": ("isles.replicas.methods.dct_dp:DCTDP", "average the gradients' largest entries every step"),
    "localsgd": ("isles.replicas.methods.localsgd:LocalSGD", "average parameters every H steps"),
    "diloco": ("isles.replicas.methods.diloco:DiLoCo", "outer Nesterov step on the mean change of H steps"),
    "streaming-diloco": (
        "isles.replicas.methods.streaming:StreamingDiLoCo",
        "DiLoCo by fragments, landing some steps later",
    ),
    "delayed": ("isles.replicas.methods.delayed:DelayedDiLoCo", "DiLoCo whose means arrive a round late"),
    "eager": ("isles.replicas.methods.eager:EagerDiLoCo", "the same, with the worker's own share fresh"),
    "noloco": ("isles.replicas.methods.noloco:NoLoCo", "outer step with one random partner every H steps"),
    "streaming-noloco": (
        "isles.replicas.methods.streaming_noloco:StreamingNoLoCo",
        "NoLoCo by fragments, landing later",
    ),
    "fedavg": ("isles.replicas.methods.fedavg:FedAvg", "average the changes of H steps"),
    "fedadam": ("isles.replicas.methods.fedadam:FedAdam", "outer Adam step on the mean change of H steps"),
    "fedyogi": ("isles.replicas.methods.fedyogi:FedYogi", "outer Yogi step on the mean change of H steps"),
    "slowmo": ("isles.replicas.methods.slowmo:SlowMo", "outer heavy ball on the mean change of H steps"),
    "postlocal-sgd": (
        "isles.replicas.methods.postlocal:PostLocalSGD",
        "average parameters every step, later every H steps",
    ),
    "sparta": ("isles.replicas.methods.sparta:SPARTA", "average a random part of the parameters every step"),
    "sparseloco": ("isles.replicas.methods.sparseloco:SparseLoCo", "the largest entries of the mean change, in 2 bits"),
    "dilocox": (
        "isles.replicas.methods.dilocox.dilocox:DiLoCoX",
        "low-rank 4-bit DiLoCo whose means arrive a round late",
    ),
    "demo": (
        "isles.replicas.methods.demo.demo:DeMo",
        "the largest coefficients of every worker's momentum, every step",
    ),
    "ist": ("isles.replicas.methods.ist.ist:IST", "a narrow part of the model each, divided anew every H steps"),
    "custom": ("isles.replicas.methods.custom:Custom", "any cadence, mixing, codec, reading, rule and landing"),
}


def method(name: str) -> type[ReplicaSync]:
    """The class behind a name of `METHODS`, or behind "package.module:Class". ValueError names what is wrong."""
    place = METHODS[name][0] if name in METHODS else name
    if ":" not in place:
        raise ValueError(unknown_name("method", name, METHODS) + ", or package.module:Class for your own")
    if not is_place(place):
        raise ValueError(f"replicas.method = {name!r}: write package.module:Class")
    found = named(f"method {name!r}", place)
    from isles.replicas.sync import ReplicaSync

    if not (isinstance(found, type) and issubclass(found, ReplicaSync)):
        raise ValueError(f"method {name!r} is no isles.ReplicaSync: derive its class from ReplicaSync or OuterSync")
    return found
