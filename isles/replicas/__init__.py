"""What copies of the model exchange, when, with whom, and how it is applied: one file a method.

`METHODS` is the table of names a user types; a method of one's own is named "package.module:Class".

`methods`            the methods; `parts`: the six parts that most are put together from
`sync`               `ReplicaSync`, the base of all; `loop`: of those that exchange parameters; `gradient`: gradients
`island`             several workers that are one replica
`replica`            what a worker holds of its replica; `flat`: parameters as one vector; `start`: all begin as one
`watch`              what a user may do beside an optimizer, checked around each step
`config`             settings that methods share, and what of them `isles tune` searches
`exchange_schedule`  what a run will exchange and hold, for plans
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from isles.base.errors import unknown_name
from isles.base.imports import import_target, is_import_target

if TYPE_CHECKING:  # for type checkers, which see `isles.DiLoCo` through these; the names themselves come from METHODS
    from isles.replicas.config import MethodConfig
    from isles.replicas.methods.custom.custom import Custom as Custom
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


class MethodRow(NamedTuple):
    """target: module:Class. config: that of its settings, whose file loads no torch. what: what the method does."""

    target: str
    config: str
    what: str


def _row(target: str, config: str, what: str) -> MethodRow:
    return MethodRow(f"isles.replicas.methods.{target}", f"isles.replicas.{config}", what)


METHODS: dict[str, MethodRow] = {
    "none": _row("none:NoSync", "methods.config:NoneConfig", "every worker trains alone"),
    "ddp": _row("ddp:DDP", "gradient.config:DDPConfig", "average gradients every step"),
    "fsdp": _row(
        "fsdp:FSDP", "gradient.config:FSDPConfig", "the same, every worker holding a share of weights and inner state"
    ),
    "dct-dp": _row("dct_dp:DCTDP", "gradient.config:DCTDPConfig", "average the gradients' largest entries every step"),
    "localsgd": _row("localsgd:LocalSGD", "methods.config:LocalSGDConfig", "average parameters every H steps"),
    "diloco": _row("diloco:DiLoCo", "methods.config:DiLoCoConfig", "outer Nesterov step on the mean change of H steps"),
    "streaming-diloco": _row(
        "streaming:StreamingDiLoCo", "methods.config:StreamingConfig", "DiLoCo by fragments, landing some steps later"
    ),
    "delayed": _row("delayed:DelayedDiLoCo", "methods.config:DelayedConfig", "DiLoCo whose means arrive a round late"),
    "eager": _row("eager:EagerDiLoCo", "methods.config:EagerConfig", "the same, with the worker's own share fresh"),
    "noloco": _row("noloco:NoLoCo", "methods.config:NoLoCoConfig", "outer step with one random partner every H steps"),
    "streaming-noloco": _row(
        "streaming_noloco:StreamingNoLoCo",
        "methods.config:StreamingNoLoCoConfig",
        "NoLoCo by fragments, landing later",
    ),
    "fedavg": _row("fedavg:FedAvg", "methods.config:FedAvgConfig", "average the changes of H steps"),
    "fedadam": _row("fedadam:FedAdam", "methods.config:FedAdamConfig", "outer Adam step on the mean change of H steps"),
    "fedyogi": _row("fedyogi:FedYogi", "methods.config:FedAdamConfig", "outer Yogi step on the mean change of H steps"),
    "slowmo": _row("slowmo:SlowMo", "methods.config:SlowMoConfig", "outer heavy ball on the mean change of H steps"),
    "postlocal-sgd": _row(
        "postlocal:PostLocalSGD",
        "methods.config:PostLocalSGDConfig",
        "average parameters every step, later every H steps",
    ),
    "sparta": _row(
        "sparta:SPARTA", "methods.config:SPARTAConfig", "average a random part of the parameters every step"
    ),
    "sparseloco": _row(
        "sparseloco:SparseLoCo", "methods.config:SparseLoCoConfig", "the largest entries of the mean change, in 2 bits"
    ),
    "dilocox": _row(
        "dilocox.dilocox:DiLoCoX",
        "methods.dilocox.config:DiLoCoXConfig",
        "low-rank 4-bit DiLoCo whose means arrive a round late",
    ),
    "demo": _row(
        "demo.demo:DeMo",
        "methods.demo.config:DeMoConfig",
        "the largest coefficients of every worker's momentum, every step",
    ),
    "ist": _row(
        "ist.ist:IST", "methods.config:ISTConfig", "a narrow part of the model each, divided anew every H steps"
    ),
    "custom": _row(
        "custom.custom:Custom",
        "methods.custom.config:CustomConfig",
        "any cadence, mixing, codec, reading, rule and landing",
    ),
}


def canonical(name: str) -> str:
    """A name of `METHODS`, in whatever case, as it stands there, or package.module:Class; ValueError for others."""
    if name.casefold() in METHODS:
        return name.casefold()
    if ":" not in name:
        raise ValueError(unknown_name("method", name, METHODS) + ", or package.module:Class for your own")
    if not is_import_target(name):
        raise ValueError(f"replicas.method = {name!r}: write package.module:Class")
    return name


def config_of(name: str) -> type[MethodConfig]:
    """The class of the settings of `name`, as in `method`. Loads no torch for a name of `METHODS`."""
    name = canonical(name)
    return import_target(f"settings of {name}", METHODS[name].config) if name in METHODS else method(name).Config


def method(name: str) -> type[ReplicaSync]:
    """The class behind a name of `METHODS`, or behind "package.module:Class". ValueError names what is wrong."""
    name = canonical(name)
    target = METHODS[name].target if name in METHODS else name
    found = import_target(f"method {name!r}", target)
    from isles.replicas.sync import ReplicaSync

    if not (isinstance(found, type) and issubclass(found, ReplicaSync)):
        raise ValueError(f"method {name!r} is no isles.ReplicaSync: derive its class from ReplicaSync or OuterSync")
    return found
